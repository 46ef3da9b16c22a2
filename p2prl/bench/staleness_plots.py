"""Plots of a staleness study, where matplotlib is installed (`p2prl[plots]`).

In: runs, their summary, their traces. Out: PNG files: final reward by age; effective sample size and gradient norm over
steps; the collapse diagnosis. `NoPlots` says how to get matplotlib.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from p2prl.bench.staleness import Run, Trace
from p2prl.bench.staleness_summary import Row
from p2prl.errors import P2prlError

SMOOTH_STEPS = 10
DIAGNOSIS = (
    ("ess_ratio", "effective sample size / B", 1e-3),
    ("kl", "KL to the sampler, a token", 1e-2),
    ("log_ratio_max", "largest log ratio", 1e-2),
    ("grad_norm", "gradient norm", 1e-3),
)


class NoPlots(P2prlError):
    """matplotlib is not installed."""


def draw(folder: Path, runs: Sequence[Run], rows: Sequence[Row], traces: Callable[[Run], Trace]) -> list[Path]:
    """The files written, in `folder`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoPlots(f"no plots: {error}. Get matplotlib with: pip install 'p2prl[plots]'") from None
    colors = {name: f"C{number % 10}" for number, name in enumerate(dict.fromkeys(run.objective for run in runs))}
    ages = sorted({run.age for run in runs})
    kept = [(run, traces(run)) for run in runs]
    figures = {
        "reward_by_age.png": _reward_by_age(Figure(figsize=(8, 6.5), layout="constrained"), rows, ages, colors),
        "over_steps.png": _over_steps(
            Figure(figsize=(max(5.0, 3.2 * len(ages)), 6), layout="constrained"), kept, ages, colors
        ),
        "collapse.png": _collapse(Figure(figsize=(9, 13), layout="constrained"), kept, ages[-1], colors),
    }
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=110)
    return [folder / name for name in figures]


def _reward_by_age(figure: Any, rows: Sequence[Row], ages: Sequence[int], colors: dict[str, str]) -> Any:
    axes = figure.subplots()
    places = {age: number for number, age in enumerate(ages)}  # evenly: 0 and 256 are to be seen both
    for objective, color in colors.items():
        mine = [row for row in rows if row.objective == objective]
        x, mean = [places[row.age] for row in mine], [row.mean for row in mine]
        band = [row.sd or 0.0 for row in mine]
        axes.plot(x, mean, "o-", color=color, label=objective)
        low, high = [m - s for m, s in zip(mean, band, strict=True)], [m + s for m, s in zip(mean, band, strict=True)]
        axes.fill_between(x, low, high, color=color, alpha=0.15)
        fallen = [(places[row.age], row.mean) for row in mine if row.num_collapsed]
        axes.plot([point[0] for point in fallen], [point[1] for point in fallen], "x", color=color, markersize=12)
    axes.set_xticks(range(len(ages)), [str(age) for age in ages])
    axes.set(
        xlabel="age, versions", ylabel="final reward", title="Final reward by age (band: sd over seeds; x: collapsed)"
    )
    _legend(figure, axes)
    return figure


def _over_steps(figure: Any, kept: Sequence[tuple[Run, Trace]], ages: Sequence[int], colors: dict[str, str]) -> Any:
    grid = figure.subplots(2, len(ages), sharex=True, sharey="row", squeeze=False)
    for column, age in enumerate(ages):
        for row, (name, label) in enumerate(
            (("ess_ratio", "effective sample size / B"), ("grad_norm", "gradient norm"))
        ):
            axes = grid[row][column]
            for objective, color in colors.items():
                values = _mean_trace(
                    [trace for run, trace in kept if (run.objective, run.age) == (objective, age)], name
                )
                axes.plot(values, color=color, label=objective, linewidth=1)
            if name == "grad_norm":
                axes.set_yscale("symlog", linthresh=1e-2)
            axes.set(title=f"age {age}" if row == 0 else "", ylabel=label if column == 0 else "")
            axes.set_xlabel("step" if row == 1 else "")
    _legend(figure, grid[0][0])
    return figure


def _collapse(figure: Any, kept: Sequence[tuple[Run, Trace]], age: int, colors: dict[str, str]) -> Any:
    panels = figure.subplots(1 + len(DIAGNOSIS), 1, sharex=True)
    for objective, color in colors.items():
        mine = [(run, trace) for run, trace in kept if (run.objective, run.age) == (objective, age)]
        fallen = any(run.collapsed for run, _ in mine)
        style: dict[str, Any] = {"color": color, "linestyle": "--" if fallen else "-", "linewidth": 1}
        label = f"{objective} (collapsed)" if fallen else objective
        panels[0].plot(*_evaluated([run for run, _ in mine]), marker=".", label=label, **style)
        for axes, (name, _, _) in zip(panels[1:], DIAGNOSIS, strict=True):
            axes.plot(_mean_trace([trace for _, trace in mine], name), **style)
    for axes, (_, label, linear_below) in zip(panels[1:], DIAGNOSIS, strict=True):
        axes.set_yscale("symlog", linthresh=linear_below)
        axes.set_ylabel(label, fontsize="small")
    panels[0].set_ylabel("reward, held-out prompts", fontsize="small")
    panels[0].set_title(f"Collapse diagnosis at age {age}: means over seeds, the lower ones of {SMOOTH_STEPS} steps")
    _legend(figure, panels[0])
    panels[-1].set_xlabel("step")
    return figure


def _evaluated(runs: Sequence[Run]) -> tuple[list[int], list[float]]:
    """Ticks and mean rewards of the policy in training, its final one included."""
    by_tick: dict[int, list[float]] = {}
    for run in runs:
        for tick, reward in (*run.evaluations, (run.settings.num_steps, run.reward_final)):
            by_tick.setdefault(tick, []).append(reward)
    return sorted(by_tick), [fmean(by_tick[tick]) for tick in sorted(by_tick)]


def _mean_trace(traces: Sequence[Trace], name: str) -> list[float]:
    """Mean over seeds, then over the last SMOOTH_STEPS ticks; nan where no run made a step."""
    ticks = [_mean(values) for values in zip(*(trace[name] for trace in traces), strict=True)]
    return [_mean(ticks[max(0, tick - SMOOTH_STEPS + 1) : tick + 1]) for tick in range(len(ticks))]


def _mean(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return fmean(known) if known else math.nan


def _legend(figure: Any, axes: Any) -> None:
    """Below the panels: inside it would hide some of the lines."""
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize="small")
