import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.errors import BadRecord
from p2prl.weights.delta_positions import NUM_CLASSES, Classes, Scratch
from tests.unit.weights.states import weights

SIZES = (1, 63, 64, 65, 129, 200_000)


def any_words(num: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**16, num).astype(np.uint16)


@pytest.mark.parametrize("num", SIZES)
@pytest.mark.parametrize("is_fp16", [False, True])
def test_every_word_has_a_rank_of_its_own_and_classes_follow_each_other(num: int, is_fp16: bool) -> None:
    classes = Classes(any_words(num), is_fp16, Scratch())
    places = np.arange(num)
    ranks = classes.ranks(places)
    assert len(np.unique(ranks)) == num
    assert (classes.places(ranks) == places).all()
    in_order = classes.of(classes.places(np.sort(ranks)))
    assert (np.diff(in_order.astype(int)) >= 0).all()
    for number in range(NUM_CLASSES):
        of_class = classes.of(places) == number
        assert (ranks[of_class] >= classes.first_ranks[number]).all()
        assert (ranks[of_class] < classes.first_ranks[number + 1]).all()
        assert (np.diff(ranks[of_class]) == 1).all(), "within a class, ranks count up"


def test_a_class_is_an_exponent_of_bf16() -> None:
    ones = (np.array([0.0, 1e-30, 0.3, 0.4, -0.4, 0.6, 1.0, 300.0], "<f4").view("<u4") >> 16).astype(np.uint16)
    assert Classes(ones, False, Scratch()).of(np.arange(8)).tolist() == [0, 0, 30, 30, 30, 31, 31, 31]


def test_a_class_is_an_exponent_of_fp16() -> None:
    ones = np.array([0.0, -1.0, 1.5, 2.0, 65504.0], np.float16).view(np.uint16)
    assert Classes(ones, True, Scratch()).of(np.arange(5)).tolist() == [0, 15, 15, 16, 30]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 500), st.lists(st.integers(-(2**40), 2**40), max_size=5))
def test_a_rank_that_no_word_has_is_refused(num: int, ranks: list[int]) -> None:
    classes = Classes(weights(num, seed=num), False, Scratch())
    own = set(classes.ranks(np.arange(num)).tolist())
    if set(ranks) <= own:
        assert set(classes.ranks(classes.places(np.array(ranks, np.int64))).tolist()) == set(ranks)
        return
    with pytest.raises(BadRecord):
        classes.places(np.array(ranks, np.int64))
