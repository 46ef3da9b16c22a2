"""Plots are drawn from runs and traces, with holes; without matplotlib it says how to get it."""

import sys
from pathlib import Path

import pytest

from p2prl.bench.staleness import TRACED, Run, Settings, Trace
from p2prl.bench.staleness_plots import NoPlots, draw
from p2prl.bench.staleness_summary import summarise


def run(age: int, seed: int, final: float) -> Run:
    return Run("gepo", age, "fixed", seed, final, 0.8, final < 0.4, 3, 0, {}, 1.0, ((0, 0.7),), Settings())


RUNS = [run(0, 0, 0.8), run(0, 1, 0.82), run(32, 0, 0.1), run(32, 1, 0.2)]


def trace_of(of: Run) -> Trace:
    holes: list[float | None] = [1.0, None, 0.5]
    nothing: list[float | None] = [None, None, None]
    return {name: nothing if name == "kl" and of.age else holes for name in TRACED}


def test_three_pictures(tmp_path: Path) -> None:
    files = draw(tmp_path, RUNS, summarise(RUNS), trace_of)
    assert {path.name for path in files} == {"reward_by_age.png", "over_steps.png", "collapse.png"}
    for path in files:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 5000


def test_without_matplotlib_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(NoPlots, match=r"p2prl\[plots\]"):
        draw(tmp_path, RUNS, summarise(RUNS), trace_of)
    assert not list(tmp_path.iterdir())
