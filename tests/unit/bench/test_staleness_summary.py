"""The maths of the summary: losses, paired intervals, collapse."""

import math
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.bench.staleness import Run, Settings
from p2prl.bench.staleness_summary import paired_loss, report, summarise

REWARDS = st.floats(0.01, 1)


def run(objective: str = "gepo", age: int = 0, seed: int = 0, final: float = 0.8, *, collapsed: bool = False) -> Run:
    return Run(objective, age, "fixed", seed, final, 0.8, collapsed, 250, 0, {}, 1.0, ((0, 0.7),), Settings())


def test_a_loss_by_hand() -> None:
    """Losses 10, 20 and 30 % of the fresh mean .5: mean 20, sd 10, t(2) = 4.3027."""
    loss, low, high = paired_loss([(0.4, 0.35), (0.5, 0.4), (0.6, 0.45)])
    assert loss == pytest.approx(20)
    assert high - 20 == pytest.approx(4.30265 * 10 / math.sqrt(3), rel=1e-5)
    assert low == pytest.approx(40 - high)


def test_no_interval_without_two_pairs_and_no_loss_without_fresh_runs() -> None:
    assert paired_loss([]) == (None, None, None)
    assert paired_loss([(0.5, 0.25)]) == (pytest.approx(50), None, None)
    assert paired_loss([(0.0, 0.0), (0.0, 0.1)]) == (None, None, None)


@given(st.lists(st.tuples(REWARDS, REWARDS), min_size=2, max_size=8), st.floats(0.1, 10))
def test_a_loss_has_no_unit_and_lies_in_its_interval(pairs: list[tuple[float, float]], scale: float) -> None:
    loss, low, high = paired_loss(pairs)
    assert loss is not None and low is not None and high is not None
    assert low <= loss <= high
    fresh, stale = fmean(one for one, _ in pairs), fmean(other for _, other in pairs)
    assert loss == pytest.approx(100 * (fresh - stale) / fresh, abs=1e-9)
    scaled = paired_loss([(scale * one, scale * other) for one, other in pairs])
    assert scaled == pytest.approx((loss, low, high), rel=1e-6, abs=1e-6)


@given(st.lists(REWARDS, min_size=2, max_size=8), st.floats(0, 0.9))
def test_the_same_loss_each_time_is_certain(fresh: list[float], share: float) -> None:
    """Paired: how seeds differ among each other does not blur it."""
    base = fmean(fresh)
    loss, low, high = paired_loss([(one, one - share * base) for one in fresh])
    assert loss == pytest.approx(100 * share, abs=1e-9)
    assert (low, high) == (pytest.approx(loss, abs=1e-6), pytest.approx(loss, abs=1e-6))


def test_rows_compare_each_objective_with_itself_on_the_seeds_both_have() -> None:
    runs = [run(seed=seed, final=0.8) for seed in (0, 1)]
    runs += [run(age=32, seed=seed, final=final) for seed, final in ((0, 0.6), (1, 0.64), (2, 0.1))]
    runs += [run("tis", 32, 0, 0.1, collapsed=True), run("tis", 32, 1, 0.3)]
    fresh, stale, other = summarise(runs)
    assert (fresh.objective, fresh.age, fresh.loss_vs_fresh_percent, fresh.significant) == ("gepo", 0, 0.0, False)
    assert (stale.num_seeds, stale.mean) == (3, pytest.approx((0.6 + 0.64 + 0.1) / 3))
    assert stale.loss_vs_fresh_percent == pytest.approx(22.5)  # of seeds 0 and 1
    assert stale.significant is False  # 12.7 is t(1): +-31.8
    assert (other.num_collapsed, other.loss_vs_fresh_percent, other.significant) == (1, None, None)


def test_the_report_is_the_schema_of_the_issue() -> None:
    made = report([run(), run(age=32)])
    assert made.keys() == {"schema", "runs", "summary"}
    assert made["schema"] == 1
    assert {"objective", "age", "law", "seed", "reward_final", "reward_best", "collapsed"} <= made["runs"][0].keys()
    assert {"objective", "age", "mean", "sd", "loss_vs_fresh_percent"} <= made["summary"][0].keys()
