"""Parts of one step, made by one or several learners, to the step itself. No model, no I/O.

In: `Part`s. Out: one `Part`. A committee of one goes the same way.

Invariants: everything in a part is a sum (or merges like one), so that the order and the number of parts don't matter;
means are made at the very end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from p2prl.objectives.ess import EssState


@dataclass(frozen=True)
class Part:
    """`gradient` is the sum over the part's answers of the loss's, not divided by their number. [] without answers."""

    gradient: list[Tensor]
    ess: EssState  # of the raw sequence ratios
    ess_weights: EssState  # of the weights that the objective used
    num_answers: int
    num_tokens: int
    num_groups: int
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    faults: tuple[str, ...] = ()  # why the step must be skipped
    log_ratios: tuple[tuple[int, float], ...] = ()  # by a group's place among the learner's own: merged, they are none


def merge(parts: Sequence[Part]) -> Part:
    """The whole step's part."""
    whole = Part([], EssState(), EssState(), 0, 0, 0)
    for part in parts:
        whole = Part(
            _add(whole.gradient, part.gradient),
            whole.ess.merge(part.ess),
            whole.ess_weights.merge(part.ess_weights),
            whole.num_answers + part.num_answers,
            whole.num_tokens + part.num_tokens,
            whole.num_groups + part.num_groups,
            {name: whole.sums.get(name, 0.0) + part.sums.get(name, 0.0) for name in {**whole.sums, **part.sums}},
            {name: _highest(name, whole, part) for name in {**whole.maxima, **part.maxima}},
            (*whole.faults, *part.faults),
        )
    return whole


def _add(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    if not first or not second:
        return first or second
    return [a + b for a, b in zip(first, second, strict=True)]


def _highest(name: str, first: Part, second: Part) -> float:
    return max(part.maxima[name] for part in (first, second) if name in part.maxima)
