"""One step's delta by several schemes: bytes and seconds. No torch.

In: the state files before and after a step. Out: a `Pair`.

    delta     ours: `weights/delta.py`, hashes of both states included; `apply` has the check of the result in it
    zstd      the whole child at level 3: what the others' seconds are measured by
    xor_zstd  the states' exclusive or, at level 3
    pulse     PULSE (arXiv 2602.03839): of each tensor the changed places, by row and column, as differences in the
              narrowest integers that hold them (rows 8 or 16 bits, columns 16), then the new values; zstd level 1

Each reads the files and writes a file that is on the disk when the clock stops, as a node needs it; with the same number of
threads. Who begins alternates.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import zstandard

from p2prl.models.state import open_state
from p2prl.weights import delta

SCHEMES = ("delta", "zstd", "xor_zstd", "pulse")
_LEVEL, _PULSE_LEVEL = 3, 1
_CHUNK_BYTES = 2**22


class Pair(msgspec.Struct, frozen=True):
    """Of one step. `wall_s` and `cpu_s` are those of making each, and of `apply`."""

    rate: float
    step: int
    num_parameters: int
    num_changed: int
    full_bytes: int
    num_bytes: dict[str, int]
    wall_s: dict[str, float]
    cpu_s: dict[str, float]


def measure(parent: Path, child: Path, folder: Path, *, rate: float, step: int, threads: int) -> Pair:
    """Files go to `folder` and are removed."""
    files = {name: folder / f"bench.{name}" for name in (*SCHEMES, "apply")}
    info: list[delta.DeltaInfo] = []
    child_hash: list[bytes] = []

    def ours() -> None:
        info.append(delta.encode(parent, child, files["delta"], threads=threads))
        child_hash.append(delta.read_header(files["delta"]).child)

    def back() -> None:
        delta.apply(parent, [files["delta"]], files["apply"], expected=child_hash[0], threads=threads)

    work: list[tuple[str, Callable[[], None]]] = [
        ("delta", ours),
        ("zstd", lambda: zstd(child, files["zstd"], threads)),
        ("apply", back),
        ("xor_zstd", lambda: xor_zstd(parent, child, files["xor_zstd"], threads)),
        ("pulse", lambda: pulse(parent, child, files["pulse"], threads)),
    ]
    wall_s: dict[str, float] = {}
    cpu_s: dict[str, float] = {}
    try:
        for name, run in work if step % 2 else (work[1], work[0], *work[2:]):
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            wall_s[name], cpu_s[name] = time.perf_counter() - wall, time.process_time() - cpu
        num_bytes = {name: files[name].stat().st_size for name in SCHEMES}
    finally:
        for path in files.values():
            path.unlink(missing_ok=True)
    full = child.stat().st_size
    return Pair(rate, step, info[0].num_parameters, info[0].num_changed, full, num_bytes, wall_s, cpu_s)


def zstd(source: Path, out: Path, threads: int) -> None:
    with source.open("rb") as plain, out.open("wb") as packed:
        _compressor(_LEVEL, threads).copy_stream(plain, packed, size=source.stat().st_size)
        _to_disk(packed)


def xor_zstd(parent: Path, child: Path, out: Path, threads: int) -> None:
    packer = _compressor(_LEVEL, threads)
    with parent.open("rb") as before, child.open("rb") as after, out.open("wb") as file:
        with packer.stream_writer(file, size=child.stat().st_size, closefd=False) as packed:
            while old := before.read(_CHUNK_BYTES):
                new = np.frombuffer(after.read(_CHUNK_BYTES), np.uint8)
                packed.write((np.frombuffer(old, np.uint8) ^ new).data)
        _to_disk(file)


def pulse(parent: Path, child: Path, out: Path, threads: int) -> None:
    packer = _compressor(_PULSE_LEVEL, threads)
    with open_state(parent) as (old, old_data), open_state(child) as (new, new_data), out.open("wb") as file:
        with packer.stream_writer(file, closefd=False) as packed:
            for before, after in zip(old, new, strict=True):
                num = (after.end - after.begin) // 2
                was = np.frombuffer(old_data[before.begin : before.end], np.uint16, num)
                words = np.frombuffer(new_data[after.begin : after.end], np.uint16, num)
                places = np.flatnonzero(was != words)
                packed.write(b"".join(pulse_tensor(places, words[places], after.shape[-1] if after.shape[1:] else 1)))
        _to_disk(file)


def pulse_tensor(places: np.ndarray, values: np.ndarray, num_columns: int) -> tuple[bytes, ...]:
    """Their number, then row steps, column steps (from 0 in a new row) and values."""
    rows, columns = np.divmod(places, num_columns)
    row_steps = np.diff(rows, prepend=0)
    new_row = row_steps > 0
    new_row[:1] = True
    column_steps = np.where(new_row, columns, np.diff(columns, prepend=0))
    parts = (narrowest(row_steps), narrowest(column_steps, least_bytes=2), values)
    number = len(places).to_bytes(8, "little")
    return number, *(part.tobytes() for part in parts)


def narrowest(numbers: np.ndarray, least_bytes: int = 1) -> np.ndarray:
    """As unsigned integers of one, two, four bytes, whichever hold them."""
    most = int(numbers.max(initial=0))
    num_bytes = next(size for size in (1, 2, 4, 8) if size >= least_bytes and most < 2 ** (8 * size))
    return numbers.astype(f"<u{num_bytes}")


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _compressor(level: int, threads: int) -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=level, threads=threads if threads > 1 else 0)  # 0: in this very thread
