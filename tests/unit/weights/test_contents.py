"""A content's name: of its size and its pieces, and nothing else has it."""

from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.records import PIECE_BYTES
from p2prl.weights.contents import check_content, content_name, content_of, name_of_file
from tests.unit.weights.transfers import data_of

hashes = st.binary(min_size=32, max_size=32)
lists = st.tuples(st.integers(0, 2**53), st.lists(hashes, max_size=4).map(tuple))


@given(lists, lists)
def test_two_sizes_or_lists_have_two_names(one: tuple, other: tuple) -> None:
    assert (content_name(*one) == content_name(*other)) == (one == other)


def test_a_name_is_as_ever() -> None:
    """Peers must agree on it."""
    name = content_name(PIECE_BYTES + 1, (bytes(32), bytes(range(32))))
    assert name.hex() == "8c1d0e93b89a995ad67e06606826babecf0c3225fd931db935d2c03c997ac76f"
    assert name == blake3(b"p2prl content 1\0\0\0\0\0\0\x40\0\x01" + bytes(32) + bytes(range(32))).digest()


@pytest.mark.parametrize("num_bytes", [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_a_file_is_named_by_its_pieces(tmp_path: Path, num_bytes: int) -> None:
    data, path = data_of(num_bytes), tmp_path / "file"
    path.write_bytes(data)
    content = content_of(path, "anchor", None)
    assert content.content_bytes == num_bytes
    assert content.pieces == tuple(
        blake3(data[at : at + PIECE_BYTES]).digest() for at in range(0, num_bytes, PIECE_BYTES)
    )
    assert content.content_hash == content_name(num_bytes, content.pieces) == name_of_file(path)
    check_content(content, num_bytes)


@given(at=st.integers(0, 2 * PIECE_BYTES), flip=st.integers(1, 255))
@settings(max_examples=20, deadline=None)
def test_a_file_with_another_byte_has_another_name(tmp_path_factory, at: int, flip: int) -> None:
    path, data = tmp_path_factory.mktemp("name") / "file", bytearray(2 * PIECE_BYTES + 1)
    path.write_bytes(data)
    name = name_of_file(path)
    data[at] ^= flip
    path.write_bytes(data)
    assert name_of_file(path) != name
