"""A delta's file: a header, frames of changes, a hash of all that.

In: `Changes` chunk by chunk; bytes from anybody. Out: a file; `Header`, `Changes`, or BadRecord.

    magic | parent's state hash | child's | parameters | changes | frame ... | blake3 of everything before
    frame:  chunks, bytes | changes of each class and chunk | gaps and sizes as symbols | their plain bits

Invariants: a frame's size is bounded, and so is what it unpacks to, before anything is allocated for it; a file with any
byte changed, cut off or added is refused.
"""

import struct
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from blake3 import blake3

from p2prl.errors import BadRecord, StoreError
from p2prl.weights.delta_chunk import Changes
from p2prl.weights.delta_entropy import decode, encode, take
from p2prl.weights.delta_integers import MAX_NUMBER, numbers_of, symbols_of
from p2prl.weights.delta_positions import NUM_CLASSES

CHUNK_WORDS = 2**20
HEADER_BYTES = 88
HASH_BYTES = 32
_MAGIC = b"p2prlD01"
_HEADER = struct.Struct("<8s32s32sQQ")
_FRAME = struct.Struct("<II")
_MAX_FRAME_CHUNKS = 1024
_FULL_FRAME_CHANGES = 2**20  # one more chunk may come on top
_MAX_FRAME_CHANGES = _FULL_FRAME_CHANGES + CHUNK_WORDS
_MAX_FRAME_BYTES = 10 * _MAX_FRAME_CHANGES  # two symbols of up to 12 bits, and up to 21 and 14 plain bits
_READ_BYTES = 4 * 2**20
assert _HEADER.size == HEADER_BYTES


class Header(msgspec.Struct, frozen=True):
    """What a delta says of itself: state hashes, and how many of how many weights (16-bit words) change."""

    parent: bytes
    child: bytes
    num_parameters: int
    num_changed: int


def read_header(delta: Path) -> Header:
    """Without looking at the rest. Raises BadRecord, or StoreError if it can't be read."""
    try:
        with delta.open("rb") as file:
            return _header(file)
    except OSError as error:
        raise _unreadable(delta, error) from error


def verified_bytes(delta: Path) -> int:
    """Where the frames end, after the hash of the whole file was checked."""
    try:
        with delta.open("rb") as file:
            end = delta.stat().st_size - HASH_BYTES
            digest, left = blake3(), end
            while left > 0 and (data := file.read(min(left, _READ_BYTES))):
                digest.update(data)
                left -= len(data)
            if left or digest.digest() != file.read():
                raise BadRecord(f"the delta {delta.name} is damaged; fetch it from another peer")
            return end
    except OSError as error:
        raise _unreadable(delta, error) from error


def read_changes(delta: Path, chunk_words: Sequence[int], end: int) -> Generator[Changes]:
    """Of each chunk in turn, given their words; at the end all frames must be used up."""
    try:
        with delta.open("rb") as file:
            header, num_changed, num_chunks = _header(file), 0, 0
            while num_chunks < len(chunk_words):
                for changes in _read_frame(file, chunk_words[num_chunks : num_chunks + _MAX_FRAME_CHUNKS], end):
                    num_chunks, num_changed = num_chunks + 1, num_changed + changes.num_changes
                    if num_changed > header.num_changed:  # a promise of how long it takes
                        raise _false(delta)
                    yield changes
            if file.tell() != end or num_changed != header.num_changed:
                raise _false(delta)
    except OSError as error:
        raise _unreadable(delta, error) from error


def _false(delta: Path) -> BadRecord:
    return BadRecord(f"the delta {delta.name} holds other changes than it says; fetch it from another peer")


def _unreadable(delta: Path, error: OSError) -> StoreError:
    return StoreError(f"can't read the delta {delta}: {error.strerror or error}; fetch it again")


def _header(file: BinaryIO) -> Header:
    data = file.read(HEADER_BYTES)
    if len(data) != HEADER_BYTES or data[: len(_MAGIC)] != _MAGIC:
        raise BadRecord("not a delta of a kind that this version knows; upgrade p2prl, or fetch it from another peer")
    return Header(*_HEADER.unpack(data)[1:])


def _read_frame(file: BinaryIO, chunk_words: Sequence[int], end: int) -> list[Changes]:
    num_chunks, num_bytes = _FRAME.unpack(take(memoryview(file.read(_FRAME.size)), _FRAME.size))
    if not 0 < num_chunks <= len(chunk_words) or num_bytes > min(_MAX_FRAME_BYTES, end - file.tell()):
        raise BadRecord(f"a delta announces {num_chunks} chunks in {num_bytes} bytes; fetch it from another peer")
    return unpack(memoryview(file.read(num_bytes)), chunk_words[:num_chunks])


# -- writing --------------------------------------------------------------------------------------------------------


class Writer:
    """Writes frames to a file, then the header before them and the hash after them."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.num_changed = file, 0
        self._waiting: list[Changes] = []
        self._num_waiting = 0
        file.write(bytes(HEADER_BYTES))

    def add(self, changes: Changes) -> None:
        self._waiting.append(changes)
        self._num_waiting += changes.num_changes
        if self._num_waiting >= _FULL_FRAME_CHANGES or len(self._waiting) == _MAX_FRAME_CHUNKS:
            self._flush()

    def finish(self, parent: bytes, child: bytes, num_parameters: int) -> int:
        """Returns the file's size."""
        if self._waiting:
            self._flush()
        self._file.seek(0)
        self._file.write(_HEADER.pack(_MAGIC, parent, child, num_parameters, self.num_changed))
        self._file.seek(0)
        digest = blake3()
        while data := self._file.read(_READ_BYTES):
            digest.update(data)
        self._file.write(digest.digest())
        return self._file.tell()

    def _flush(self) -> None:
        data = pack(self._waiting)
        self._file.write(_FRAME.pack(len(self._waiting), len(data)) + data)
        self.num_changed += self._num_waiting
        self._waiting, self._num_waiting = [], 0


# -- frames ---------------------------------------------------------------------------------------------------------


def pack(chunks: Sequence[Changes]) -> bytes:
    counts = np.concatenate([changes.counts for changes in chunks])
    count_symbols, count_bits = symbols_of(counts, np.zeros(len(counts), bool))
    gaps, sizes = (np.concatenate(parts) for parts in zip(*((one.gaps, one.sizes) for one in chunks), strict=True))
    shrinks = np.concatenate([changes.shrinks for changes in chunks])
    gap_symbols, gap_bits = symbols_of(gaps, np.zeros(len(gaps), bool))
    size_symbols, size_bits = symbols_of(sizes, shrinks)
    coded_counts = encode(count_symbols, np.zeros(len(counts), np.uint8), 1)
    coded = encode(np.concatenate((gap_symbols, size_symbols)), _contexts(counts), 2 * NUM_CLASSES)
    return b"".join((coded_counts, count_bits, coded, gap_bits, size_bits))


def unpack(data: memoryview, chunk_words: Sequence[int]) -> list[Changes]:
    """The inverse of `pack`, for chunks of that many words."""
    num_counts = len(chunk_words) * NUM_CLASSES
    symbols, data = decode(data, np.zeros(num_counts, np.uint8), 1)
    counts, _, data = numbers_of(symbols, data)
    by_chunk = counts.reshape(-1, NUM_CLASSES)
    changes_in = by_chunk.sum(1)
    if (changes_in > chunk_words).any() or changes_in.sum() > _MAX_FRAME_CHANGES:
        raise BadRecord("a delta announces more changes than there are weights; fetch it from another peer")
    symbols, data = decode(data, _contexts(counts), 2 * NUM_CLASSES)
    gaps, _, data = numbers_of(symbols[: len(symbols) // 2], data)
    sizes, shrinks, data = numbers_of(symbols[len(symbols) // 2 :], data)
    if len(data):
        raise BadRecord(f"a delta has {len(data)} bytes too many in a frame; fetch it from another peer")
    ends = changes_in.cumsum()
    slices = [slice(end - num, end) for end, num in zip(ends.tolist(), changes_in.tolist(), strict=True)]
    return [Changes(by_chunk[number], gaps[one], sizes[one], shrinks[one]) for number, one in enumerate(slices)]


def _contexts(counts: np.ndarray) -> np.ndarray:
    """Of all gaps, then of all sizes: each class has statistics of its own for both."""
    classes = np.arange(len(counts)) % NUM_CLASSES
    gaps = np.repeat(classes.astype(np.uint8), counts)
    return np.concatenate((gaps, gaps + np.uint8(NUM_CLASSES)))


assert CHUNK_WORDS <= MAX_NUMBER
