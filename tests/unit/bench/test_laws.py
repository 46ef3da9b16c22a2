"""Delay laws: their moments, their bounds, and which group is drawn when."""

from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.bench.laws import BOUNDS_RATIO, LAWS, delay, drawn_at, schedule, share_of
from p2prl.errors import ConfigError

AGES = st.integers(0, 300)
SHARES = st.floats(0, 1, exclude_min=True, exclude_max=True)
RANDOM = ("lognormal", "weibull")


def delays(law: str, age: int, num: int = 20_000) -> list[int]:
    """At evenly spread shares, so that moments are those of the law itself."""
    return [delay(law, age, (number + 0.5) / num) for number in range(num)]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("age", [8, 64, 256])
def test_the_mean_delay_is_the_age(law: str, age: int) -> None:
    assert fmean(delays(law, age)) == pytest.approx(age, rel=0.01)


@pytest.mark.parametrize(("law", "variation"), [("lognormal", 0.68), ("weibull", 0.47)])
def test_how_spread_delays_are(law: str, variation: float) -> None:
    """sqrt(e^(sigma^2) - 1) of the log-normal, sqrt(G(1 + 2/k) / G(1 + 1/k)^2 - 1) of the Weibull, barely clamped."""
    drawn = delays(law, 100)
    assert stdev(drawn) / fmean(drawn) == pytest.approx(variation, abs=0.02)


@pytest.mark.parametrize("law", RANDOM)
def test_the_bounds_are_those_of_the_paper(law: str) -> None:
    drawn = delays(law, 10_000)
    low, high = min(drawn), max(drawn)
    assert high / low == pytest.approx(BOUNDS_RATIO, rel=0.01)
    at_bounds = sum(value in (low, high) for value in drawn) / len(drawn)
    assert at_bounds == pytest.approx(0.005, abs=0.001)


@given(law=st.sampled_from(RANDOM), age=AGES, one=SHARES, other=SHARES)
def test_a_longer_share_is_no_shorter_delay(law: str, age: int, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 0 <= delay(law, age, low) <= delay(law, age, high)


@given(age=AGES, share=SHARES)
def test_fixed_is_fixed(age: int, share: float) -> None:
    assert delay("fixed", age, share) == age


def test_age_0_is_fresh_under_every_law() -> None:
    assert {delay(law, 0, 0.9) for law in LAWS} == {0}


def test_an_unknown_law_is_named() -> None:
    with pytest.raises(ConfigError, match="'gamma'"):
        delay("gamma", 1, 0.5)


@given(st.integers(0, 2**40), st.integers(0, 2**20), st.integers(0, 2**10))
def test_shares_are_in_the_open_interval_and_the_same_again(seed: int, tick: int, slot: int) -> None:
    share = share_of(seed, tick, slot)
    assert 0 < share < 1
    assert share_of(seed, tick, slot) == share


def test_shares_are_spread_evenly() -> None:
    shares = [share_of(seed, tick, slot) for seed in range(5) for tick in range(40) for slot in range(32)]
    assert len(set(shares)) == len(shares)
    assert fmean(shares) == pytest.approx(0.5, abs=0.02)
    assert stdev(shares) == pytest.approx(12**-0.5, abs=0.02)


@given(
    law=st.sampled_from(LAWS),
    age=AGES,
    seed=st.integers(0, 9),
    num_ticks=st.integers(1, 40),
    num_groups=st.integers(1, 5),
)
def test_every_group_is_drawn_once_and_never_under_weights_to_come(
    law: str, age: int, seed: int, num_ticks: int, num_groups: int
) -> None:
    plan = schedule(law, age, seed, num_ticks, num_groups)
    assert plan == schedule(law, age, seed, num_ticks, num_groups)
    for tick, origins in enumerate(plan):
        for slot, origin in enumerate(origins):
            assert origin == max(0, tick - delay(law, age, share_of(seed, tick, slot)))
    drawn = [(origin, place) for origin, places in enumerate(drawn_at(plan)) for place in places]
    assert sorted(place for _, place in drawn) == [(t, s) for t in range(num_ticks) for s in range(num_groups)]
    assert all(plan[tick][slot] == origin <= tick for origin, (tick, slot) in drawn)
