import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2prl.objectives import EssState, ess_ratio, lr_multiplier

ratios = st.lists(st.floats(-5000, 900), max_size=12)


def state(values: list[float]) -> EssState:
    return EssState.of(torch.tensor(values, dtype=torch.float64))


@given(ratios, ratios, ratios)
def test_states_merge_to_that_of_all(a: list[float], b: list[float], c: list[float]) -> None:
    left = state(a).merge(state(b)).merge(state(c))
    right = state(a).merge(state(b).merge(state(c)))
    whole = ess_ratio(torch.tensor(a + b + c, dtype=torch.float64))
    for merged in (left, right):
        assert merged.n == len(a + b + c)
        assert merged.rho == pytest.approx(whole, rel=1e-9, nan_ok=True)


@given(ratios.filter(bool))
def test_it_lies_between_one_answer_and_all(values: list[float]) -> None:
    assert 1 / len(values) * (1 - 1e-9) <= state(values).rho <= 1 + 1e-9


@given(ratios.filter(bool), ratios)
def test_the_top_share_is_that_of_the_largest_weight(first: list[float], second: list[float]) -> None:
    every = torch.tensor(first + second, dtype=torch.float64)
    merged = state(first).merge(state(second))
    assert merged.top_share == pytest.approx(float(torch.softmax(every, 0).max()), rel=1e-9)
    assert math.isnan(state([]).top_share)


def test_merging_is_not_averaging() -> None:
    first, second = state([0.0, 0.0, 0.5]), state([3.0, 3.1, 1.0])
    assert first.merge(second).rho < min(first.rho, second.rho)


def test_what_is_not_defined_skips_the_step() -> None:
    for values in ([], [math.nan, 0.0], [math.inf, 0.0], [-math.inf]):
        assert math.isnan(state(values).rho)
    assert math.isnan(state([math.nan]).merge(state([0.0])).rho)
    for rho in (math.nan, math.inf, -math.inf):
        assert lr_multiplier(rho) == 0.0


def test_a_weight_of_zero_counts_as_an_answer() -> None:
    assert state([0.0, -math.inf]).rho == pytest.approx(0.5)


def test_the_multiplier_is_relative_to_the_fresh_value_and_never_above_one() -> None:
    assert lr_multiplier(0.25) == 0.5
    assert lr_multiplier(0.25, power=1.0) == lr_multiplier(0.2, 0.8, 1.0) == 0.25
    assert lr_multiplier(0.2, 0.8) == pytest.approx(0.5)
    assert lr_multiplier(0.9, 0.5) == 1.0
    for rho_on in (0.0, -1.0, math.nan, math.inf):
        assert lr_multiplier(0.25, rho_on) == 0.5
