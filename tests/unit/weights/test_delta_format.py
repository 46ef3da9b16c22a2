import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from p2prl.errors import BadRecord, StoreError
from p2prl.weights import delta_format
from p2prl.weights.delta_chunk import Changes, difference
from p2prl.weights.delta_format import (
    HEADER_BYTES,
    Header,
    Writer,
    pack,
    read_changes,
    read_header,
    unpack,
    verified_bytes,
)
from p2prl.weights.delta_positions import Scratch
from tests.unit.weights.states import stepped, weights

PARENT, CHILD = bytes(range(32)), bytes(range(32, 64))
NUM_WORDS = 4000


def changes(seed: int, rate: float = 1e-5) -> Changes:
    words = weights(NUM_WORDS, seed)
    return difference(words, stepped(words, seed + 1, rate), False, Scratch())


def write(path: Path, chunks: list[Changes]) -> Header:
    with path.open("w+b") as file:
        writer = Writer(file)
        for one in chunks:
            writer.add(one)
        num_bytes = writer.finish(PARENT, CHILD, NUM_WORDS * len(chunks))
    assert path.stat().st_size == num_bytes
    return Header(PARENT, CHILD, NUM_WORDS * len(chunks), sum(one.num_changes for one in chunks))


def read(path: Path, num_chunks: int) -> list[Changes]:
    return list(read_changes(path, [NUM_WORDS] * num_chunks, verified_bytes(path)))


def assert_same(found: list[Changes], chunks: list[Changes]) -> None:
    assert len(found) == len(chunks)
    for one, other in zip(found, chunks, strict=True):
        assert all((part == wanted).all() for part, wanted in zip(one, other, strict=True))


def sealed(path: Path, content: bytes) -> Path:
    """With a right hash at the end."""
    path.write_bytes(content + blake3(content).digest())
    return path


@pytest.mark.parametrize("full_frame", [1, 300, 10**6])
def test_chunks_survive_the_trip_over_several_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_frame: int
) -> None:
    monkeypatch.setattr(delta_format, "_FULL_FRAME_CHANGES", full_frame)
    chunks = [changes(seed, rate) for seed, rate in ((0, 1e-5), (2, 0.0), (4, 1e-3), (6, 0.0), (8, 1e-6))]
    header = write(tmp_path / "delta", chunks)
    assert read_header(tmp_path / "delta") == header
    assert_same(read(tmp_path / "delta", 5), chunks)


def test_a_frame_has_at_most_so_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_format, "_MAX_FRAME_CHUNKS", 2)
    chunks = [changes(seed, 0.0) for seed in range(5)]
    write(tmp_path / "delta", chunks)
    assert_same(read(tmp_path / "delta", 5), chunks)


def test_no_chunks_at_all(tmp_path: Path) -> None:
    write(tmp_path / "delta", [])
    assert read(tmp_path / "delta", 0) == []


@pytest.mark.parametrize("num_chunks", [0, 1, 3, 4])
def test_a_delta_for_more_or_fewer_chunks_is_refused(tmp_path: Path, num_chunks: int) -> None:
    write(tmp_path / "delta", [changes(0), changes(2)])
    with pytest.raises(BadRecord):
        read(tmp_path / "delta", num_chunks)


def test_a_header_that_lies_about_the_changes_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "delta", [changes(0)])
    content = bytearray((tmp_path / "delta").read_bytes()[:-32])
    content[80:88] = struct.pack("<Q", changes(0).num_changes + 1)
    with pytest.raises(BadRecord, match="other changes than it says"):
        read(sealed(tmp_path / "forged", bytes(content)), 1)


@pytest.mark.parametrize("content", [b"", b"short", bytes(HEADER_BYTES), b"p2prlD02" + bytes(200)])
def test_another_file_is_no_delta(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "delta").write_bytes(content)
    with pytest.raises(BadRecord):
        read_header(tmp_path / "delta")
    with pytest.raises(BadRecord):
        read(sealed(tmp_path / "sealed", content), 1)


@pytest.mark.parametrize("frame", [(1, 2**32 - 1), (2**32 - 1, 100), (0, 100), (1, 10**6), (2, 100)])
def test_a_frame_that_announces_too_much_is_refused_before_it_is_read(tmp_path: Path, frame: tuple[int, int]) -> None:
    write(tmp_path / "delta", [changes(0)])
    content = (tmp_path / "delta").read_bytes()[:HEADER_BYTES] + struct.pack("<II", *frame) + bytes(5000)
    with pytest.raises(BadRecord, match="announces"):
        read(sealed(tmp_path / "forged", content), 1)


def test_a_bomb_of_changes_is_refused_before_memory_is_spent_on_it() -> None:
    """Counts that say that all of many large chunks changed cost a forger nothing: one symbol each."""
    num_chunks = delta_format._MAX_FRAME_CHUNKS
    data = pack([changes(0)])
    counts = np.full(num_chunks * 32, 2**16)
    from p2prl.weights.delta_entropy import encode
    from p2prl.weights.delta_integers import symbols_of

    symbols, bits = symbols_of(counts, counts < 0)
    bomb = encode(symbols, np.zeros(len(counts), np.uint8), 1) + bits + data
    tracemalloc.start()
    try:
        with pytest.raises(BadRecord, match="more changes than there are weights"):
            unpack(memoryview(bomb), [2**21] * num_chunks)
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


def test_bytes_behind_the_last_symbol_of_a_frame_are_refused() -> None:
    data = pack([changes(0)])
    assert_same(unpack(memoryview(data), [NUM_WORDS]), [changes(0)])
    with pytest.raises(BadRecord, match="too many"):
        unpack(memoryview(data + b"x"), [NUM_WORDS])


def test_a_missing_file_is_a_store_error(tmp_path: Path) -> None:
    for read_some in (read_header, verified_bytes):
        with pytest.raises(StoreError):
            read_some(tmp_path / "missing")
