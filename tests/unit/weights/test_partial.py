"""A partial file: pieces in any order, kill -9 at any write, lists that lie, disks that fail."""

import errno
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.errors import StoreError
from p2prl.records import PIECE_BYTES
from p2prl.weights.partial import Disk, Partial, Piece, content_path, left_over, listed_pieces, part_paths
from tests.unit.weights.transfers import content_of, data_of

LAST_BYTES = 1000
DATA = data_of(3 * PIECE_BYTES + LAST_BYTES)
CONTENT = content_of(DATA)
KILLED = 17


def piece(index: int) -> bytes:
    return DATA[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]


class Deadly(Disk):
    """Ends the process at its nth write, after half of it; what is on the disk then is what kill -9 leaves."""

    def __init__(self, deadly_write: int) -> None:
        self._left = deadly_write

    def _dies_now(self) -> bool:
        self._left -= 1
        return self._left < 0

    def write(self, file: int, data: Piece, offset: int) -> None:
        if self._dies_now():
            os.pwrite(file, data[: PIECE_BYTES // 2], offset)
            os._exit(KILLED)
        super().write(file, data, offset)

    def append(self, file: int, data: bytes) -> None:
        if self._dies_now():
            os.write(file, data[: len(data) // 2])
            os._exit(KILLED)
        super().append(file, data)

    def resize(self, file: int, num_bytes: int) -> None:
        if self._dies_now():
            os._exit(KILLED)
        super().resize(file, num_bytes)

    def sync(self, file: int) -> None:
        if self._dies_now():
            os._exit(KILLED)

    def rename(self, source: Path, target: Path) -> None:
        if self._dies_now():
            os._exit(KILLED)
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        if self._dies_now():
            os._exit(KILLED)
        super().unlink(path)


class Full(Disk):
    def write(self, file: int, data: Piece, offset: int) -> None:
        raise OSError(28, "No space left on device")


def fetch_all(folder: Path, disk: Disk | None = None, order: Sequence[int] = (2, 0, 3, 1)) -> list[int]:
    """As a transfer does; the pieces that were fetched this time."""
    if content_path(folder, CONTENT.content_hash).is_file():
        return []
    partial = Partial.open(folder, CONTENT, disk)
    fetched = [index for index in order if index not in partial.have]
    for index in fetched:
        assert partial.put(index, piece(index))
    partial.finish()
    partial.close()
    return fetched


def test_pieces_in_any_order_make_the_file(tmp_path: Path):
    assert fetch_all(tmp_path, order=(3, 1, 2, 0)) == [3, 1, 2, 0]
    assert content_path(tmp_path, CONTENT.content_hash).read_bytes() == DATA
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [CONTENT.content_hash.hex()]


def test_kill_9_at_each_write_loses_at_most_the_piece_that_was_being_written(tmp_path: Path):
    for deadly_write in range(30):
        folder = tmp_path / str(deadly_write)
        child = os.fork()
        if child == 0:
            fetch_all(folder, Deadly(deadly_write))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        fetched_again = fetch_all(folder)
        num_written = sum(1 for index in (2, 0, 3, 1) if index not in fetched_again)
        assert content_path(folder, CONTENT.content_hash).read_bytes() == DATA
        if os.waitstatus_to_exitcode(status) == 0:
            assert fetched_again == [] and deadly_write > 8
            return
        assert len(fetched_again) <= 4 - min(4, max(0, deadly_write - 1) // 2), "one resize, then two writes a piece"
        assert num_written + len(fetched_again) == 4
    pytest.fail("a transfer has no end of writes")


def test_a_wrong_piece_is_not_written(tmp_path: Path):
    partial = Partial.open(tmp_path, CONTENT)
    assert not partial.put(0, bytes(PIECE_BYTES))
    assert not partial.put(0, piece(1))
    assert not partial.put(3, piece(3) + b"more")
    assert partial.have == set() and not partial.is_whole
    assert os.stat(partial.path).st_blocks == 0, "nothing was written"
    with pytest.raises(ValueError, match="whole"):
        partial.finish()
    partial.close()


def test_a_list_that_lies_is_not_believed(tmp_path: Path):
    partial = Partial.open(tmp_path, CONTENT)
    partial.put(1, piece(1))
    partial.put(2, piece(2))
    partial.close()
    with partial.path.open("r+b") as file:  # a bit rots
        file.seek(PIECE_BYTES + 5)
        file.write(b"rot")
    again = Partial.open(tmp_path, CONTENT)
    assert again.have == {2}
    again.close()
    assert Partial.open(tmp_path, CONTENT).have == {2}, "the list was cleaned"


def test_a_part_of_another_length_is_cut_to_what_is_announced(tmp_path: Path):
    path = part_paths(tmp_path, CONTENT.content_hash)[0]
    path.parent.mkdir()
    path.write_bytes(DATA + bytes(10_000))
    assert fetch_all(tmp_path) == [2, 0, 3, 1]
    assert content_path(tmp_path, CONTENT.content_hash).read_bytes() == DATA


def test_a_full_disk_is_said_and_what_was_there_stays(tmp_path: Path):
    partial = Partial.open(tmp_path, CONTENT)
    partial.put(1, piece(1))
    partial.close()
    full = Partial.open(tmp_path, CONTENT, Full())
    with pytest.raises(StoreError, match="free some space"):
        full.put(0, piece(0))
    full.close()
    assert fetch_all(tmp_path) == [2, 0, 3]


class Refusing(Disk):
    """One kind of operation fails, until it is allowed again."""

    def __init__(self, kind: str, number: int) -> None:
        self.kind, self._number = kind, number

    def _meet(self, kind: str) -> None:
        if kind == self.kind:
            raise OSError(self._number, os.strerror(self._number))

    def write(self, file: int, data: Piece, offset: int) -> None:
        self._meet("write")
        super().write(file, data, offset)

    def append(self, file: int, data: bytes) -> None:
        self._meet("append")
        super().append(file, data)

    def resize(self, file: int, num_bytes: int) -> None:
        self._meet("resize")
        super().resize(file, num_bytes)

    def sync(self, file: int) -> None:
        self._meet("sync")

    def rename(self, source: Path, target: Path) -> None:
        self._meet("rename")
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._meet("unlink")
        super().unlink(path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("kind", ["write", "append", "resize", "sync", "rename", "unlink"])
def test_whatever_the_disk_refuses_is_said_and_it_goes_on_once_it_may(tmp_path: Path, kind: str, number: int):
    disk = Refusing(kind, number)
    with pytest.raises(StoreError, match=f"{os.strerror(number)}; free some space, or give this user the folder"):
        fetch_all(tmp_path, disk)
    disk.kind = ""
    fetched_again = fetch_all(tmp_path, disk)
    assert content_path(tmp_path, CONTENT.content_hash).read_bytes() == DATA
    assert fetched_again == ([2, 0, 3, 1] if kind in ("write", "append", "resize") else [])


@pytest.mark.parametrize("at", range(3))
def test_a_folder_that_may_not_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int):
    """Each file that is opened, and the folder itself."""
    real_open, num_opened = os.open, 0

    def refuse(*args: Any, **more: Any) -> int:
        nonlocal num_opened
        num_opened += 1
        if num_opened > at:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real_open(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        if at == 2:
            patch.setattr(os, "mkdir", refuse)
            num_opened = at
        with pytest.raises(StoreError, match="Permission denied; free some space, or give this user the folder"):
            Partial.open(tmp_path, CONTENT)
    assert fetch_all(tmp_path) == [2, 0, 3, 1]


def test_a_closed_file_takes_nothing_more(tmp_path: Path):
    partial = Partial.open(tmp_path, CONTENT)
    partial.close()
    partial.close()
    assert partial.put(0, piece(0)), "it was the right piece"
    assert partial.have == set()


def test_what_is_left_over_is_found(tmp_path: Path):
    partial = Partial.open(tmp_path, CONTENT)
    partial.put(0, piece(0))
    partial.close()
    assert left_over(tmp_path) == sorted(part_paths(tmp_path, CONTENT.content_hash))
    fetch_all(tmp_path)
    assert left_over(tmp_path) == []


@given(garbage=st.binary(max_size=64), cut=st.integers(0, 40), kept=st.sets(st.integers(0, 3)))
@settings(max_examples=30, deadline=None)
def test_any_list_whatever_names_nothing_that_is_not_there(tmp_path_factory, garbage: bytes, cut: int, kept: set[int]):
    folder = tmp_path_factory.mktemp("list")
    partial = Partial.open(folder, CONTENT)
    order = sorted(kept)
    random.Random(cut).shuffle(order)
    for index in order:
        partial.put(index, piece(index))
    partial.close()
    listed = part_paths(folder, CONTENT.content_hash)[1]
    listed.write_bytes(listed.read_bytes()[:cut] + garbage)
    again = Partial.open(folder, CONTENT)
    assert again.have <= kept
    assert set(order[: cut // 8]) <= again.have, "what the list named whole is kept"
    for index in again.have:
        assert os.pread(again._file, 100, index * PIECE_BYTES) == DATA[index * PIECE_BYTES :][:100]
    assert again.put(0, piece(0)) and 0 in again.have
    again.close()
    third = Partial.open(folder, CONTENT)
    assert third.have == again.have
    third.close()


@given(data=st.binary(max_size=200))
def test_a_list_of_any_bytes_is_read(data: bytes):
    assert listed_pieces(data, CONTENT) <= set(range(4))
