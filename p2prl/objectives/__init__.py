"""Objectives: pure functions `(batch, logp, **options) -> (loss, metrics)`, and the effective sample size.

    from p2prl.objectives import OBJECTIVES, Batch, ess_ratio, lr_multiplier

    loss, metrics = OBJECTIVES["gepo_vcpo"](batch, logp, clip=0.2, baseline="min_variance")

`batch` what an objective sees - `groups` statistics of prompt groups - `objective` what they all keep to - `ess` the
step size - `baseline` the least variable one - then one file a family, each objective on a screen - `registry` names.
"""

from p2prl.objectives.batch import Batch
from p2prl.objectives.ess import EssState, ess_ratio, lr_multiplier
from p2prl.objectives.gepo import gepo
from p2prl.objectives.gepo_vcpo import gepo_vcpo
from p2prl.objectives.objective import Objective, objective
from p2prl.objectives.registry import OBJECTIVES, find_objective

__all__ = [
    "OBJECTIVES",
    "Batch",
    "EssState",
    "Objective",
    "ess_ratio",
    "find_objective",
    "gepo",
    "gepo_vcpo",
    "lr_multiplier",
    "objective",
]
