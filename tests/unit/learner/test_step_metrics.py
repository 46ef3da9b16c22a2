"""Shares of fresh answers are of those alone; weights that were used have their own effective sample size."""

import math

import msgspec
import pytest
import torch

from p2prl.learner.collate import collate
from p2prl.learner.committee import merge
from p2prl.learner.step import compute_part
from p2prl.learner.step_metrics import step_metrics, summary, with_ess
from p2prl.objectives.batch import Batch
from p2prl.objectives.ess import ess_ratio
from p2prl.objectives.registry import find_objective


def half_stale(tools, policy):
    """Four groups, two of them fresh."""
    step = tools.make_step(policy, 4, 3)
    return msgspec.structs.replace(step, ages=((0,), (5,), (0,), (5,)))


@pytest.mark.parametrize(("name", "per"), [("gepo_vcpo", "answer"), ("grpo", "token")])
def test_clipped_when_fresh_is_a_share_of_the_fresh(policy, recipe, tools, name: str, per: str) -> None:
    """At a clip this narrow nearly all clip whose advantage is on the weight's side: the share must not halve."""
    objective = recipe.objective.model_copy(update={"name": name, "clip": 1e-6})
    changed = recipe.model_copy(update={"objective": objective})
    step = half_stale(tools, policy)
    with torch.no_grad():
        next(policy.module.parameters()).mul_(1.02)
    metrics = step_metrics(merge([compute_part(policy, collate(step, 64), changed)]), per)
    fresh = msgspec.structs.replace(step, groups=step.groups[::2], group_ids=step.group_ids[::2], ages=step.ages[::2])
    alone = step_metrics(merge([compute_part(policy, collate(fresh, 64), changed)]), per)
    assert metrics["fresh_fraction"] == 0.5 and alone["fresh_fraction"] == 1
    assert metrics["clip_fraction_fresh"] == pytest.approx(alone["clip_fraction"])
    assert metrics["clip_fraction_fresh"] > 0.1


@pytest.mark.parametrize(
    ("name", "weights"), [("tis", [2.0, 0.5, 2.0]), ("mis", [0.0, 0.5, 0.0]), ("grpo", [8.0, 0.5, 4.0])]
)
def test_the_weights_used_are_capped_as_the_objective_does(policy, tools, name: str, weights: list[float]) -> None:
    batch = Batch(
        group=torch.tensor([0, 0, 0]),
        mask=torch.ones(3, 1, dtype=torch.bool),
        behavior_logp=torch.full((3, 1), -5.0),
        reward=torch.tensor([0.0, 1.0, 0.0]),
        age=torch.zeros(3, 1, dtype=torch.long),
    ).prepare()
    logp = batch.behavior_logp + torch.tensor([[8.0], [0.5], [4.0]]).log()
    empty = summary(collate(tools.make_step(policy, 1, 1), 64))
    part = with_ess(empty, batch, logp, (find_objective(name), {}))
    expected = ess_ratio(torch.tensor([math.log(weight) if weight else -math.inf for weight in weights]))
    assert part.ess_weights.rho == pytest.approx(expected, rel=1e-5)
    assert part.ess.rho == pytest.approx(ess_ratio(torch.tensor([8.0, 0.5, 4.0]).log()), rel=1e-5)
