"""Identities of the approximated proximal policy, on every token."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.errors import BatchError
from p2prl.objectives import OBJECTIVES
from p2prl.objectives.batch import token_log_ratio
from tests.batches import draw, solve

few = settings(max_examples=30, deadline=None)
seeds = given(st.integers(0, 10_000))
OPEN = {"clip": 1e9, "cap": 1e9}


@few
@seeds
def test_an_open_band_is_plain_importance_sampling_at_any_age(seed: int) -> None:
    """w r = exp(p - q) always, and so is the surviving gradient: -A exp(p - q) / N."""
    batch, logp = draw(seed)
    loss, gradient = solve("a3po", OPEN, batch, logp)
    prepared = batch.prepare()
    assert prepared.advantage is not None and prepared.num_tokens is not None
    ratio = torch.exp(token_log_ratio(prepared, logp))
    term = torch.where(prepared.mask, -prepared.advantage[:, None] * ratio / max(prepared.num_tokens, 1), 0.0)
    torch.testing.assert_close(gradient, term)
    torch.testing.assert_close(loss, term.sum())


@few
@seeds
def test_ages_0_and_1_are_the_same_and_are_dapo_without_the_spread(seed: int) -> None:
    batch, logp = draw(seed)
    young = [replace(batch, age=torch.full_like(batch.age, age)) for age in (0, 1)]
    first, second = (solve("a3po", {}, item, logp) for item in young)
    torch.testing.assert_close(first, second)
    behaviour = replace(batch, prox_logp=batch.behavior_logp)
    torch.testing.assert_close(first, solve("decoupled_ppo", {}, behaviour, logp))


@few
@given(st.integers(0, 10_000), st.integers(1, 30), st.floats(0.01, 0.5))
def test_the_band_grows_with_age(seed: int, age: int, clip: float) -> None:
    """Unclipped iff exp(p - q) is inside [(1 - eps)^d, (1 + eps)^d] on the advantage's side."""
    batch, logp = draw(seed)
    batch = replace(batch, age=torch.full_like(batch.age, age))
    gradient = solve("a3po", {"clip": clip, "cap": 1e9}, batch, logp)[1]
    prepared = batch.prepare()
    assert prepared.advantage is not None
    ratio = torch.exp(token_log_ratio(prepared, logp))
    advantage = prepared.advantage[:, None]
    inside = torch.where(advantage > 0, ratio < (1 + clip) ** age, ratio > (1 - clip) ** age)
    assert torch.equal(gradient != 0, inside & prepared.mask & (advantage != 0))


@few
@seeds
def test_a_masked_token_still_counts_and_a_clamped_one_keeps_a_bounded_gradient(seed: int) -> None:
    batch, logp = draw(seed)
    batch = replace(batch, age=torch.full_like(batch.age, 4))
    options = {"clip": 1e9, "cap": 1.05}
    prepared = batch.prepare()
    assert prepared.advantage is not None and prepared.num_tokens is not None
    difference = token_log_ratio(prepared, logp)
    over = torch.exp(difference * 0.75) > 1.05
    free = -prepared.advantage[:, None] / max(prepared.num_tokens, 1) * prepared.mask
    masked = solve("a3po", options, batch, logp)[1]
    torch.testing.assert_close(masked, torch.where(over, 0.0, free * torch.exp(difference)))
    clamped = solve("a3po", options | {"cap_mode": "clamp"}, batch, logp)[1]
    bounded = free * torch.exp(difference / 4) * 1.05
    torch.testing.assert_close(clamped, torch.where(over, bounded, free * torch.exp(difference)))


def test_dual_clip_bounds_what_a_bad_answer_can_cost() -> None:
    batch, logp = draw(3)
    batch = replace(
        batch,
        mask=torch.ones_like(batch.mask),
        age=torch.zeros_like(batch.age),
        behavior_logp=logp - 10.0,
        reward=torch.tensor([0.0, 1.0] * 6, dtype=torch.float64),
    )
    free = solve("a3po", {}, batch, logp)[1]
    bounded = solve("a3po", {"dual_clip": 3.0}, batch, logp)[1]
    assert float(free.abs().max()) > 100
    assert not bounded[::2].any()
    torch.testing.assert_close(bounded[1::2], free[1::2])


def test_the_error_of_the_approximation_is_measured_where_it_can_be() -> None:
    batch, logp = draw(4)
    batch = replace(batch, age=torch.full_like(batch.age, 2))
    a3po = OBJECTIVES["a3po"]
    assert "token_prox_error" not in a3po(replace(batch, prox_logp=None), logp)[1]
    half = (batch.behavior_logp + logp) / 2
    assert a3po(replace(batch, prox_logp=half), logp)[1]["token_prox_error"] == pytest.approx(0, abs=1e-12)
    assert a3po(replace(batch, prox_logp=half + 0.3), logp)[1]["token_prox_error"] == pytest.approx(0.3)


def test_recomputing_needs_what_was_recomputed() -> None:
    batch, logp = draw(5)
    with pytest.raises(BatchError, match="needs prox_logp"):
        OBJECTIVES["decoupled_ppo"](replace(batch, prox_logp=None), logp)


def test_a_proximal_policy_that_is_the_policy_has_no_trust_region() -> None:
    """r = 1: nothing is ever clipped."""
    batch, logp = draw(6)
    metrics = OBJECTIVES["decoupled_ppo"](replace(batch, prox_logp=logp), logp, clip=1e-9)[1]
    assert metrics["token_clip_fraction"] == 0
