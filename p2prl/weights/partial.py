"""A content on its way: a file with holes, and beside it the list of the pieces that were verified.

In: pieces of any order, from anybody. Out: the whole file under its name, or after a crash what was verified before.

Invariants: only a piece whose blake3 fits is written, at its place, never beyond what the content announces; the list
names a piece after it was written, and whoever opens it hashes again what it names: a torn or false list loses pieces
and is never an error. A name stands for one list of pieces, so a piece that fits is right for ever, and all of them are
the file. Methods block: call them in threads; a method of a closed file does nothing.
"""

import os
import struct
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from blake3 import blake3

from p2prl.errors import StoreError
from p2prl.records import PIECE_BYTES, Content, Hash
from p2prl.weights.messages import piece_bytes

PART, LIST, NEW = ".part", ".have", ".have.new"  # what the files end in
Piece = bytes | bytearray | memoryview
_RECORD = struct.Struct(">II")  # piece, crc32 of it under the content's hash


class Disk:
    """The writes of a partial file, one method a kind: a test makes each of them fail."""

    def write(self, file: int, data: Piece, offset: int) -> None:
        if os.pwrite(file, data, offset) != len(data):
            raise OSError("a piece could not be written whole")
        if sys.platform == "linux":  # it begins to write out now, and the sync at the end has little left to wait for
            os.posix_fadvise(file, offset, len(data), os.POSIX_FADV_DONTNEED)

    def append(self, file: int, data: bytes) -> None:
        if os.write(file, data) != len(data):
            raise OSError("the list of pieces could not be written whole")

    def resize(self, file: int, num_bytes: int) -> None:
        os.ftruncate(file, num_bytes)

    def sync(self, file: int) -> None:
        os.fsync(file)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)


def content_path(folder: Path, content_hash: bytes) -> Path:
    """Where a whole content lies."""
    name = content_hash.hex()
    return folder / name[:2] / name


def part_paths(folder: Path, content_hash: bytes) -> tuple[Path, Path]:
    """The partial file and its list of pieces."""
    target = content_path(folder, content_hash)
    return target.with_name(f".{target.name}{PART}"), target.with_name(f".{target.name}{LIST}")


def left_over(folder: Path) -> list[Path]:
    """Files of transfers that did not end, in `folder`; whoever collects garbage decides which to keep."""
    return sorted(path for end in (PART, LIST, NEW) for path in folder.glob(f"??/.{'?' * 64}{end}"))


def parts_in(folder: Path) -> Iterator[tuple[Hash, int]]:
    """The contents of which `folder` has a part, and `part_bytes` of each."""
    for path in folder.glob(f"??/.{'?' * 64}{LIST}"):
        with suppress(ValueError):  # somebody else's file
            name = bytes.fromhex(path.name[1:65])
            yield name, part_bytes(folder, name)


def part_bytes(folder: Path, content_hash: Hash) -> int:
    """Bytes of the pieces that its list names, at most; 0 where there is none."""
    part, listed = part_paths(folder, content_hash)
    try:
        return min(part.stat().st_size, PIECE_BYTES * (listed.stat().st_size // _RECORD.size))
    except OSError:
        return 0


class Partial:
    """Made by `open`."""

    def __init__(self, content: Content, target: Path, files: tuple[int, int], have: set[int], disk: Disk) -> None:
        self.content, self.target = content, target
        self.path = part_paths(target.parent.parent, content.content_hash)[0]
        self.have = have  # pieces that are verified and on disk
        self._file, self._list = files
        self._disk = disk
        self._lock = threading.Lock()
        self._is_open = True

    @classmethod
    def open(cls, folder: Path, content: Content, disk: Disk | None = None) -> "Partial":
        """A new one, or what is left of the last attempt."""
        disk = disk or Disk()
        target = content_path(folder, content.content_hash)
        part, listed = part_paths(folder, content.content_hash)
        files: list[int] = []
        try:
            with ExitStack() as undo:
                undo.callback(lambda: [os.close(file) for file in files])
                target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                files.append(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                if os.fstat(files[0]).st_size != content.content_bytes:
                    disk.resize(files[0], content.content_bytes)
                files.append(os.open(listed, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
                data = os.pread(files[1], 2 * _RECORD.size * len(content.pieces), 0)
                have = {index for index in listed_pieces(data, content) if _is_whole(files[0], content, index)}
                clean = b"".join(_record(index, content) for index in sorted(have))
                if sorted(_records(data)) != sorted(_records(clean)) or len(data) % _RECORD.size:
                    files[1] = _replace(listed, clean, files[1], disk)
                undo.pop_all()
        except OSError as error:
            raise _no_store(target, error) from error
        return cls(content, target, (files[0], files[1]), have, disk)

    def put(self, index: int, data: Piece) -> bool:
        """Verify and write one piece; whether it was the right one."""
        if blake3(data).digest() != self.content.pieces[index]:
            return False
        with self._lock:
            if self._is_open and index not in self.have:
                try:
                    self._disk.write(self._file, data, index * PIECE_BYTES)
                    self._disk.append(self._list, _record(index, self.content))
                except OSError as error:
                    raise _no_store(self.target, error) from error
                self.have.add(index)
        return True

    @property
    def is_whole(self) -> bool:
        return len(self.have) == len(self.content.pieces)

    @property
    def num_bytes(self) -> int:
        """Of the pieces that are here."""
        last = len(self.content.pieces) - 1
        cut = PIECE_BYTES - piece_bytes(self.content.content_bytes, last) if last in self.have else 0
        return PIECE_BYTES * len(self.have) - cut

    def finish(self) -> Path:
        """Give the whole file its name; what rotted since it was verified is found by whoever uses it."""
        part, listed = part_paths(self.target.parent.parent, self.content.content_hash)
        with self._lock:
            if not (self._is_open and self.is_whole):
                raise ValueError("only a whole, open file can be finished")
            try:
                self._disk.sync(self._file)
                self._disk.rename(part, self.target)
                _sync_folder(self.target.parent, self._disk)
                self._disk.unlink(listed)
            except OSError as error:
                raise _no_store(self.target, error) from error
        return self.target

    def close(self) -> None:
        """What was verified stays for the next time."""
        with self._lock:
            if self._is_open:
                self._is_open = False
                os.close(self._file)
                os.close(self._list)


def listed_pieces(data: bytes, content: Content) -> set[int]:
    """The pieces that a list names; what is torn, of another content or out of range is passed over."""
    found = set()
    for record in _records(data):
        index = _RECORD.unpack(record)[0]
        if index < len(content.pieces) and record == _record(index, content):
            found.add(index)
    return found


def _records(data: bytes) -> list[bytes]:
    return [data[at : at + _RECORD.size] for at in range(0, len(data) - _RECORD.size + 1, _RECORD.size)]


def _record(index: int, content: Content) -> bytes:
    return _RECORD.pack(index, zlib.crc32(index.to_bytes(4, "big") + content.content_hash))


def _is_whole(file: int, content: Content, index: int) -> bool:
    data = os.pread(file, piece_bytes(content.content_bytes, index), index * PIECE_BYTES)
    return blake3(data).digest() == content.pieces[index]


def _replace(listed: Path, clean: bytes, before: int, disk: Disk) -> int:
    """A new list in one step; a crash leaves the old or the new one."""
    staged = listed.with_name(f"{listed.name.removesuffix(LIST)}{NEW}")
    file = os.open(staged, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with ExitStack() as undo:
        undo.callback(os.close, file)
        undo.callback(_drop, staged)
        if clean:
            disk.append(file, clean)
        disk.rename(staged, listed)
        undo.pop_all()
    os.close(before)
    return file


def _drop(staged: Path) -> None:
    with suppress(OSError):  # what ended us is told of; the next start sweeps the file
        staged.unlink()


def _sync_folder(folder: Path, disk: Disk) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        disk.sync(file)
    finally:
        os.close(file)


def _no_store(target: Path, error: OSError) -> StoreError:
    fix = "free some space, or give this user the folder"
    return StoreError(f"can't store {target.name[:16]} in {target.parent.parent}: {error.strerror or error}; {fix}")
