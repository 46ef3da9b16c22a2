"""Whether a target is met, quantiles that were really seen, and the report."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.bench.figures import Figure, quantile, report, spread


def figure(**over) -> Figure:
    return Figure(**({"name": "join", "value": 1.0, "unit": "s", "how": "a clock", "target": 3.0} | over))


@pytest.mark.parametrize(
    ("over", "met"),
    [
        ({}, True),
        ({"value": 3.0}, False),
        ({"target": None}, None),
        ({"value": 96.0, "target": 95.0, "at_least": True}, True),
        ({"value": 94.9, "target": 95.0, "at_least": True}, False),
        ({"broken": "torch was imported"}, False),
        ({"target": None, "broken": "torch was imported"}, False),
    ],
)
def test_met(over: dict, met: bool | None) -> None:
    assert figure(**over).met is met


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_a_quantile_is_a_sample_that_enough_do_not_exceed(samples: list[float], share: float) -> None:
    value = quantile(samples, share)
    assert value in samples
    assert sum(sample <= value for sample in samples) >= share * len(samples) - 1e-6
    assert sum(sample < value for sample in samples) < max(share * len(samples), 1)


def test_a_quantile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        quantile([], 0.5)


def test_spread() -> None:
    found = spread([float(number) for number in range(100, 0, -1)])
    assert found == {"p50": 50.0, "p95": 95.0, "min": 1.0, "max": 100.0}


def test_the_report_names_each_figure_once_and_says_whether_all_targets_were_met() -> None:
    good, bad = figure(reference=0.5), figure(name="idle_cpu", value=5.0)
    made = json.loads(json.dumps(report([good], {"cores": 2}, 1.5)))
    assert (made["schema"], made["met"], made["wall_s"]) == (1, True, 1.5)
    row = made["figures"]["join"]
    assert {
        "value": 1.0,
        "unit": "s",
        "reference": 0.5,
        "target": 3.0,
        "met": True,
        "how": "a clock",
    }.items() <= row.items()
    assert report([good, bad], {}, 0.0)["met"] is False
    assert report([figure(target=None)], {}, 0.0)["met"] is True
