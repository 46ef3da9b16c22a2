"""The minimum-variance baseline in a real step: norms, gradient and metrics against brute force."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2prl.learner.collate import collate
from p2prl.learner.logprobs import token_logprobs
from p2prl.learner.score_step import group_batches, needs_score_norms
from p2prl.learner.step import apply_part, compute_part
from p2prl.objectives import OBJECTIVES


def with_objective(recipe, budget: int = 65536, **changes):
    objective = recipe.objective.model_copy(update=changes)
    learner = recipe.learner.model_copy(update={"micro_batch_tokens": budget})
    return recipe.model_copy(update={"objective": objective, "learner": learner})


def drifted(policy, tools, num_groups: int = 3):
    """A step whose answers were drawn before the policy moved."""
    step = tools.make_step(policy, num_groups, 11)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=source) * 0.01)
    return step


def expected(policy, rows, name: str, options: dict) -> tuple[float, list[torch.Tensor], torch.Tensor]:
    """Loss, gradient (both times the number of answers) and norms, one backward pass an answer."""
    batch, everyone = rows.batch, torch.arange(len(rows.ids))
    parameters = list(policy.module.parameters())
    logp = token_logprobs(policy, rows, batch, everyone).logp
    found = [torch.autograd.grad(row.sum(), parameters, retain_graph=True, allow_unused=True) for row in logp]
    norms = torch.stack([sum(v.square().sum() for v in row if v is not None).sqrt() for row in found])
    known = batch.__class__(**(vars(batch) | {"score_norm": norms}))
    loss = OBJECTIVES[name](known, logp, **options)[0] * batch.num_answers
    gradient = torch.autograd.grad(loss, parameters, allow_unused=True)
    policy.zero_gradient()
    found = [torch.zeros_like(p) if g is None else g for g, p in zip(gradient, parameters, strict=True)]
    return loss.item(), found, norms.detach()


@pytest.mark.parametrize(
    ("name", "budget"), [("gepo_vcpo", 65536), ("vcpo", 65536), ("gepo_vcpo", 100), ("gepo_vcpo", 64)]
)
def test_the_step_has_the_gradient_of_the_objective_with_exact_norms(policy, recipe, tools, name, budget) -> None:
    """Budgets of one batch, of a batch a group, of pieces of a group."""
    step = drifted(policy, tools)
    changed = with_objective(recipe, budget, name=name, baseline="min_variance")
    rows = collate(step, 64)
    options = {"clip": 0.2, "baseline": "min_variance"} if name == "gepo_vcpo" else {}
    loss, gradient, norms = expected(policy, rows, name, options)
    assert norms.std() > 0.1 * norms.mean()
    part = compute_part(policy, rows, changed)
    assert part.faults == () and part.sums["baseline_min_variance"] == 24
    assert part.sums["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-4)
    for mine, theirs in zip(part.gradient, gradient, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
    mean = compute_part(policy, rows, with_objective(recipe, name="gepo_vcpo", baseline="mean"))
    assert any(
        not torch.allclose(a, b, rtol=1e-2, atol=1e-3) for a, b in zip(part.gradient, mean.gradient, strict=True)
    )
    assert part.ess.rho == pytest.approx(mean.ess.rho, rel=1e-4)
    assert part.sums["entropy"] == pytest.approx(mean.sums["entropy"], rel=1e-4)
    assert policy.shares_prompts


def test_a_whole_step_is_made(policy, recipe, tools) -> None:
    changed = with_objective(recipe, baseline="min_variance")
    part = compute_part(policy, collate(drifted(policy, tools), 64), changed)
    done = apply_part(policy, part, changed, 1.0)
    assert done.skipped == "" and done.metrics["baseline_min_variance"] == 1.0


def test_broken_weights_skip_the_step(policy, recipe, tools) -> None:
    step = tools.make_step(policy, 2, 7)
    with torch.no_grad():
        next(policy.module.parameters()).fill_(float("nan"))
    part = compute_part(policy, collate(step, 64), with_objective(recipe, baseline="min_variance"))
    assert "not finite" in part.faults[0] and part.gradient == []


def test_only_what_needs_norms_pays_for_them() -> None:
    assert needs_score_norms(OBJECTIVES["vcpo"], {})
    assert needs_score_norms(OBJECTIVES["gepo_vcpo"], {"baseline": "min_variance"})
    assert not needs_score_norms(OBJECTIVES["gepo_vcpo"], {"baseline": "mean"})
    assert not needs_score_norms(OBJECTIVES["gepo"], {})


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 4)), min_size=1, max_size=30),
    st.integers(1, 300),
)
def test_groups_stay_whole_and_pieces_within_the_budget(rows: list[tuple[int, int]], budget: int) -> None:
    length, group = [row[0] for row in rows], [row[1] for row in rows]
    batches = group_batches(length, group, budget)
    assert sorted(row for pieces in batches for piece in pieces for row in piece) == list(range(len(rows)))
    where = {row: number for number, pieces in enumerate(batches) for piece in pieces for row in piece}
    for row, name in enumerate(group):
        assert where[row] == where[group.index(name)]
    for pieces in batches:
        for piece in pieces:
            assert len(piece) == 1 or len(piece) * max(length[row] for row in piece) <= budget
        assert len(pieces) == 1 or len({group[row] for piece in pieces for row in piece}) == 1
