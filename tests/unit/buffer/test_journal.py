"""The second copy of the manifests."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.buffer.journal import Journal, Row
from p2prl.errors import StoreError

rows = st.builds(
    Row,
    id=st.binary(min_size=32, max_size=32),
    sealed=st.binary(max_size=300),
    term=st.integers(0, 2**53),
    step=st.integers(0, 2**53),
    parent=st.binary(max_size=32),
)


def row(number: int) -> Row:
    return Row(bytes([number]) * 32, b"sealed" * number, 1, number, b"")


@given(st.lists(rows, max_size=8))
def test_what_was_appended_is_read_again_also_by_another_life(written: list[Row]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "manifests.log"
        for each in written:
            Journal(path).append(each)
        assert list(Journal(path).rows()) == written


@given(st.binary(max_size=200), st.integers(0, 3))
def test_any_bytes_end_the_reading_and_the_next_write_follows_the_last_whole_row(noise: bytes, whole: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "manifests.log"
        written = [row(number) for number in range(1, whole + 1)]
        for each in written:
            Journal(path).append(each)
        with path.open("ab") as file:
            file.write(noise)
        assert list(Journal(path).rows())[:whole] == written
        found = list(Journal(path).rows())
        Journal(path).append(row(9))
        assert list(Journal(path).rows()) == [*found, row(9)]


def test_a_cut_row_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "manifests.log"
    journal = Journal(path)
    journal.append(row(1))
    journal.append(row(2))
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        assert list(Journal(path).rows()) in ([], [row(1)])


def test_a_full_disk_costs_the_row_that_did_not_fit_alone(small_disk) -> None:
    disk = small_disk(4)
    journal = Journal(disk.path / "manifests.log")
    journal.append(row(1))
    disk.fill()
    big = Row(bytes(32), bytes(2**20), 1, 2, b"")
    with pytest.raises(StoreError, match="free some disk space"):
        journal.append(big)
    disk.free()
    journal.append(row(3))
    assert list(journal.rows()) == [row(1), row(3)]
