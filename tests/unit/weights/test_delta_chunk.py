import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.errors import BadRecord
from p2prl.weights.delta_chunk import Changes, difference, patch
from p2prl.weights.delta_positions import NUM_CLASSES, Scratch
from tests.unit.weights.states import stepped, weights


def there_and_back(parent: np.ndarray, child: np.ndarray, is_fp16: bool = False) -> Changes:
    changes = difference(parent, child, is_fp16, Scratch())
    words = parent.copy()
    patch(words, changes, is_fp16, Scratch())
    assert (words == child).all()
    assert changes.num_changes == (parent != child).sum() == changes.counts.sum()
    assert (changes.gaps >= 0).all()
    assert (changes.sizes >= 0).all()
    return changes


@pytest.mark.parametrize("is_fp16", [False, True])
def test_every_word_can_become_every_other(is_fp16: bool) -> None:
    parent = np.arange(2**16, dtype=np.uint16)
    for child in (parent[::-1].copy(), np.roll(parent, 1), parent ^ np.uint16(0x8000), parent.copy()):
        there_and_back(parent, child, is_fp16)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**16 - 1), st.integers(0, 2**16 - 1)), min_size=1, max_size=200))
def test_any_words_survive_the_trip(pairs: list[tuple[int, int]]) -> None:
    parent, child = np.array(pairs, np.uint16).T
    there_and_back(parent, child)


def test_a_step_moves_words_to_their_neighbours() -> None:
    parent = weights(300_000, seed=0)
    changes = there_and_back(parent, stepped(parent, seed=1, rate=1e-6))
    of_normal_size = changes.counts[20:].sum()
    assert of_normal_size > 500
    assert (changes.sizes[-of_normal_size:] == 0).mean() > 0.99


def test_a_weight_that_goes_on_away_from_zero_does_not_shrink() -> None:
    parent = np.array([0x3F80, 0xBF80, 0x0000, 0x8000, 0x3F80, 0xBF80], np.uint16)  # 1, -1, 0, -0, 1, -1
    child = np.array([0x3F81, 0xBF81, 0x0001, 0x8001, 0x3F7F, 0xBF7F], np.uint16)
    changes = there_and_back(parent, child)
    assert changes.shrinks.tolist() == [False, False, False, False, True, True]  # zeros are the first class
    assert changes.sizes.tolist() == [0] * 6


def test_a_change_past_the_last_word_of_a_class_is_refused() -> None:
    parent = weights(1000, seed=3)
    changes = difference(parent, stepped(parent, seed=4, rate=1e-4), False, Scratch())
    for number in np.flatnonzero(changes.counts):
        gaps = changes.gaps.copy()
        gaps[changes.counts[: number + 1].sum() - 1] += 2000  # the last of its class
        with pytest.raises(BadRecord):
            patch(parent.copy(), changes._replace(gaps=gaps), False, Scratch())


def test_more_changes_than_the_class_has_words_are_refused() -> None:
    parent = np.full(100, 0x3F80, np.uint16)
    counts = np.zeros(NUM_CLASSES, np.int64)
    counts[5] = 1
    with pytest.raises(BadRecord):
        patch(
            parent, Changes(counts, np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1, bool)), False, Scratch()
        )


def test_nothing_changed_is_nothing_to_tell() -> None:
    parent = weights(1000, seed=5)
    assert there_and_back(parent, parent.copy()).num_changes == 0
