from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.objectives import gepo_vcpo
from p2prl.objectives.baseline import least_variance_advantage
from p2prl.objectives.gepo import is_clipped, log_weight
from tests.batches import draw, solve


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([None, 0.05, 0.2]), st.booleans())
def test_with_the_mean_its_gradient_is_gepos(seed: int, clip: float | None, age_band: bool) -> None:
    batch, logp = draw(seed)
    options = {"clip": clip, "age_band": age_band}
    mean = solve("gepo_vcpo", options | {"baseline": "mean"}, batch, logp)[1]
    torch.testing.assert_close(mean, solve("gepo", options, batch, logp)[1])
    unknown = solve("gepo_vcpo", options, replace(batch, score_norm=None), logp)[1]
    torch.testing.assert_close(unknown, mean)


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_the_weight_in_the_baseline_is_the_one_in_the_loss(leave_one_out: bool) -> None:
    batch, logp = draw(8)
    batch = replace(batch, mask=torch.ones_like(batch.mask), reward=torch.tensor([0.0, 1.0] * 6, dtype=torch.float64))
    prepared = batch.prepare()
    weight = torch.exp(log_weight(prepared, logp))
    clipped = is_clipped(prepared, weight, 0.2)
    assert clipped.any() and not clipped.all()
    omega = torch.where(clipped, 0.0, weight)
    advantage = least_variance_advantage(prepared, omega, leave_one_out=leave_one_out)
    gradient = solve("gepo_vcpo", {"leave_one_out": leave_one_out}, batch, logp)[1]
    torch.testing.assert_close(gradient, (-omega * advantage / 12 / 6)[:, None].expand(12, 6))


def test_clipping_all_wrong_answers_leaves_a_gradient_when_all_choose_the_baseline() -> None:
    """Over the live ones alone the baseline equals their one reward, and nothing is learned from the group."""
    batch = replace(
        draw(3)[0],
        group=torch.zeros(12, dtype=torch.long),
        mask=torch.ones(12, 6, dtype=torch.bool),
        behavior_logp=torch.full((12, 6), -1.0, dtype=torch.float64),
        reward=torch.tensor([1.0] * 6 + [0.0] * 6, dtype=torch.float64),
        score_norm=torch.ones(12, dtype=torch.float64),
    )
    logp = torch.tensor([-1.0] * 6 + [-2.0] * 6, dtype=torch.float64)[:, None].expand(12, 6)
    over_live = solve("gepo_vcpo", {"baseline_over": "live"}, batch, logp)[1]
    over_all = solve("gepo_vcpo", {"baseline_over": "all"}, batch, logp)[1]
    assert (over_live == 0).all()
    assert (over_all[:6] < 0).all() and (over_all[6:] == 0).all()


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_over_all_the_weight_in_the_baseline_is_that_of_every_answer(leave_one_out: bool) -> None:
    batch, logp = draw(8)
    batch = replace(batch, mask=torch.ones_like(batch.mask), reward=torch.tensor([0.0, 1.0] * 6, dtype=torch.float64))
    prepared = batch.prepare()
    weight = torch.exp(log_weight(prepared, logp))
    live = torch.where(is_clipped(prepared, weight, 0.2), 0.0, weight)
    advantage = least_variance_advantage(prepared, weight, leave_one_out=leave_one_out)
    gradient = solve("gepo_vcpo", {"leave_one_out": leave_one_out, "baseline_over": "all"}, batch, logp)[1]
    torch.testing.assert_close(gradient, (-live * advantage / 12 / 6)[:, None].expand(12, 6))


def test_it_says_which_baseline_was_used() -> None:
    batch, logp = draw(9)
    assert gepo_vcpo(batch, logp)[1]["baseline_min_variance"] == 1
    assert gepo_vcpo(batch, logp, baseline="mean")[1]["baseline_min_variance"] == 0
    assert gepo_vcpo(replace(batch, score_norm=None), logp)[1]["baseline_min_variance"] == 0
