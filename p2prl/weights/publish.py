"""From a learner's step to the manifest of its version.

In: a StepReport, the parent, the groups trained on. Out: a Manifest, not sealed yet.
"""

import math
from collections.abc import Sequence

import msgspec

from p2prl.records import Hash, Manifest, StepReport, Version


class Trained(msgspec.Struct, frozen=True):
    """One group of the step, as its manifest lists it."""

    id: Hash
    reward_mean: float
    num_answers: int


class Parent(msgspec.Struct, frozen=True):
    """What a new version grows on."""

    version: Version
    id: Hash
    num_groups: int


def _finite(report: StepReport) -> dict[str, float]:
    """JSON has no word for the others; a step may well diverge."""
    return {name: value for name, value in report.metrics.items() if math.isfinite(value)}


def make_manifest(
    report: StepReport, parent: Parent, learner: str, groups: Sequence[Trained], votes: tuple[bytes, ...], now: float
) -> Manifest:
    return Manifest(
        version=report.version,
        parent=parent.version,
        parent_id=parent.id,
        learner=learner,
        contents=report.contents,
        group_ids=tuple(group.id for group in groups),
        group_rewards=tuple(group.reward_mean for group in groups),
        group_answers=tuple(group.num_answers for group in groups),
        num_groups=parent.num_groups + len(groups),
        rho_on=report.rho_on,
        votes=votes,
        metrics={name[:128]: float(value) for name, value in sorted(_finite(report).items())[:64]},
        published_at=now,
    )
