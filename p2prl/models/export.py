"""A version as a Hugging Face folder, or its adapters as a PEFT folder; in a child, since it needs torch.

In: a `Request` as JSON on stdin; the version's state file, the base model. Out: the folder, and one JSON line: `Written`
or {"error", "exit_code"}; progress on stderr.

    python -m p2prl.models.export < REQUEST

Invariants: the folder appears whole or not at all, and never in the place of one that has something in it; weights were
checked against the version's hash on their way; at most a few tensors are in memory at once.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from p2prl import __version__
from p2prl.errors import BadRecord, ConfigError, P2prlError, StoreError
from p2prl.models import builtin
from p2prl.models.card import Facts, Training, card
from p2prl.models.load import (
    RECEIPT_NAME,
    WEIGHTS_NAME,
    ModelFiles,
    load_tokenizer,
    parse_source,
    prepare,
    require_hash,
)
from p2prl.models.lora_rule import Lora
from p2prl.models.state import Payload, TensorPlace, open_state, state_hash, write_payloads

FACTS_NAME = "p2prl.json"
_FORMAT = {"format": "pt"}  # other software looks for it


class Request(msgspec.Struct, frozen=True):
    """`state`: the version's file, "" for version 0. `lora`: what the recipe says of adapters, if versions are such."""

    source: str
    base_hash: str  # hex
    models_cache: str
    state: str
    target: str
    adapter: bool
    lora: Lora | None
    training: Training


class Written(msgspec.Struct, frozen=True):
    folder: str
    kind: str  # whole, merged or adapter
    weights_hash: str  # hex
    num_bytes: int
    files: tuple[str, ...]


def export(request: Request, progress: Callable[[str], None]) -> Written:
    target = Path(request.target)
    check_target(target)
    files = prepare(request.source, Path(request.models_cache), progress)
    require_hash(files, bytes.fromhex(request.base_hash), request.source)
    staged = target.with_name(f".{target.name}.{os.getpid()}.staged")
    try:
        staged.mkdir(parents=True)
        if request.adapter:
            kind, weights_hash = "adapter", _write_adapter(request, files, staged)
        else:
            kind, weights_hash = _write_model(request, files, staged, progress)
        _write_card(request, staged, kind, weights_hash)
        _sync(staged)
        names = tuple(sorted(path.name for path in staged.iterdir()))
        num_bytes = sum(path.stat().st_size for path in staged.iterdir())
        os.rename(staged, target)  # in the place of an empty folder, of nothing else
    except OSError as error:
        raise StoreError(
            f"can't write {target}: {error.strerror or error}; free some space, or choose another"
        ) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return Written(str(target), kind, weights_hash, num_bytes, names)


def check_target(target: Path) -> None:
    """Raises ConfigError for a place that has something in it."""
    try:
        if target.is_dir() and not any(target.iterdir()):
            return
        if target.exists() or target.is_symlink():
            raise ConfigError(f"{target} is not empty; name a new folder, or empty this one first")
    except OSError as error:
        raise ConfigError(f"can't look into {target}: {error.strerror}; name another folder") from error


# -- weights --------------------------------------------------------------------------------------------------------


def _write_model(request: Request, files: ModelFiles, staged: Path, progress: Callable[[str], None]) -> tuple[str, str]:
    progress("writing the configuration and the tokenizer")
    skeleton = _write_config(files, staged)
    _write_tokenizer(request, files, staged, skeleton.config)
    progress("writing the weights")
    state = Path(request.state) if request.state else files.weights
    if request.lora is None or not request.state:
        digest = _copy(state, files.weights, staged / WEIGHTS_NAME)
        _require(request, digest)
        return "whole", digest.hex()
    return "merged", _merge(request, request.lora, files, skeleton, staged / WEIGHTS_NAME).hex()


def _copy(state: Path, base: Path, target: Path) -> bytes:
    with open_state(base) as (wanted, _):
        shapes = _shapes(wanted)
    with open_state(state) as (places, data):
        if _shapes(places) != shapes:
            raise BadRecord(f"the weights {state.name[:16]} are of another model than the recipe's; export another")
        return write_payloads(target, [_payload(place, data) for place in places], _FORMAT)


def _merge(request: Request, lora: Lora, files: ModelFiles, skeleton: Any, target: Path) -> bytes:
    import torch

    from p2prl.models.lora import find_targets, merge, read_pairs
    from p2prl.models.tensors import payload_of

    _require(request, state_hash(Path(request.state)))
    targets = find_targets(skeleton, lora.targets)
    pairs = read_pairs(Path(request.state), targets, lora.rank)

    def merged(place: TensorPlace, data: Any) -> Payload:
        def read() -> memoryview:
            content = bytearray(data[place.begin : place.end])
            base = torch.frombuffer(content, dtype=torch.bfloat16).reshape(place.shape)
            whole = merge(base, pairs[place.name], lora.scale, targets[place.name].transposed)
            return payload_of(place.name, whole).read()

        return Payload(place.name, place.shape, read)

    with open_state(files.weights) as (places, data):
        payloads = [merged(place, data) if place.name in pairs else _payload(place, data) for place in places]
        return write_payloads(target, payloads, _FORMAT)


def _write_adapter(request: Request, files: ModelFiles, staged: Path) -> str:
    from p2prl.models.lora import find_targets, read_pairs
    from p2prl.models.peft_folder import write_peft

    if request.lora is None:
        raise ConfigError(
            f"the recipe {request.training.recipe_name} trains all weights: there are no adapters; leave --adapter out"
        )
    if not request.state:
        raise ConfigError("version 0 is the base model, without adapters; leave --adapter out")
    digest = state_hash(Path(request.state))
    _require(request, digest)
    targets = find_targets(skeleton_of(files), request.lora.targets)
    write_peft(staged, request.lora, targets, read_pairs(Path(request.state), targets, request.lora.rank))
    return digest.hex()


def _payload(place: TensorPlace, data: Any) -> Payload:
    return Payload(place.name, place.shape, lambda: memoryview(data[place.begin : place.end]))


def _shapes(places: list[TensorPlace]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {place.name: (place.dtype, place.shape) for place in places}


def _require(request: Request, found: bytes) -> None:
    if found.hex() != request.training.state_hash:
        raise StoreError(
            f"the weights of version {request.training.version} on this disk are corrupt: their hash is another. "
            "See: p2prl weights verify"
        )


# -- what goes with them --------------------------------------------------------------------------------------------


def skeleton_of(files: ModelFiles) -> Any:
    """The architecture without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        if files.folder is None:
            return builtin.make_builtin()
        config = AutoConfig.from_pretrained(files.folder, local_files_only=True, trust_remote_code=False)
        return AutoModelForCausalLM.from_config(config)


def _write_config(files: ModelFiles, staged: Path) -> Any:
    import torch

    if files.folder is not None:
        for path in files.folder.iterdir():
            if path.is_file() and path.name not in (WEIGHTS_NAME, RECEIPT_NAME):
                shutil.copyfile(path, staged / path.name)
    skeleton = skeleton_of(files)
    skeleton.config.architectures = [type(skeleton).__name__]
    skeleton.config.dtype = torch.bfloat16
    skeleton.config.save_pretrained(staged)
    return skeleton


def _write_tokenizer(request: Request, files: ModelFiles, staged: Path, config: Any) -> None:
    """The model's own, and where answers end for p2prl: `generate` is to stop there too."""
    from transformers import GenerationConfig

    tokenizer = load_tokenizer(request.source, Path(request.models_cache))
    if files.folder is None:
        from p2prl.models.char_folder import write_char_tokenizer

        write_char_tokenizer(staged)
    if (staged / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(staged)
    else:
        generation = GenerationConfig.from_model_config(config)
    generation.eos_token_id, generation.pad_token_id = list(tokenizer.stop_ids), tokenizer.pad_id
    generation.save_pretrained(staged)


def _write_card(request: Request, staged: Path, kind: str, weights_hash: str) -> None:
    training, is_builtin = request.training, request.source == "builtin:addition"
    facts = Facts(kind, weights_hash, licence_of(request.source), is_builtin, f"p2prl {__version__}")
    (staged / "README.md").write_text(card(training, facts), "utf-8")
    record = {"schema": 1, "kind": kind, "weights_hash": weights_hash, "training": training}
    (staged / FACTS_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")


def licence_of(source: str) -> str:
    """The base model's, as its folder's own card names it; "" when it is not known."""
    kind, target = parse_source(source)
    if kind == "builtin":
        return "apache-2.0"  # this package's
    try:
        text = (Path(target) / "README.md").read_text("utf-8")[:65536] if kind == "folder" else ""
    except (OSError, UnicodeDecodeError):
        return ""
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    found = re.search(r"^license:\s*['\"]?([A-Za-z0-9.+-]{1,40})['\"]?\s*$", front[1] if front else "", re.MULTILINE)
    return found[1] if found else ""


def _sync(folder: Path) -> None:
    """All of it is on the disk before it has its name."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def main() -> int:
    try:
        request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
        written = export(request, lambda text: print(text, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        return 130
    except P2prlError as error:
        print(msgspec.json.encode({"error": str(error), "exit_code": error.exit_code}).decode())
        return 1
    print(msgspec.json.encode(written).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
