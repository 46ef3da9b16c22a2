"""The state file of a version: a safetensors file of bf16 tensors, its checks and its hash. No torch.

In: a path, possibly to bytes that a hostile peer sent. Out: tensor places, the 32-byte state hash, or an error.

Invariants: nothing of the file is believed before it was checked (header size, names, types, shapes, offsets that
cover the data exactly once); the hash depends on names, types, shapes and bytes alone, never on the file's layout or
metadata; memory stays bounded whatever the size of the file; the same tensors give the same file, byte for byte.
"""

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from p2prl.errors import BadRecord, StoreError

MAX_HEADER_BYTES = 4 * 2**20
MAX_NAME_BYTES = 512
MAX_DIMENSIONS = 8
BF16 = "BF16"

_DTYPE_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, BF16: 2}
_DTYPE_BYTES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}
_CHUNK_BYTES = 4 * 2**20
_DOMAIN = b"p2prl state 1\0"
_METADATA = "__metadata__"


class TensorPlace(msgspec.Struct, frozen=True):
    """Where a tensor lies: `begin` and `end` are byte offsets from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Payload(msgspec.Struct, frozen=True):
    """A bf16 tensor about to be written: `num_bytes` must be 2 * prod(shape); `read` gives them when asked."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], memoryview]

    @property
    def num_bytes(self) -> int:
        return 2 * prod(self.shape)


# -- reading --------------------------------------------------------------------------------------------------------


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key appears twice")
    return result


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _place(name: str, entry: object, data_begin: int) -> TensorPlace:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name[:64]!r} has not exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not name or len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"a tensor name is empty or over {MAX_NAME_BYTES} bytes")
    if not isinstance(dtype, str) or dtype not in _DTYPE_BYTES:
        raise ValueError(f"tensor {name[:64]!r} has an unknown type")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"tensor {name[:64]!r} has a shape or offsets that aren't lists of sizes")
    if len(shape) > MAX_DIMENSIONS or len(offsets) != 2:
        raise ValueError(f"tensor {name[:64]!r} has too many dimensions or not two offsets")
    if offsets[1] - offsets[0] != prod(shape) * _DTYPE_BYTES[dtype]:
        raise ValueError(f"tensor {name[:64]!r} has offsets that don't fit its shape")
    return TensorPlace(name, dtype, tuple(shape), data_begin + offsets[0], data_begin + offsets[1])


def parse_header(header: bytes, file_bytes: int) -> list[TensorPlace]:
    """Places sorted by name, of a file of `file_bytes` bytes whose JSON header is `header`; raises BadRecord."""
    data_begin = 8 + len(header)
    try:
        tree = json.loads(header, object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant)
        if not isinstance(tree, dict):
            raise BadRecord("not a weights file: its header is no object; fetch it from another peer")
        tree.pop(_METADATA, None)
        places = [_place(name, entry, data_begin) for name, entry in tree.items()]
    except (ValueError, RecursionError) as error:  # UnicodeError and JSONDecodeError are ValueErrors
        raise BadRecord(f"not a weights file: {str(error)[:200]}; fetch it from another peer") from error
    by_offset = sorted(places, key=lambda place: (place.begin, place.end))
    ends = [data_begin, *(place.end for place in by_offset)]
    if any(place.begin != end for place, end in zip(by_offset, ends, strict=False)) or ends[-1] != file_bytes:
        raise BadRecord("not a weights file: its tensors overlap, leave holes or end elsewhere than the file does")
    return sorted(places, key=lambda place: place.name)


@contextmanager
def open_state(path: Path) -> Iterator[tuple[list[TensorPlace], mmap.mmap]]:
    """Checked places sorted by name, and the file's bytes, valid inside the `with` block."""
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            start = file.read(8)
            if len(start) < 8:
                raise BadRecord(f"{path.name} is no weights file: it has {len(start)} bytes; fetch it again")
            (header_bytes,) = struct.unpack("<Q", start)
            if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise BadRecord(
                    f"{path.name} is no weights file: its header claims {header_bytes} bytes; fetch it again"
                )
            places = parse_header(file.read(header_bytes), file_bytes)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                yield places, data
    except OSError as error:
        raise StoreError(
            f"can't read the weights {path}: {error.strerror or error}; fetch or make them again"
        ) from error


def _frame(name: str, dtype: str, shape: Sequence[int], num_bytes: int) -> bytes:
    """What precedes a tensor's bytes in the hash: every part with its length, so that no two states look alike."""
    text = name.encode()
    parts = (struct.pack("<I", len(text)), text, struct.pack("<I", len(dtype)), dtype.encode())
    return b"".join(parts) + struct.pack(f"<I{len(shape)}QQ", len(shape), *shape, num_bytes)


def state_hash(path: Path) -> bytes:
    """blake3 over the tensors sorted by name. Raises BadRecord for a malformed file, StoreError if it can't be read."""
    with open_state(path) as (places, data):
        digest = blake3(_DOMAIN)
        for place in places:
            digest.update(_frame(place.name, place.dtype, place.shape, place.end - place.begin))
            for begin in range(place.begin, place.end, _CHUNK_BYTES):
                digest.update(data[begin : min(place.end, begin + _CHUNK_BYTES)])
    return digest.digest()


# -- writing --------------------------------------------------------------------------------------------------------


def _header(payloads: Sequence[Payload], metadata: Mapping[str, str]) -> bytes:
    tree: dict[str, object] = {_METADATA: metadata} if metadata else {}
    begin = 0
    for payload in payloads:
        end = begin + payload.num_bytes
        tree[payload.name] = {"dtype": BF16, "shape": list(payload.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(tree, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)  # data starts at a multiple of 8, as safetensors' own writer does


def write_payloads(
    path: Path, payloads: Sequence[Payload], metadata: Mapping[str, str] | None = None, durable: bool = True
) -> bytes:
    """Write bf16 tensors atomically (stage, fsync, rename) and return the state hash. `payloads` in any order.

    `metadata` is for other software; a version's file has none. Not `durable`: without the wait for the disk.
    """
    ordered = sorted(payloads, key=lambda payload: payload.name)
    assert all(first.name != second.name for first, second in pairwise(ordered)), "a tensor name appears twice"
    header = _header(ordered, metadata or {})
    digest = blake3(_DOMAIN)
    staged = path.with_name(f".{path.name}.{os.getpid()}.staged")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with staged.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            for payload in ordered:
                content = payload.read().cast("B")
                assert content.nbytes == payload.num_bytes, payload.name
                digest.update(_frame(payload.name, BF16, payload.shape, payload.num_bytes))
                digest.update(content)
                file.write(content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        staged.replace(path)
        if durable:
            _sync_folder(path.parent)
    except OSError as error:
        raise StoreError(f"can't write the weights {path}: {error.strerror or error}; free some disk space") from error
    finally:
        staged.unlink(missing_ok=True)
    return digest.digest()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
