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


def test_it_says_which_baseline_was_used() -> None:
    batch, logp = draw(9)
    assert gepo_vcpo(batch, logp)[1]["baseline_min_variance"] == 1
    assert gepo_vcpo(batch, logp, baseline="mean")[1]["baseline_min_variance"] == 0
    assert gepo_vcpo(replace(batch, score_norm=None), logp)[1]["baseline_min_variance"] == 0
