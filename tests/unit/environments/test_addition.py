import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.environments.addition import Addition
from p2prl.environments.registry import HELD_OUT_FROM
from p2prl.errors import ConfigError

INDICES = st.integers(0, 2**53)


@given(INDICES)
def test_the_answer_is_the_sum_lowest_digit_first(index: int) -> None:
    task = Addition("p2prl==0")
    first, second = task.prompt(index).removesuffix("=").split("+")
    right = str(int(first) + int(second))[::-1]
    assert (len(first), len(second)) == (2, 2)
    assert task.reward(index, right) == (1.0, "right")
    assert task.reward(index, right + "0") == (0.0, f"expected {right}")
    assert task.reward(index, "")[0] == 0.0


@given(INDICES, st.integers(1, 4), st.integers(2, 9))
def test_same_index_same_prompt_whatever_the_global_seed(index: int, digits: int, max_digit: int) -> None:
    task = Addition("p2prl==0", digits=digits, max_digit=max_digit)
    random.seed(1)
    first = task.prompt(index)
    random.seed(2)
    assert task.prompt(index) == first
    assert all(int(digit) <= max_digit for digit in first if digit.isdigit())


def test_prompts_are_pinned() -> None:
    task = Addition("p2prl==0")
    assert [task.prompt(index) for index in (0, 1, HELD_OUT_FROM)] == ["76+14=", "39+24=", "41+19="]


def test_held_out_pairs_never_come_in_training() -> None:
    task = Addition("p2prl==0")
    trained = {task.pair(index) for index in range(20_000)}
    held_out = {task.pair(HELD_OUT_FROM + index) for index in range(2_000)}
    assert not trained & held_out
    assert len(trained) > 6000 and len(held_out) > 500


@pytest.mark.parametrize(("digits", "max_digit"), list(itertools.product((1, 2, 3), range(2, 10))))
def test_both_sides_of_the_split_have_pairs(digits: int, max_digit: int) -> None:
    task = Addition("p2prl==0", digits=digits, max_digit=max_digit)
    assert task.prompt(0) and task.prompt(HELD_OUT_FROM)


@pytest.mark.parametrize("params", [{"digits": 0}, {"digits": 9}, {"max_digit": 1}, {"digits": True}, {"digits": "2"}])
def test_a_value_out_of_range_is_named(params: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(params))):
        Addition("p2prl==0", **params)
