"""Whose clock is wrong."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.swarm.skew import MAX_SKEW_S, WITNESSES, Judged, judge, offset

near = st.floats(-MAX_SKEW_S, MAX_SKEW_S)
anything = st.floats(-1e9, 1e9)


def named(values: list[float]) -> dict[str, float]:
    return {str(number): value for number, value in enumerate(values)}


@given(st.lists(anything, max_size=WITNESSES - 1))
def test_fewer_than_three_peers_stop_nobody(lies: list[float]) -> None:
    assert judge(named(lies)).kind is not Judged.OFF


@given(st.lists(near, max_size=20), st.lists(anything, max_size=2))
def test_two_liars_among_any_honest_peers_stop_nobody(honest: list[float], lies: list[float]) -> None:
    assert judge(named(honest + lies)).kind is not Judged.OFF


@given(st.lists(near, min_size=1, max_size=20), st.data())
def test_a_minority_of_liars_is_not_even_told_of(honest: list[float], data: st.DataObject) -> None:
    lies = data.draw(st.lists(anything, max_size=len(honest) - 1))
    assert judge(named(honest + lies)).kind is Judged.FINE


@given(st.floats(2 * MAX_SKEW_S + 0.1, 1e6), st.booleans(), st.lists(near, min_size=WITNESSES, max_size=20), st.data())
def test_a_clock_that_is_off_is_found_despite_a_minority(
    error: float, ahead: bool, jitter: list[float], data: st.DataObject
) -> None:
    ours = error if ahead else -error
    lies = data.draw(st.lists(anything, max_size=len(jitter) - 1))
    found = judge(named([ours + late for late in jitter] + lies))
    assert found.kind is Judged.OFF
    assert (found.offset_s > 0) == ahead
    assert ("ahead of" if ahead else "behind") in found.message


@given(st.dictionaries(st.text(max_size=3), anything), st.randoms())
def test_the_order_of_peers_does_not_matter(offsets: dict[str, float], random) -> None:
    names = list(offsets)
    random.shuffle(names)
    assert judge({name: offsets[name] for name in names}) == judge(offsets)


@pytest.mark.parametrize("theirs", [math.nan, math.inf, -math.inf, 1e300])
def test_a_clock_that_is_no_time_gives_no_offset(theirs: float) -> None:
    assert offset(10.0, 11.0, theirs) is None


@given(st.floats(0, 2e9), st.floats(0, 3), st.floats(-100, 100), st.floats(0, 1))
def test_an_offset_is_right_to_half_the_round_trip(sent_at: float, rtt_s: float, ours: float, share: float) -> None:
    answered_at = sent_at + share * rtt_s
    found = offset(sent_at, sent_at + rtt_s, answered_at - ours)
    assert found is not None
    assert abs(found - ours) <= rtt_s / 2 + 1e-3
