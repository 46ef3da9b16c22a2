"""A rate that its owner may change at any time."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.swarm.bandwidth import Bandwidth


def test_the_burst_is_free_and_then_the_rate_holds():
    line = Bandwidth(100.0, 0.0)
    assert line.take(100, 0.0) == 0.0
    assert line.take(50, 0.0) == 0.5
    assert line.take(50, 0.0) == 1.0
    assert line.wait_s(0.5) == 0.5
    assert line.take(100, 3.0) == 0.0


def test_no_limit_never_waits():
    line = Bandwidth(None, 0.0)
    assert line.take(2**40, 0.0) == 0.0 and line.wait_s(0.0) == 0.0


def test_the_rate_changes_live():
    line = Bandwidth(100.0, 0.0)
    line.take(300, 0.0)  # 200 in debt
    line.set_rate(50.0, 1.0)  # 100 left
    assert line.wait_s(1.0) == 2.0
    line.set_rate(None, 1.0)
    assert line.take(10**9, 1.0) == 0.0
    line.set_rate(10.0, 2.0)
    assert line.take(10, 2.0) == 0.0 and line.take(10, 2.0) == 1.0


def test_bytes_not_sent_are_given_back():
    line = Bandwidth(100.0, 0.0)
    line.take(150, 0.0)
    line.give_back(50)
    assert line.wait_s(0.0) == 0.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_rate_must_be_positive(rate):
    with pytest.raises(ValueError, match="positive"):
        Bandwidth(rate, 0.0)


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 3)), min_size=1, max_size=50))
def test_never_more_than_burst_plus_rate(asks):
    line = Bandwidth(100.0, 0.0)
    now, total, order = 0.0, 0, []
    for num_bytes, pause_s in asks:
        now += pause_s
        sent_at = now + line.take(num_bytes, now)
        order.append(sent_at)
        total += num_bytes
        assert total <= 100.0 + 100.0 * sent_at + 1e-6
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(order))
