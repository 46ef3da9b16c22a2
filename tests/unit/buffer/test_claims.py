"""Honest makers are believed however stale they are; who claims to draw what nobody draws is found out at once."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.buffer import claims
from p2prl.buffer.claims import LOG_LIMIT, MARGIN, Claims, after

START = -math.inf


def draws(source: random.Random, sampler: list[float], policy: list[float], length: int) -> float:
    """The log ratio of an answer of so many tokens."""
    tokens = source.choices(range(len(sampler)), weights=sampler, k=length)
    return sum(math.log(policy[token] / sampler[token]) for token in tokens)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=30))
def test_the_statistic_is_the_sum_over_all_beginnings(log_ratios: list[float]) -> None:
    bets = [math.fsum(log_ratios[begin:]) - MARGIN * (len(log_ratios) - begin) for begin in range(len(log_ratios))]
    top = max(bets)
    expected = top + math.log(math.fsum(math.exp(bet - top) for bet in bets))
    assert after(START, log_ratios) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)), st.floats(-1e300, 1e300))
def test_any_numbers_give_a_number(log_ratios: list[float], last: float) -> None:
    result = after(START, [*log_ratios, last])
    assert not math.isnan(result)


def test_it_goes_on_where_it_was() -> None:
    ratios = [0.3, -2.0, 5.0, 1.0]
    assert after(after(START, ratios[:2]), ratios[2:]) == pytest.approx(after(START, ratios))


@pytest.mark.parametrize("sharpness", [0.0, 0.3, 1.0, 3.0], ids=lambda value: f"sharper by {value}")
@pytest.mark.parametrize("length", [1, 5, 60])
def test_honest_makers_are_believed_however_stale(sharpness: float, length: int) -> None:
    source = random.Random(5)
    sampler = [math.exp(-0.4 * rank) for rank in range(12)]
    policy = [math.exp(-0.4 * rank + sharpness * math.sin(rank)) for rank in range(12)]
    sampler, policy = ([weight / sum(law) for weight in law] for law in (sampler, policy))
    known = Claims()
    for _ in range(20_000):
        assert not known.drew("maker", [draws(source, sampler, policy, length)])


@pytest.mark.parametrize(("share_lost", "shift"), [(0.6, 0.05), (0.3, 0.1)])
def test_a_slow_maker_whose_long_answers_are_lost_is_believed(share_lost: float, shift: float) -> None:
    """An answer is long with probability .5, and then it may come too late; the policy has moved towards short ones."""
    source, known = random.Random(3), Claims()
    for _ in range(20_000):
        is_long = source.random() < 0.5
        if not (is_long and source.random() < share_lost):
            assert not known.drew("maker", [math.log((0.5 - shift if is_long else 0.5 + shift) / 0.5)])


@pytest.mark.parametrize(("log_ratio", "most"), [(1000.0, 1), (25.0, 1), (12.0, 2), (5.0, 5), (0.3, 110)])
def test_claims_that_nobody_can_draw_are_found_after_a_few(log_ratio: float, most: int) -> None:
    known, count = Claims(), 1
    while not known.drew("maker", [log_ratio]):
        count += 1
    assert count <= most
    assert not known.drew("maker", [0.0]), "it begins again"


def test_honest_answers_buy_no_credit_for_false_ones() -> None:
    known = Claims()
    assert not known.drew("maker", [-30.0] * 1000)  # of stale answers most ratios are small
    assert known.drew("maker", [LOG_LIMIT + 1])


def test_makers_are_judged_alone_and_those_nearest_the_limit_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "MAX_MAKERS", 3)
    known = Claims()
    for number in range(10):
        assert not known.drew(f"maker {number}", [20.0 if number == 4 else 1.0])
    assert known.drew("maker 4", [5.0])
    assert not known.drew("maker 9", [5.0])
