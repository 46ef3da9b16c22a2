"""Exact invariances that every objective keeps, and what no input may do to it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.objectives import OBJECTIVES, Batch
from tests.batches import NEEDS_WHOLE_GROUPS, SETTINGS, draw, label, rows_of, solve


def objectives_but(*names: str):
    chosen = [setting for setting in SETTINGS if setting[0] not in names]
    return pytest.mark.parametrize(("name", "options"), chosen, ids=[label(setting) for setting in chosen])


every_objective = objectives_but()
few = settings(max_examples=10, deadline=None)
seeds = given(st.integers(0, 10_000))

# Their loss is a surrogate with p itself in it, whose value alone a shift of p and q moves.
VALUE_MOVES = {"reinforce", "vcpo", "tis", "mis", "cispo", "vespo"}


@every_objective
@few
@seeds
def test_order_does_not_matter(name: str, options: dict, seed: int) -> None:
    batch, logp = draw(seed)
    order = torch.randperm(len(logp), generator=torch.Generator().manual_seed(seed))
    loss, gradient = solve(name, options, batch, logp)
    other, moved = solve(name, options, rows_of(batch, order), logp[order])
    torch.testing.assert_close(other, loss)
    torch.testing.assert_close(moved, gradient[order])


@every_objective
@few
@seeds
def test_names_of_groups_do_not_matter(name: str, options: dict, seed: int) -> None:
    batch, logp = draw(seed)
    renamed = replace(batch, group=torch.tensor([7, -(2**40), 2**61])[batch.group])
    for mine, theirs in zip(solve(name, options, renamed, logp), solve(name, options, batch, logp), strict=True):
        torch.testing.assert_close(mine, theirs)


@every_objective
@few
@given(st.integers(0, 10_000), st.lists(st.integers(0, 11), max_size=4))
def test_parts_sum_to_the_whole(name: str, options: dict, seed: int, cuts: list[int]) -> None:
    batch, logp = draw(seed)
    if name in NEEDS_WHOLE_GROUPS:
        parts = [(batch.group == number).nonzero().flatten() for number in (2, 0, 1)]
    else:
        batch = replace(batch, score_norm=None)
        order = torch.randperm(len(logp), generator=torch.Generator().manual_seed(seed))
        parts = list(torch.tensor_split(order, sorted(cuts)))
    loss, gradient = solve(name, options, batch, logp)
    metrics = OBJECTIVES[name](batch, logp, **options)[1]
    total, summed = torch.zeros_like(loss), torch.zeros_like(gradient)
    shares = dict.fromkeys(metrics, 0.0)
    for rows in parts:
        part, piece = solve(name, options, batch.split(rows), logp[rows])
        total += part
        summed[rows] = piece
        for key, value in OBJECTIVES[name](batch.split(rows), logp[rows], **options)[1].items():
            shares[key] += value
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(summed, gradient)
    assert shares == pytest.approx(metrics)


@every_objective
@few
@seeds
def test_parts_of_parts_sum_too(name: str, options: dict, seed: int) -> None:
    batch, logp = draw(seed)
    gradient = solve(name, options, batch, logp)[1]
    outer = (batch.group != 1).nonzero().flatten()
    inner = (batch.group[outer] == 2).nonzero().flatten()
    piece = solve(name, options, batch.split(outer).split(inner), logp[outer][inner])[1]
    torch.testing.assert_close(piece, gradient[outer][inner])


@every_objective
@few
@seeds
def test_padding_has_no_influence(name: str, options: dict, seed: int) -> None:
    batch, logp = draw(seed)
    loss, gradient = solve(name, options, batch, logp)
    noise = torch.full((len(logp), 3), torch.nan, dtype=torch.float64)
    assert batch.prox_logp is not None
    wider = replace(
        batch,
        mask=torch.cat([batch.mask, torch.zeros_like(noise, dtype=torch.bool)], 1),
        behavior_logp=torch.cat([batch.behavior_logp, noise], 1),
        prox_logp=torch.cat([batch.prox_logp, noise], 1),
        age=torch.cat([batch.age, torch.full_like(noise, -1, dtype=torch.long)], 1),
    )
    other, padded = solve(name, options, wider, torch.cat([logp, -noise], 1))
    torch.testing.assert_close(other, loss)
    torch.testing.assert_close(padded[:, :-3], gradient)
    assert not padded[:, -3:].any()


@objectives_but("dppo")  # which measures probabilities, not ratios: the shift means something to it
@few
@seeds
def test_a_constant_on_a_group_changes_no_gradient(name: str, options: dict, seed: int) -> None:
    batch, logp = draw(seed)
    shift = torch.tensor([0.7, -30.0, 5.0], dtype=torch.float64)[batch.group][:, None]
    assert batch.prox_logp is not None
    moved = replace(batch, behavior_logp=batch.behavior_logp + shift, prox_logp=batch.prox_logp + shift)
    loss, gradient = solve(name, options, batch, logp)
    other, shifted = solve(name, options, moved, logp + shift)
    torch.testing.assert_close(shifted, gradient)
    if name not in VALUE_MOVES:
        torch.testing.assert_close(other, loss)


@every_objective
@few
@seeds
def test_single_precision_is_close(name: str, options: dict, seed: int) -> None:
    batch, logp = draw(seed)
    tensors = {key: getattr(batch, key).float() for key in ("behavior_logp", "prox_logp", "reward", "score_norm")}
    loss, gradient = solve(name, options, batch, logp)
    other, single = solve(name, options, replace(batch, **tensors), logp.float())
    assert single.dtype == other.dtype == torch.float32
    torch.testing.assert_close(other.double(), loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(single.double(), gradient, rtol=1e-5, atol=1e-5)


@every_objective
def test_nothing_usable_is_zero(name: str, options: dict) -> None:
    batch, logp = draw(1)
    for empty in (replace(batch, mask=torch.zeros_like(batch.mask)), rows_of(batch, torch.arange(0))):
        loss, gradient = solve(name, options, empty, logp[: len(empty.reward)])
        assert loss == 0 and not gradient.any()
    loss, gradient = solve(name, options, Batch(**no_tokens()), torch.zeros(2, 0))
    assert loss == 0 and gradient.shape == (2, 0)


def no_tokens() -> dict:
    return {
        "group": torch.zeros(2, dtype=torch.long),
        "mask": torch.zeros(2, 0, dtype=torch.bool),
        "behavior_logp": torch.zeros(2, 0),
        "reward": torch.ones(2),
        "age": torch.zeros(2, 0, dtype=torch.long),
        "prox_logp": torch.zeros(2, 0),
    }


@objectives_but("r2vpo")  # whose penalty pulls whatever the rewards
@few
@seeds
def test_equal_rewards_and_groups_of_one_have_no_gradient(name: str, options: dict, seed: int) -> None:
    batch, logp = draw(seed)
    for flat in (replace(batch, reward=torch.full_like(batch.reward, 0.1)), replace(batch, group=torch.arange(12))):
        _, gradient = solve(name, options, flat, logp)
        assert not gradient.any()


extremes = st.sampled_from([0.0, -1e-30, -745.0, -5000.0, -3e38, torch.nan, torch.inf, -torch.inf])


@every_objective
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.lists(st.tuples(st.integers(0, 11), extremes, extremes), min_size=1, max_size=4))
def test_extreme_answers_stay_finite_or_are_refused(name: str, options: dict, seed: int, changes: list) -> None:
    batch, logp = draw(seed)
    q, p = batch.behavior_logp.clone(), logp.clone()
    for row, sampled, policy in changes:
        q[row], p[row] = sampled, policy
    for dtype in (torch.float64, torch.float32):
        prox = None if name == "m2po" else (q + 0.1).to(dtype)
        changed = replace(batch, behavior_logp=q.to(dtype), reward=batch.reward.to(dtype), prox_logp=prox)
        try:
            loss, gradient = solve(name, options, changed, p.to(dtype))
            outcome = "finite" if loss.isfinite() and gradient.isfinite().all() else f"loss {loss}"
        except ValueError as error:
            outcome = str(error)
        assert outcome == "finite" or "log-probs that are not finite" in outcome


@every_objective
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_one_broken_answer_is_left_out_and_stops_nobody(name: str, options: dict, broken: float) -> None:
    batch, logp = draw(2)
    batch = replace(batch, mask=torch.ones_like(batch.mask))
    q, reward = batch.behavior_logp.clone(), batch.reward.clone()
    q[0, 3], reward[5] = broken, broken
    loss, gradient = solve(name, options, replace(batch, behavior_logp=q, reward=reward), logp)
    kept = torch.tensor([row for row in range(12) if row not in (0, 5)])
    assert not gradient[[0, 5]].any()
    wanted, expected = solve(name, options, rows_of(batch, kept), logp[kept])
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(gradient[kept], expected)


@every_objective
def test_a_policy_that_is_not_finite_is_said(name: str, options: dict) -> None:
    batch, logp = draw(4)
    batch = replace(batch, mask=torch.ones_like(batch.mask))
    logp[0, 0] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        OBJECTIVES[name](batch, logp, **options)


@every_objective
@pytest.mark.parametrize("age", [2**62, 10**9])
def test_huge_ages_stay_finite(name: str, options: dict, age: int) -> None:
    batch, logp = draw(5)
    loss, gradient = solve(name, options, replace(batch, age=torch.full_like(batch.age, age)), logp)
    assert loss.isfinite() and gradient.isfinite().all()


@every_objective
def test_score_norms_that_are_no_use_give_the_mean(name: str, options: dict) -> None:
    batch, logp = draw(6)
    loss, gradient = solve(name, options, replace(batch, score_norm=None), logp)
    for useless in (0.0, torch.nan, torch.inf):
        changed = replace(batch, score_norm=torch.full_like(batch.reward, useless))
        other, same = solve(name, options, changed, logp)
        torch.testing.assert_close(other, loss)
        torch.testing.assert_close(same, gradient)
