from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.errors import BatchError
from p2prl.objectives import OBJECTIVES
from p2prl.objectives.batch import normalised_advantage, token_log_ratio, token_ratio
from tests.batches import draw, solve

few = settings(max_examples=20, deadline=None)
seeds = given(st.integers(0, 10_000))


def plain(batch, logp) -> tuple[torch.Tensor, torch.Tensor]:
    """-A' m / N and r of each token."""
    prepared = batch.prepare()
    share = -normalised_advantage(prepared)[:, None] * prepared.mask / max(prepared.num_tokens, 1)
    return share, token_ratio(prepared, logp)


@few
@seeds
def test_cispo_keeps_every_tokens_gradient(seed: int) -> None:
    batch, logp = draw(seed)
    share, ratio = plain(batch, logp)
    torch.testing.assert_close(solve("cispo", {"clip_high": 0.1}, batch, logp)[1], share * ratio.clamp(max=1.1))
    both = solve("cispo", {"clip_high": 0.1, "clip_low": 0.2}, batch, logp)[1]
    torch.testing.assert_close(both, share * ratio.clamp(0.8, 1.1))


@few
@given(st.integers(0, 10_000), st.floats(1e-4, 0.5))
def test_m2po_keeps_as_many_tokens_as_the_second_moment_allows(seed: int, limit: float) -> None:
    batch, logp = draw(seed)
    batch = replace(batch, prox_logp=None)
    share, ratio = plain(batch, logp)
    prepared = batch.prepare()
    gradient = solve("m2po", {"second_moment": limit}, batch, logp)[1]
    drift = token_log_ratio(prepared, logp)
    kept = (gradient != 0) | ((share == 0) & prepared.mask)
    torch.testing.assert_close(gradient, torch.where(kept, share * ratio, 0.0))
    lost = prepared.mask & ~kept
    if lost.any():
        left = drift[prepared.mask & ~lost].square()
        assert drift[lost].square().min() >= drift[(gradient != 0)].square().max() if (gradient != 0).any() else True
        assert len(left) == 0 or float(drift[prepared.mask].square().mean()) >= limit


def test_m2po_of_a_part_needs_to_know_the_whole() -> None:
    batch, logp = draw(1)
    batch = replace(batch, mask=torch.ones_like(batch.mask), score_norm=None, prox_logp=None)
    with pytest.raises(BatchError, match="whole batch"):
        OBJECTIVES["m2po"](batch.split(torch.arange(5)), logp[:5])


@few
@given(st.integers(0, 10_000), st.sampled_from(["tv", "kl"]), st.floats(1e-4, 0.3))
def test_dppo_drops_what_moved_too_far_outwards(seed: int, divergence: str, threshold: float) -> None:
    batch, logp = draw(seed)
    logp = logp.clamp(max=-1e-3)
    share, ratio = plain(batch, logp)
    p, q = logp.exp(), batch.behavior_logp.exp()
    moved = (p - q).abs() if divergence == "tv" else q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()
    outwards = torch.where(share < 0, p > q, p < q)
    dropped = (moved > threshold) & outwards
    options = {"divergence": divergence, "threshold": threshold}
    torch.testing.assert_close(solve("dppo", options, batch, logp)[1], torch.where(dropped, 0.0, share * ratio))


def test_dppo_lets_a_rare_token_grow_where_a_ratio_would_forbid_it() -> None:
    batch, logp = draw(2, num_groups=1, size=2, longest=1)
    batch = replace(
        batch,
        mask=torch.ones(2, 1, dtype=torch.bool),
        reward=torch.tensor([1.0, 0.0], dtype=torch.float64),
        behavior_logp=torch.tensor([[0.001], [0.5]], dtype=torch.float64).log(),
    )
    logp = torch.tensor([[0.01], [0.5]], dtype=torch.float64).log()
    assert solve("dppo", {}, batch, logp)[1][0] != 0
    assert solve("grpo", {}, batch, logp)[1][0] == 0


def test_dppo_takes_the_papers_threshold_of_its_divergence() -> None:
    batch, logp = draw(5)
    for divergence, threshold in (("tv", 0.15), ("kl", 0.05)):
        named = OBJECTIVES["dppo"](batch, logp, divergence=divergence, threshold=threshold)
        assert OBJECTIVES["dppo"](batch, logp, divergence=divergence)[1] == named[1]


@few
@given(st.integers(0, 10_000), st.integers(0, 5))
def test_minpro_weighs_a_token_by_the_least_ratio_before_it(seed: int, hidden: int) -> None:
    batch, logp = draw(seed)
    batch = replace(batch, mask=batch.mask & (torch.arange(batch.mask.shape[1]) != hidden))
    share, ratio = plain(batch, logp)
    least = torch.ones_like(ratio)
    for answer, token in batch.mask.nonzero().tolist():
        before = [float(ratio[answer, t]) for t in range(token) if batch.mask[answer, t]]
        least[answer, token] = min(before, default=1.0)
    weight = least * ratio
    held = torch.where(
        share < 0, weight > 1.28, weight < 0.8
    )  # the loss is minus the objective: share < 0, advantage > 0
    torch.testing.assert_close(solve("minpro", {}, batch, logp)[1], torch.where(held, 0.0, share * weight))


@few
@given(st.integers(0, 10_000), st.floats(0.01, 2.0))
def test_r2vpo_pulls_ratios_back_to_1(seed: int, penalty: float) -> None:
    batch, logp = draw(seed)
    share, ratio = plain(batch, logp)
    prepared = batch.prepare()
    pull = 2 * penalty * (ratio - 1) * ratio * prepared.mask / max(prepared.num_tokens or 0, 1)
    torch.testing.assert_close(solve("r2vpo", {"penalty": penalty}, batch, logp)[1], share * ratio + pull)
    metric = OBJECTIVES["r2vpo"](batch, logp)[1]["token_ratio_variance"]
    assert metric == pytest.approx(float((ratio - 1).square()[prepared.mask].mean()) if prepared.mask.any() else 0.0)
