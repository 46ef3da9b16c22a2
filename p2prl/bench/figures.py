"""What a benchmark says: figures, each beside its reference and its target.

In: samples. Out: `Figure`s; a report as JSON (schema 1).

Invariant: a figure and its reference were measured in the same run, so that a busy machine slows both.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

SCHEMA = 1


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One measured value. `target` is the most it may be, or with `at_least` the least; None: there is none."""

    name: str
    value: float
    unit: str
    how: str
    reference: float | None = None
    reference_how: str = ""
    target: float | None = None
    at_least: bool = False
    num_samples: int = 1
    details: dict[str, float] = {}
    broken: str = ""
    """What makes the figure worthless although it was measured, e.g. that torch was imported."""

    @property
    def met(self) -> bool | None:
        if self.broken:
            return False
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value < self.target


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of them don't exceed; no interpolation, so it was really seen."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and extremes."""
    return {
        "p50": quantile(samples, 0.5),
        "p95": quantile(samples, 0.95),
        "min": min(samples),
        "max": max(samples),
    }


def report(figures: Sequence[Figure], machine: dict[str, Any], wall_s: float) -> dict[str, Any]:
    """The JSON of a benchmark: `met` says whether every target was."""
    rows = {figure.name: {**msgspec.to_builtins(figure), "met": figure.met} for figure in figures}
    for row in rows.values():
        del row["name"]
    met = all(figure.met is not False for figure in figures)
    return {"schema": SCHEMA, "figures": rows, "met": met, "machine": machine, "wall_s": wall_s}
