"""The proximal policy: by age it is the formula, recomputed it is what the policy itself gives."""

import math

import pytest
import torch

from p2prl.learner.collate import collate
from p2prl.learner.logprobs import token_logprobs
from p2prl.learner.prox import interpolated, recomputed
from p2prl.learner.step import compute_part
from p2prl.objectives.batch import Batch


def test_it_lies_between_sampler_and_policy_by_age() -> None:
    batch = Batch(
        group=torch.tensor([0, 0]),
        mask=torch.tensor([[True, True, True], [True, True, False]]),
        behavior_logp=torch.tensor([[-1.0, -1.0, -1.0], [-2.0, -2.0, math.nan]]),
        reward=torch.tensor([0.0, 1.0]),
        age=torch.tensor([[0, 1, 2], [4, 1000, 7]]),
    )
    logp = torch.tensor([[-0.5, -0.5, -0.5], [-1.0, -1.0, math.nan]], requires_grad=True)
    prox = interpolated(batch, logp).prox_logp
    assert prox is not None and not prox.requires_grad
    assert prox[0].tolist() == pytest.approx([-1.0, -1.0, -0.75])
    assert prox[1].tolist() == pytest.approx([-1.25, -1.001, 0.0])


@pytest.mark.parametrize("budget", [65536, 64])
def test_recomputed_it_is_the_parents_log_probs_whatever_the_micro_batches(policy, tools, budget: int) -> None:
    rows = collate(tools.make_step(policy, 3, 1, age=2), 64)
    with torch.no_grad():
        expected = token_logprobs(policy, rows, rows.batch, torch.arange(len(rows.ids))).logp
    found = recomputed(policy, rows, budget).batch
    assert found.prox_logp is not None and found.tail_moment is not None
    torch.testing.assert_close(found.prox_logp, expected, atol=1e-5, rtol=1e-5)
    assert all(item.grad is None for item in policy.module.parameters())


def changed(recipe, budget: int = 65536, **objective):
    learner = recipe.learner.model_copy(update={"micro_batch_tokens": budget})
    return recipe.model_copy(
        update={"learner": learner, "objective": recipe.objective.model_copy(update={"step_size": "none"} | objective)}
    )


def stale(policy, tools):
    """Answers drawn before the policy moved, and so of age 3."""
    step = tools.make_step(policy, 4, 11, age=3)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=source) * 0.01)
    return step


def same(mine, theirs) -> bool:
    pairs = zip(mine.gradient, theirs.gradient, strict=True)
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in pairs)


def test_decoupled_ppo_by_age_is_a3po(policy, recipe, tools) -> None:
    rows = collate(stale(policy, tools), 64)
    by_age = compute_part(policy, rows, changed(recipe, name="decoupled_ppo", prox="a3po"))
    a3po = compute_part(policy, rows, changed(recipe, name="a3po"))
    assert by_age.faults == () and any(value.any() for value in a3po.gradient)
    assert same(by_age, a3po)
    recomputed_part = compute_part(policy, rows, changed(recipe, name="decoupled_ppo", prox="recompute"))
    assert recomputed_part.faults == () and not same(recomputed_part, a3po)


def test_a3po_beside_a_forward_pass_tells_its_error(policy, recipe, tools) -> None:
    rows = collate(stale(policy, tools), 64)
    part = compute_part(policy, rows, changed(recipe, name="a3po", prox="recompute"))
    assert part.sums["token_prox_error"] > 0


def test_m2po_ranks_the_whole_batch_in_any_micro_batches(policy, recipe, tools) -> None:
    rows = collate(stale(policy, tools), 64)
    options = {"second_moment": 1e-3}
    whole, cut = (
        compute_part(policy, rows, changed(recipe, budget, name="m2po", prox="recompute", options=options))
        for budget in (65536, 64)
    )
    assert 0 < whole.sums["token_clip_fraction"] < whole.num_tokens
    assert cut.sums["token_clip_fraction"] == pytest.approx(whole.sums["token_clip_fraction"])
    assert same(whole, cut)
