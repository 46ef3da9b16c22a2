import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.errors import BadRecord
from p2prl.weights.delta_entropy import NUM_SYMBOLS, decode, encode

NUM_CONTEXTS = 4


def there_and_back(symbols: np.ndarray, contexts: np.ndarray) -> int:
    """Bytes in between."""
    coded = encode(symbols, contexts, NUM_CONTEXTS)
    found, rest = decode(memoryview(coded + b"next"), contexts, NUM_CONTEXTS)
    assert (found == symbols).all()
    assert bytes(rest) == b"next"
    return len(coded)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 255), st.integers(0, NUM_CONTEXTS - 1)), max_size=50), st.integers(1, 300))
def test_any_symbols_survive_the_trip(pairs: list[tuple[int, int]], times: int) -> None:
    symbols, contexts = np.array(pairs, np.uint8).reshape(-1, 2).T
    there_and_back(np.tile(symbols, times), np.tile(contexts, times))


def test_symbols_cost_their_entropy() -> None:
    source = np.random.default_rng(0)
    contexts = np.repeat(np.arange(NUM_CONTEXTS, dtype=np.uint8), 200_000)
    chances = (0.999, 0.98, 0.5, 0.01)  # of a zero; the rest is even among eight
    symbols = np.concatenate([(source.random(200_000) > chance) * source.integers(1, 9, 200_000) for chance in chances])
    bits = sum(-chance * np.log2(chance) + (1 - chance) * (3 - np.log2(1 - chance)) for chance in chances)
    assert there_and_back(symbols.astype(np.uint8), contexts) * 8 < 1.01 * bits * 200_000 + 2**16  # states, tables


def test_one_symbol_alone_costs_nothing_but_its_table() -> None:
    assert there_and_back(np.full(100_000, 7, np.uint8), np.zeros(100_000, np.uint8)) < 500


def test_all_symbols_evenly_and_one_rare() -> None:
    symbols = np.arange(NUM_SYMBOLS * 50, dtype=np.int64).astype(np.uint8)
    there_and_back(symbols, np.zeros(len(symbols), np.uint8))
    rare = np.zeros(1_000_000, np.uint8)
    rare[:255] = np.arange(1, 256)
    there_and_back(rare, np.zeros(len(rare), np.uint8))


def test_nothing_is_nothing() -> None:
    there_and_back(np.zeros(0, np.uint8), np.zeros(0, np.uint8))


def coded_with(tables: bytes, contexts: np.ndarray) -> bytes:
    """Symbols coded with these packed tables in place of their own."""
    coded = encode(np.arange(len(contexts)).astype(np.uint8), contexts, NUM_CONTEXTS)
    packed, words = struct.unpack("<II", coded[:8])
    return struct.pack("<II", len(tables), words) + tables + coded[8 + packed :]


def tables_of(frequencies: np.ndarray) -> bytes:
    return zstandard.ZstdCompressor().compress(frequencies.astype("<u2").tobytes())


def lying(content: bytes, claimed: int) -> bytes:
    """A zstd frame that says it has other contents."""
    packed = zstandard.ZstdCompressor().compress(content)
    assert struct.pack("<I", len(content)) in packed[:12]
    return packed.replace(struct.pack("<I", len(content)), struct.pack("<I", claimed), 1)


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        (zstandard.ZstdCompressor(level=19).compress(bytes(2**28)), "claim 268435456 bytes"),  # a bomb
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2**28)), "claim"),
        (lying(bytes(2**28), 2048), "can't be unpacked"),
        (b"no zstd", "can't be unpacked"),
        (tables_of(np.zeros((1, NUM_SYMBOLS))), "claim 512 bytes"),
        (tables_of(np.ones((NUM_CONTEXTS, NUM_SYMBOLS))), "don't add up"),
        (tables_of(np.full((NUM_CONTEXTS, NUM_SYMBOLS), 65535)), "don't add up"),
        (tables_of(np.zeros((NUM_CONTEXTS, NUM_SYMBOLS))), "lacks a table"),
    ],
)
def test_hostile_tables_are_refused_before_memory_is_spent_on_them(tables: bytes, reason: str) -> None:
    contexts = np.zeros(100, np.uint8)
    coded = memoryview(coded_with(tables, contexts))
    tracemalloc.start()
    try:
        with pytest.raises(BadRecord, match=reason):
            decode(coded, contexts, NUM_CONTEXTS)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_every_cut_is_refused() -> None:
    contexts = np.zeros(3000, np.uint8)
    coded = encode(np.random.default_rng(1).integers(0, 9, 3000).astype(np.uint8), contexts, NUM_CONTEXTS)
    for length in range(len(coded)):
        with pytest.raises(BadRecord):
            decode(memoryview(coded[:length]), contexts, NUM_CONTEXTS)


def test_fewer_or_more_symbols_than_were_coded_are_refused() -> None:
    symbols = np.random.default_rng(2).integers(0, 9, 3000).astype(np.uint8)
    coded = encode(symbols, np.zeros(3000, np.uint8), NUM_CONTEXTS)
    for number in (0, 2900, 3001, 4096):
        with pytest.raises(BadRecord):
            decode(memoryview(coded), np.zeros(number, np.uint8), NUM_CONTEXTS)
