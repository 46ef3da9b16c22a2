from dataclasses import replace

import pytest
import torch

from p2prl.objectives import OBJECTIVES
from tests.batches import draw, solve

vcpo = OBJECTIVES["vcpo"]


def test_without_score_norms_the_baseline_is_the_mean_and_it_is_said() -> None:
    batch, logp = draw(1)
    batch = replace(batch, mask=torch.ones_like(batch.mask))
    assert vcpo(batch, logp)[1]["baseline_min_variance"] == 1
    plain = replace(batch, score_norm=None)
    assert vcpo(plain, logp)[1]["baseline_min_variance"] == 0
    gradient = solve("vcpo", {}, plain, logp)[1]
    prepared = plain.prepare()
    assert prepared.advantage is not None
    weight = torch.exp((logp - batch.behavior_logp).sum(1)).clamp(max=8.0)
    torch.testing.assert_close(gradient, (-weight * prepared.advantage / 12 / 6)[:, None].expand(12, 6))


def test_the_summed_form_weighs_long_answers_more() -> None:
    batch, logp = draw(2)
    plain = replace(batch, score_norm=None)
    mean = solve("vcpo", {}, plain, logp)[1]
    summed = solve("vcpo", {"length_norm": False}, plain, logp)[1]
    torch.testing.assert_close(summed, mean * plain.prepare().length[:, None])


def test_the_cap_bounds_the_weight() -> None:
    batch, logp = draw(3)
    batch = replace(batch, mask=torch.ones_like(batch.mask), behavior_logp=logp - 100.0)
    gradient = solve("vcpo", {"cap": 2.0}, replace(batch, score_norm=None), logp)[1]
    assert float(gradient.abs().max()) <= 2.0 / 12 / 6 + 1e-12
    assert vcpo(batch, logp, cap=2.0)[1]["capped_fraction"] == pytest.approx(1.0)
