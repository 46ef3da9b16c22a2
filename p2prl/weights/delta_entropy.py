"""Entropy coding: bytes whose distribution depends on a context, at close to their entropy. Asymmetric numeral systems.

In: symbols (bytes) with a context each, and back: bytes from anybody, the contexts. Out: bytes, symbols.

Range variant (rANS, Duda, arXiv 1311.2540) with static tables: state x in [2**16, 2**32), a symbol of frequency f and
first slot c of 2**12 makes it x // f * 2**12 + x % f + c; 16-bit words leave the state when it would overflow. Many
lanes (states) take turns at the symbols, so that one numpy operation codes a symbol of every lane. zstd's Huffman stage
spends a bit on a symbol of .15 bits, and its match search makes random symbols of few values longer.

Invariants: decoding gives exactly as many symbols as there are contexts, from exactly the bytes there are, or BadRecord.
"""

import struct

import numpy as np
import zstandard

from p2prl.errors import BadRecord

NUM_SYMBOLS = 256
_BITS = 12
_SLOTS = 1 << _BITS
_LEAST_STATE = np.uint32(1 << 16)
_WORD = np.uint32(16)
_MAX_LANES = 1024
_SYMBOLS_PER_LANE = 2048  # a lane's state costs four bytes, a round over all lanes about ten microseconds
_HEAD = struct.Struct("<II")  # bytes of the packed tables, number of words


def encode(symbols: np.ndarray, contexts: np.ndarray, num_contexts: int) -> bytes:
    """`symbols` [N] and `contexts` [N] are uint8."""
    keys = contexts.astype(np.int64) * NUM_SYMBOLS + symbols
    counts = np.bincount(keys, minlength=num_contexts * NUM_SYMBOLS).reshape(num_contexts, NUM_SYMBOLS)
    frequencies = np.array([_frequencies(row) for row in counts], np.uint16)
    packed = zstandard.ZstdCompressor(level=9).compress(frequencies.tobytes())
    states, words = _push(keys, frequencies, _num_lanes(len(symbols)))
    return _HEAD.pack(len(packed), len(words)) + packed + states.astype("<u4").tobytes() + words.astype("<u2").tobytes()


def decode(data: memoryview, contexts: np.ndarray, num_contexts: int) -> tuple[np.ndarray, memoryview]:
    """The symbols [N] of `contexts` [N], and what follows them in `data`."""
    packed_bytes, num_words = _HEAD.unpack(take(data, _HEAD.size))
    data = data[_HEAD.size :]
    tables = _Tables(take(data, packed_bytes), num_contexts)
    data = data[packed_bytes:]
    num_lanes = _num_lanes(len(contexts))
    states = np.frombuffer(take(data, 4 * num_lanes), "<u4").astype(np.uint32)
    data = data[4 * num_lanes :]
    words = np.frombuffer(take(data, 2 * num_words), "<u2")
    return _pop(contexts, tables, states, words), data[2 * num_words :]


def take(data: memoryview, num_bytes: int) -> memoryview:
    if num_bytes > len(data):
        raise BadRecord(f"a delta ends {num_bytes - len(data)} bytes too early; fetch it from another peer")
    return data[:num_bytes]


def _num_lanes(num_symbols: int) -> int:
    return min(_MAX_LANES, -(-num_symbols // _SYMBOLS_PER_LANE))


# -- tables ---------------------------------------------------------------------------------------------------------


def _frequencies(counts: np.ndarray) -> np.ndarray:
    """Shares of 2**12, at least 1 for whatever occurs; zeros where nothing does."""
    total = counts.sum()
    if not total:
        return counts
    shares = np.maximum((counts * _SLOTS + total // 2) // total, counts > 0)
    while excess := shares.sum() - _SLOTS:  # the commonest pay for rounding: it costs them least
        commonest = shares.argmax()
        shares[commonest] -= min(excess, shares[commonest] // 2)
    return shares


def _unpacked(packed: memoryview, num_bytes: int) -> bytes:
    """zstandard allocates what a frame's header claims, whatever `max_output_size` says: so that is looked at first."""
    try:
        claimed = zstandard.get_frame_parameters(packed).content_size
        if claimed != num_bytes:
            raise BadRecord(f"a delta's tables claim {claimed} bytes, not {num_bytes}; fetch it from another peer")
        return zstandard.ZstdDecompressor().decompress(packed)
    except zstandard.ZstdError as error:
        raise BadRecord(f"a delta's tables can't be unpacked: {error}; fetch it from another peer") from None


class _Tables:
    """By context and slot: symbol, its frequency, and the slot's place among those of the symbol."""

    def __init__(self, packed: memoryview, num_contexts: int) -> None:
        plain = _unpacked(packed, 2 * num_contexts * NUM_SYMBOLS)
        frequencies = np.frombuffer(plain, "<u2").reshape(num_contexts, NUM_SYMBOLS)
        sums = frequencies.sum(1, dtype=np.int64)
        if not np.isin(sums, (0, _SLOTS)).all():
            raise BadRecord("a delta's tables don't add up; fetch it from another peer")
        self.used = sums > 0
        self.symbol = np.zeros((num_contexts, _SLOTS), np.uint8)
        self.frequency = np.zeros((num_contexts, _SLOTS), np.uint16)
        self.place = np.zeros((num_contexts, _SLOTS), np.uint16)
        for context in np.flatnonzero(self.used):
            row = frequencies[context]
            symbols = np.repeat(np.arange(NUM_SYMBOLS, dtype=np.uint8), row)
            self.symbol[context], self.frequency[context] = symbols, row[symbols]
            self.place[context] = np.arange(_SLOTS) - (row.cumsum() - row)[symbols]


# -- states ---------------------------------------------------------------------------------------------------------


def _push(keys: np.ndarray, frequencies: np.ndarray, num_lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """States and words, in the order in which `_pop` wants them: symbols go in last first."""
    starts = np.cumsum(frequencies, 1, dtype=np.uint32) - frequencies
    all_frequencies = frequencies.reshape(-1).astype(np.uint32)[keys]
    all_starts = starts.reshape(-1).astype(np.uint32)[keys]
    states = np.full(num_lanes, _LEAST_STATE, np.uint32)
    rounds: list[np.ndarray] = []
    for begin in reversed(range(0, len(keys), max(num_lanes, 1))):
        frequency, start = all_frequencies[begin : begin + num_lanes], all_starts[begin : begin + num_lanes]
        lanes = states[: len(frequency)]
        full = (lanes >> np.uint32(32 - _BITS)) >= frequency
        leaving = lanes[full]
        rounds.append(leaving.astype(np.uint16))
        lanes[full] = leaving >> _WORD
        times = (lanes / frequency.astype(np.float64)).astype(np.uint32)  # exact: 32 bits by 13 in a double
        lanes += times * (np.uint32(_SLOTS) - frequency) + start
    rounds.reverse()
    return states, np.concatenate(rounds) if rounds else np.zeros(0, np.uint16)


def _pop(contexts: np.ndarray, tables: _Tables, states: np.ndarray, words: np.ndarray) -> np.ndarray:
    if not tables.used[np.unique(contexts)].all():
        raise BadRecord("a delta lacks a table that it needs; fetch it from another peer")
    first_slots = contexts.astype(np.uint32) << np.uint32(_BITS)
    symbol, frequency, place = (table.reshape(-1) for table in (tables.symbol, tables.frequency, tables.place))
    symbols = np.empty(len(contexts), np.uint8)
    taken, num_lanes = 0, len(states)
    for begin in range(0, len(contexts), max(num_lanes, 1)):
        slots = first_slots[begin : begin + num_lanes]
        lanes = states[: len(slots)]
        slots = slots | (lanes & np.uint32(_SLOTS - 1))
        symbols[begin : begin + len(slots)] = symbol[slots]
        lanes[:] = frequency[slots] * (lanes >> np.uint32(_BITS)) + place[slots]
        empty = np.flatnonzero(lanes < _LEAST_STATE)
        if taken + len(empty) > len(words):
            raise BadRecord("a delta's symbols end too early; fetch it from another peer")
        lanes[empty] = (lanes[empty] << _WORD) | words[taken : taken + len(empty)]
        taken += len(empty)
    if taken != len(words) or (states != _LEAST_STATE).any():
        raise BadRecord("a delta's symbols end elsewhere than they should; fetch it from another peer")
    return symbols
