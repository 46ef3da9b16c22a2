"""Objectives: pure functions `(batch, logp, **options) -> (loss, metrics)`, and the effective sample size."""

from p2prl.objectives.batch import Batch
from p2prl.objectives.ess import EssState, ess_ratio, lr_multiplier
from p2prl.objectives.gepo import gepo
from p2prl.objectives.gepo_vcpo import gepo_vcpo
from p2prl.objectives.registry import OBJECTIVES, find_objective

__all__ = [
    "OBJECTIVES",
    "Batch",
    "EssState",
    "ess_ratio",
    "find_objective",
    "gepo",
    "gepo_vcpo",
    "lr_multiplier",
]
