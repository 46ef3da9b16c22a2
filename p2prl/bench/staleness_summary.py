"""What the runs of a staleness study say together.

In: `Run`s. Out: a row for each objective, law and age; the report as JSON (schema 1); a table for the terminal.

A loss is against the same objective's own age-0 runs of the same seeds, in percent of their mean: above 0 it lost. Its
interval is the paired 95 % one of Student's t over the seeds, None with fewer than two pairs or without age 0.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

import msgspec

from p2prl.bench.staleness import Run

SCHEMA = 1


class Row(msgspec.Struct, frozen=True):
    """`loss_low` and `loss_high` bound the paired 95 % interval, percent; a loss is significant when it leaves out 0."""

    objective: str
    law: str
    age: int
    num_seeds: int
    mean: float
    sd: float | None
    loss_vs_fresh_percent: float | None
    loss_low: float | None
    loss_high: float | None
    significant: bool | None
    num_collapsed: int


def summarise(runs: Sequence[Run]) -> tuple[Row, ...]:
    """In the order in which objectives first appear, then by law and age."""
    by_place: dict[tuple[str, str, int], dict[int, Run]] = {}
    for run in runs:
        by_place.setdefault((run.objective, run.law, run.age), {})[run.seed] = run
    order = {objective: number for number, objective in enumerate(dict.fromkeys(run.objective for run in runs))}
    places = sorted(by_place, key=lambda place: (order[place[0]], *place[1:]))
    return tuple(_row(by_place[place], by_place.get((*place[:2], 0), {})) for place in places)


def report(runs: Sequence[Run]) -> dict[str, Any]:
    """The whole of staleness.json."""
    return {"schema": SCHEMA, "runs": msgspec.to_builtins(list(runs)), "summary": msgspec.to_builtins(summarise(runs))}


def _row(runs: dict[int, Run], fresh: dict[int, Run]) -> Row:
    rewards = [run.reward_final for run in runs.values()]
    pairs = [(fresh[seed].reward_final, run.reward_final) for seed, run in runs.items() if seed in fresh]
    loss, low, high = paired_loss(pairs)
    some = next(iter(runs.values()))
    return Row(
        objective=some.objective,
        law=some.law,
        age=some.age,
        num_seeds=len(runs),
        mean=fmean(rewards),
        sd=stdev(rewards) if len(rewards) > 1 else None,
        loss_vs_fresh_percent=loss,
        loss_low=low,
        loss_high=high,
        significant=None if low is None or high is None else not low <= 0.0 <= high,
        num_collapsed=sum(run.collapsed for run in runs.values()),
    )


def paired_loss(pairs: Sequence[tuple[float, float]]) -> tuple[float | None, float | None, float | None]:
    """(mean, low, high) in percent of the fresh mean, of (fresh, stale) rewards a seed."""
    base = fmean(fresh for fresh, _ in pairs) if pairs else 0.0
    if not base > 0:
        return None, None, None
    losses = [100.0 * (fresh - stale) / base for fresh, stale in pairs]
    mean = fmean(losses)
    if len(losses) < 2:
        return mean, None, None
    from scipy.special import stdtrit  # slow to import, and asked for once

    half = float(stdtrit(len(losses) - 1, 0.975)) * stdev(losses) / math.sqrt(len(losses))
    return mean, mean - half, mean + half
