"""Places of a chunk, renumbered so that words of like exponent lie together.

In: a chunk of the parent state as 16-bit words. Out: places in the chunk to ranks and back.

How likely a word changes in a step follows from its exponent: an update is about the learning rate whatever the weight,
and a rounding moves when the update is a good part of the weight's last bit. So within words of one exponent (a class)
changes are spread evenly, and gaps between them cost what they must; both sides know the classes from the parent.

A rank counts all words of lower classes and those of the same class that come before. It is found without sorting: each
class is a bit mask over the chunk, and a running count of its bits (by the 64-bit lane) is looked up or searched.
"""

import numpy as np
from numpy.typing import DTypeLike

from p2prl.errors import BadRecord

NUM_CLASSES = 32
_LOWEST_BF16 = 126 - (NUM_CLASSES - 1)  # classes of bf16: exponents of 2**-32 and less, ..., 2**-1 and more
_BLOCK = 2**17  # words worked on at a time, so that they stay in the cache
_PLANES = 5  # bits of a class number
assert 1 << _PLANES == NUM_CLASSES


class Scratch:
    """Arrays that one thread works in, chunk after chunk: fresh memory would cost as much time as the work."""

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray] = {}

    def array(self, name: str, length: int, dtype: DTypeLike) -> np.ndarray:
        """Of any contents; what was given before under this name is no longer valid."""
        kept = self._kept.get(name)
        if kept is None or len(kept) < length:
            kept = self._kept[name] = np.empty(length, dtype)
        return kept[:length]


class Classes:
    """The classes of one chunk. Valid until the scratch is used for another."""

    def __init__(self, words: np.ndarray, is_fp16: bool, scratch: Scratch) -> None:
        self.num_words = len(words)
        self._lanes = -(-len(words) // 64)
        self._class_of = scratch.array("class of", self._lanes * 64, np.uint8)
        self._class_of[-64:] = 0  # the words that fill the last lane are of class 0, and never change
        for begin in range(0, len(words), _BLOCK):
            part = words[begin : begin + _BLOCK]
            self._class_of[begin : begin + len(part)] = _classes(part, is_fp16)
        self._masks = scratch.array("masks", NUM_CLASSES * self._lanes, np.uint64)
        _fill_masks(self._masks.reshape(NUM_CLASSES, -1), self._bit_planes(scratch))
        counts = scratch.array("counts", len(self._masks), np.uint8)
        np.bitwise_count(self._masks, out=counts)
        self._before = scratch.array("before", len(counts) + 1, np.uint32)  # words of a lower rank than any of the lane
        self._before[0] = 0
        np.cumsum(counts, out=self._before[1:], dtype=np.uint32)
        self.first_ranks = self._before[:: self._lanes].astype(np.int64)  # of each class, and the end

    def of(self, places: np.ndarray) -> np.ndarray:
        """Class of each place."""
        return self._class_of[places]

    def ranks(self, places: np.ndarray) -> np.ndarray:
        lanes = self._class_of[places].astype(np.int64) * self._lanes + (places >> 6)
        below = (np.uint64(1) << (places & 63).astype(np.uint64)) - np.uint64(1)
        return self._before[lanes].astype(np.int64) + np.bitwise_count(self._masks[lanes] & below)

    def places(self, ranks: np.ndarray) -> np.ndarray:
        """The inverse of `ranks`; BadRecord for a rank that no word has."""
        if len(ranks) and not 0 <= ranks.min() <= ranks.max() < self._before[-1]:
            raise BadRecord("a delta changes a weight that isn't there; fetch it from another peer")
        lanes = np.searchsorted(self._before, ranks, side="right") - 1
        left = ranks - self._before[lanes]
        places = (lanes % self._lanes) * 64 + _nth_bit(self._masks[lanes], left)
        if len(places) and places.max() >= self.num_words:
            raise BadRecord("a delta changes a weight past the end; fetch it from another peer")
        return places

    def _bit_planes(self, scratch: Scratch) -> np.ndarray:
        """[_PLANES, lanes]: a bit of the class number of every word."""
        planes = scratch.array("planes", _PLANES * self._lanes, np.uint64).reshape(_PLANES, -1)
        for begin in range(0, len(self._class_of), _BLOCK):
            part = self._class_of[begin : begin + _BLOCK]
            lanes = slice(begin // 64, (begin + len(part)) // 64)
            for bit, plane in enumerate(planes):
                plane[lanes] = np.packbits(part & np.uint8(1 << bit), bitorder="little").view("<u8")
        return planes


def _classes(words: np.ndarray, is_fp16: bool) -> np.ndarray:
    if is_fp16:
        return (words >> 10) & 31
    exponents = (words << 1) >> 8
    np.clip(exponents, _LOWEST_BF16, _LOWEST_BF16 + NUM_CLASSES - 1, out=exponents)
    return exponents - _LOWEST_BF16


def _fill_masks(masks: np.ndarray, planes: np.ndarray) -> None:
    """masks [NUM_CLASSES, lanes]: which words of each lane are of that class."""
    masks[0] = ~np.uint64(0)
    have = 1
    for plane in planes:
        np.bitwise_and(masks[:have], plane, out=masks[have : 2 * have])
        masks[:have] ^= masks[have : 2 * have]
        have *= 2


def _nth_bit(lanes: np.ndarray, n: np.ndarray) -> np.ndarray:
    """Place of the set bit of each lane that has `n` set bits below it; by halving."""
    lanes, left = lanes.copy(), n.astype(np.uint64)
    place = np.zeros(len(lanes), np.uint64)
    for width in (32, 16, 8, 4, 2, 1):
        low = lanes & np.uint64((1 << width) - 1)
        count = np.bitwise_count(low).astype(np.uint64)
        above = left >= count
        left -= np.where(above, count, np.uint64(0))
        place += np.where(above, np.uint64(width), np.uint64(0))
        lanes = np.where(above, lanes >> np.uint64(width), low)
    return place.astype(np.int64)
