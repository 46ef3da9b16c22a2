"""What changed in a chunk: a run of 16-bit words of the parent state and of the child's.

In: words of both states; or those of the parent and `Changes`. Out: `Changes`; or the words of the child.

A change is a gap to the change before it of the same class (`delta_positions`) and a difference of words in the order
of the numbers that they stand for: nearly always one step up or down, and bit-exact whatever it is. The sign is told
relative to the weight's own, since weights that began at zero go on away from it.

Any 16-bit words survive the trip: float32 states are pairs of them, a last odd byte is filled up.
"""

from typing import NamedTuple

import numpy as np

from p2prl.errors import BadRecord
from p2prl.weights.delta_positions import NUM_CLASSES, Classes, Scratch

_BLOCK = 2**17  # words compared at a time
_SIGN = np.uint16(0x8000)


class Changes(NamedTuple):
    """Of one chunk, class by class; `sizes` are the differences' absolute values less 1."""

    counts: np.ndarray  # [NUM_CLASSES]
    gaps: np.ndarray  # [N]
    sizes: np.ndarray  # [N]
    shrinks: np.ndarray  # [N] bool: towards zero

    @property
    def num_changes(self) -> int:
        return len(self.gaps)


def difference(parent: np.ndarray, child: np.ndarray, is_fp16: bool, scratch: Scratch) -> Changes:
    places = _changed_places(parent, child)
    if not len(places):
        nothing = np.zeros(0, np.int64)
        return Changes(np.zeros(NUM_CLASSES, np.int64), nothing, nothing, nothing > 0)
    classes = Classes(parent, is_fp16, scratch)
    of_change = classes.of(places)
    order = np.argsort(of_change, kind="stable")
    counts, places = np.bincount(of_change, minlength=NUM_CLASSES), places[order]
    ranks = classes.ranks(places)
    before = np.empty_like(ranks)
    before[1:] = ranks[:-1]
    firsts = (np.cumsum(counts) - counts)[counts > 0]
    before[firsts] = classes.first_ranks[:-1][counts > 0] - 1
    old, new = parent[places], child[places]
    steps = _ordered(new) - _ordered(old)
    shrinks = (steps < 0) != (old >= _SIGN)
    return Changes(counts, ranks - before - 1, np.abs(steps) - 1, shrinks)


def patch(words: np.ndarray, changes: Changes, is_fp16: bool, scratch: Scratch) -> None:
    """Turn the parent's words into the child's, in place. BadRecord for changes that no chunk like this can have."""
    if not changes.num_changes:
        return
    classes = Classes(words, is_fp16, scratch)
    places = classes.places(_ranks(changes, classes.first_ranks))
    old = words[places]
    steps = np.where(changes.shrinks != (old >= _SIGN), -1, 1) * (changes.sizes + 1)
    words[places] = _words(_ordered(old) + steps)


def _changed_places(parent: np.ndarray, child: np.ndarray) -> np.ndarray:
    found = [
        begin + np.flatnonzero(parent[begin : begin + _BLOCK] != child[begin : begin + _BLOCK])
        for begin in range(0, len(parent), _BLOCK)
    ]
    return np.concatenate(found)


def _ranks(changes: Changes, first_ranks: np.ndarray) -> np.ndarray:
    """Running sums of the gaps within each class."""
    counts, sums = changes.counts, np.cumsum(changes.gaps + 1)
    ends = np.cumsum(counts)
    sums_before = np.concatenate(([0], sums))[ends - counts]
    ranks = sums + np.repeat(first_ranks[:-1] - 1 - sums_before, counts)
    lasts = counts > 0
    if (ranks[ends[lasts] - 1] >= first_ranks[1:][lasts]).any():
        raise BadRecord("a delta changes more weights of a kind than there are; fetch it from another peer")
    return ranks


def _ordered(words: np.ndarray) -> np.ndarray:
    """Integers in the order of the numbers: -32768 to 32767, none twice."""
    magnitudes = (words & ~_SIGN).astype(np.int32)
    return np.where(words >= _SIGN, ~magnitudes, magnitudes)


def _words(ordered: np.ndarray) -> np.ndarray:
    """The inverse of `_ordered`; what is out of its range gives some word, and a state of another hash."""
    return np.where(ordered < 0, ~ordered | 0x8000, ordered).astype(np.uint16)
