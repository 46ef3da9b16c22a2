"""Exact invariances that both objectives keep, and what a batch refuses."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.objectives import OBJECTIVES, Batch

SETTINGS = [
    ("gepo", {"clip": 0.2}),
    ("gepo", {"clip": None}),
    ("gepo_vcpo", {"clip": 0.2, "baseline": "mean"}),
    ("gepo_vcpo", {"clip": 0.2, "baseline": "min_variance"}),
]
every_objective = pytest.mark.parametrize(("name", "options"), SETTINGS)
seeds = given(st.integers(0, 10_000))


def draw(seed: int, num_groups: int = 3, size: int = 4, longest: int = 6) -> tuple[Batch, torch.Tensor]:
    """A float64 batch with answers of any length (0 too) and its log-probs."""
    source = torch.Generator().manual_seed(seed)
    num = num_groups * size
    length = torch.randint(0, longest + 1, (num,), generator=source)
    q = -torch.rand(num, longest, generator=source, dtype=torch.float64) * 2
    batch = Batch(
        group=torch.arange(num) // size,
        mask=torch.arange(longest) < length[:, None],
        behavior_logp=q,
        reward=torch.randint(0, 2, (num,), generator=source).double(),
        age=torch.randint(0, 9, (num, longest), generator=source),
        score_norm=torch.rand(num, generator=source, dtype=torch.float64) + 0.1,
    )
    return batch, q + torch.randn(num, longest, generator=source, dtype=torch.float64) * 0.3


def solve(name: str, options: dict, batch: Batch, logp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logp = logp.detach().clone().requires_grad_()
    loss, metrics = OBJECTIVES[name](batch, logp, **options)
    loss.backward()
    assert logp.grad is not None
    assert all(isinstance(value, float) for value in metrics.values())
    return loss.detach(), logp.grad


def rows_of(batch: Batch, rows: torch.Tensor) -> Batch:
    """The rows as a batch of their own, nothing prepared."""
    return Batch(
        batch.group[rows],
        batch.mask[rows],
        batch.behavior_logp[rows],
        batch.reward[rows],
        batch.age[rows],
        None if batch.score_norm is None else batch.score_norm[rows],
    )


@every_objective
@settings(max_examples=20, deadline=None)
@seeds
def test_order_does_not_matter(name: str, options: dict, seed: int) -> None:
    batch, logp = draw(seed)
    order = torch.randperm(len(logp), generator=torch.Generator().manual_seed(seed))
    loss, gradient = solve(name, options, batch, logp)
    other, moved = solve(name, options, rows_of(batch, order), logp[order])
    torch.testing.assert_close(other, loss)
    torch.testing.assert_close(moved, gradient[order])


@every_objective
@settings(max_examples=20, deadline=None)
@seeds
def test_parts_sum_to_the_whole(name: str, options: dict, seed: int) -> None:
    batch, logp = draw(seed)
    loss, gradient = solve(name, options, batch, logp)
    order = torch.randperm(len(logp), generator=torch.Generator().manual_seed(seed))
    cuts = [order[:5], order[5:6], order[6:]]
    if options.get("baseline") == "min_variance":
        cuts = [(batch.group == 1).nonzero().flatten(), (batch.group != 1).nonzero().flatten()]
    total, summed = torch.zeros_like(loss), torch.zeros_like(gradient)
    for rows in cuts:
        part, piece = solve(name, options, batch.split(rows), logp[rows])
        total += part
        summed[rows] = piece
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(summed, gradient)


@every_objective
@settings(max_examples=20, deadline=None)
@seeds
def test_padding_has_no_influence(name: str, options: dict, seed: int) -> None:
    batch, logp = draw(seed)
    loss, gradient = solve(name, options, batch, logp)
    noise = torch.full((len(logp), 3), torch.nan, dtype=torch.float64)
    wider = replace(
        batch,
        mask=torch.cat([batch.mask, torch.zeros_like(noise, dtype=torch.bool)], 1),
        behavior_logp=torch.cat([batch.behavior_logp, noise], 1),
        age=torch.cat([batch.age, torch.zeros_like(noise, dtype=torch.long)], 1),
    )
    other, padded = solve(name, options, wider, torch.cat([logp, -noise], 1))
    torch.testing.assert_close(other, loss)
    torch.testing.assert_close(padded[:, :-3], gradient)
    assert not padded[:, -3:].any()


@every_objective
@settings(max_examples=20, deadline=None)
@seeds
def test_a_constant_on_a_group_changes_nothing(name: str, options: dict, seed: int) -> None:
    batch, logp = draw(seed)
    shift = torch.tensor([0.7, -30.0, 5.0], dtype=torch.float64)[batch.group][:, None]
    moved = replace(batch, behavior_logp=batch.behavior_logp + shift)
    for mine, theirs in zip(solve(name, options, moved, logp + shift), solve(name, options, batch, logp), strict=True):
        torch.testing.assert_close(mine, theirs)


@every_objective
@settings(max_examples=20, deadline=None)
@seeds
def test_single_precision_is_close(name: str, options: dict, seed: int) -> None:
    batch, logp = draw(seed)
    single = replace(
        batch,
        behavior_logp=batch.behavior_logp.float(),
        reward=batch.reward.float(),
        score_norm=None if batch.score_norm is None else batch.score_norm.float(),
    )
    loss, _ = solve(name, {**options, "clip": None}, batch, logp)
    other, _ = solve(name, {**options, "clip": None}, single, logp.float())
    torch.testing.assert_close(other.double(), loss, rtol=1e-5, atol=1e-5)


@every_objective
def test_nothing_usable_is_zero(name: str, options: dict) -> None:
    batch, logp = draw(1)
    for empty in (replace(batch, mask=torch.zeros_like(batch.mask)), rows_of(batch, torch.arange(0))):
        loss, gradient = solve(name, options, empty, logp[: len(empty.reward)])
        assert loss == 0 and not gradient.any()


@every_objective
def test_extreme_and_broken_answers_stay_finite(name: str, options: dict) -> None:
    batch, logp = draw(2)
    q, reward = batch.behavior_logp.clone(), batch.reward.clone()
    q[0], q[1], q[2], reward[3] = -5000.0, torch.nan, -torch.inf, torch.inf
    loss, gradient = solve(name, options, replace(batch, behavior_logp=q, reward=reward), logp)
    assert loss.isfinite() and gradient.isfinite().all()
    assert not gradient[1:4][batch.mask[1:4]].any()


@every_objective
def test_equal_rewards_and_groups_of_one_have_no_gradient(name: str, options: dict) -> None:
    batch, logp = draw(3)
    for flat in (replace(batch, reward=torch.full_like(batch.reward, 0.1)), replace(batch, group=torch.arange(12))):
        _, gradient = solve(name, options, flat, logp)
        assert not gradient.any()


@every_objective
def test_a_policy_that_is_not_finite_is_said(name: str, options: dict) -> None:
    batch, logp = draw(4)
    batch = replace(batch, mask=torch.ones_like(batch.mask))
    logp[0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        OBJECTIVES[name](batch, logp, **options)


def test_a_cut_group_is_refused_where_the_baseline_needs_it() -> None:
    batch, logp = draw(5)
    batch = replace(batch, mask=torch.ones_like(batch.mask))
    with pytest.raises(ValueError, match="whole groups"):
        OBJECTIVES["gepo_vcpo"](batch.split(torch.arange(3)), logp[:3], baseline="min_variance")


def test_without_score_norms_the_baseline_is_the_mean() -> None:
    batch, logp = draw(6)
    batch = replace(batch, score_norm=None)
    torch.testing.assert_close(
        solve("gepo_vcpo", {"baseline": "min_variance"}, batch, logp)[1], solve("gepo", {}, batch, logp)[1]
    )


@pytest.mark.parametrize(
    "change",
    [
        {"mask": torch.ones(12, dtype=torch.bool)},
        {"behavior_logp": torch.zeros(12, 2)},
        {"reward": torch.zeros(3)},
        {"age": torch.full((12, 6), -1), "mask": torch.ones(12, 6, dtype=torch.bool)},
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(change: dict) -> None:
    batch, _ = draw(7)
    with pytest.raises(ValueError, match="batch"):
        replace(batch, **change).prepare()
