"""A second copy of the manifests, in a file that only grows: a corrupt database must not cost a lone node its chain.

In: rows of manifests. Out: the rows again, up to the first that is not whole.

Invariants: a row counts only if its checksum fits; whatever the file's bytes, reading ends quietly; what a write left
half-way is overwritten by the next one, so that it hides nothing that comes later. What a row says is proved where it is
used: manifests are signed.
"""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from p2prl.errors import StoreError

MAX_ROW_BYTES = 2 * 2**20
_HEADER = struct.Struct("<II")  # length, crc32


class Row(msgspec.Struct, frozen=True, array_like=True):
    """As the table has it."""

    id: bytes
    sealed: bytes
    term: int
    step: int
    parent: bytes


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._end: int | None = None  # of the last whole row; unknown before the first append

    def append(self, row: Row) -> None:
        data = msgspec.msgpack.encode(row)
        frame = _HEADER.pack(len(data), zlib.crc32(data)) + data
        try:
            with self._path.open("r+b" if self._path.exists() else "x+b") as file:
                if self._end is None:
                    self._end = max((end for _, end in _read(file)), default=0)
                file.seek(self._end)
                file.write(frame)
                file.truncate()
        except OSError as error:
            raise StoreError(f"can't write {self._path}: {error}; free some disk space") from error
        self._end += len(frame)

    def rows(self) -> Iterator[Row]:
        """Oldest first; nothing when there is no file."""
        try:
            with self._path.open("rb") as file:
                for row, _ in _read(file):
                    yield row
        except OSError:
            return


def _read(file: BinaryIO) -> Iterator[tuple[Row, int]]:
    """Whole rows with the place where each ends."""
    while len(header := file.read(_HEADER.size)) == _HEADER.size:
        length, checksum = _HEADER.unpack(header)
        data = file.read(min(length, MAX_ROW_BYTES))
        if len(data) != length or zlib.crc32(data) != checksum:
            return
        try:
            row = msgspec.msgpack.decode(data, type=Row)
        except msgspec.DecodeError:
            return
        yield row, file.tell()
