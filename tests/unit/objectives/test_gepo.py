"""GEPO's weights, and the theory of their variance, on distributions small enough to sum over."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.objectives import Batch, gepo
from p2prl.objectives.gepo import is_clipped, log_weight
from tests.batches import draw, solve


def weights(log_q: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """w of a group that holds every outcome once: E is then sum q^2, the mean of q under q."""
    number = len(log_q)
    batch = Batch(
        group=torch.zeros(number, dtype=torch.long),
        mask=torch.ones(number, 1, dtype=torch.bool),
        behavior_logp=log_q[:, None],
        reward=torch.zeros(number, dtype=log_q.dtype),
        age=torch.zeros(number, 1, dtype=torch.long),
    ).prepare()
    return torch.exp(log_weight(batch, log_p[:, None]))


def variance(q: torch.Tensor, weight: torch.Tensor) -> float:
    return float((q * weight.square()).sum() - (q * weight).sum().square())


@settings(max_examples=200, deadline=None)
@given(st.integers(2, 8), st.integers(0, 10_000), st.floats(0.1, 2.0))
def test_its_variance_is_below_that_of_ratios_by_the_bound(number: int, seed: int, spread: float) -> None:
    source = torch.Generator().manual_seed(seed)
    log_q, log_p = torch.log_softmax(spread * torch.randn(2, number, generator=source, dtype=torch.float64), -1)
    q, p = log_q.exp(), log_p.exp()
    gain = variance(q, p / q) - variance(q, weights(log_q, log_p))
    kl = float((p * (log_p - log_q)).sum())
    assert gain >= math.exp(kl) - (number**2 + 1) - 1e-9


@pytest.mark.parametrize("distance", [0.0, 0.2, 0.39779, 1.0, 2.0])
def test_closed_form_of_two_normal_distributions(distance: float) -> None:
    point = torch.linspace(-12, 14, 4001, dtype=torch.float64)
    log_step = math.log(float(point[1] - point[0]))
    log_q, log_p = (-0.5 * (point - mean).square() - 0.5 * math.log(2 * math.pi) + log_step for mean in (0.0, distance))
    plain = variance(log_q.exp(), torch.exp(log_p - log_q))
    grouped = variance(log_q.exp(), weights(log_q, log_p))
    assert plain == pytest.approx(math.exp(distance**2) - 1, abs=1e-8)
    closed = 2 / math.sqrt(3) * math.exp(-(distance**2) / 3) - math.exp(-(distance**2) / 2)
    assert grouped == pytest.approx(closed, abs=1e-6)
    if distance == 0.39779:
        assert grouped == pytest.approx(plain, abs=1e-4)


def test_equal_samplers_give_the_ratio_of_means() -> None:
    batch, logp = draw(1)
    batch = replace(batch, behavior_logp=torch.full_like(logp, -1.5), mask=torch.ones_like(batch.mask)).prepare()
    torch.testing.assert_close(log_weight(batch, logp), logp.mean(1) + 1.5)


def test_the_expectation_is_the_contraharmonic_mean() -> None:
    batch, _ = draw(2, num_groups=1)
    prepared = batch.prepare()
    assert prepared.log_expectation is not None
    q = [math.exp(float(batch.behavior_logp[row][batch.mask[row]].mean())) for row in range(4) if batch.mask[row].any()]
    wanted = sum(value**2 for value in q) / sum(q)
    assert float(prepared.log_expectation[prepared.live][0].exp()) == pytest.approx(wanted)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_the_gradient_is_w_a_over_t_where_it_is_not_clipped(seed: int) -> None:
    batch, logp = draw(seed)
    _, gradient = solve("gepo", {"clip": 0.2}, batch, logp)
    prepared = batch.prepare()
    assert prepared.advantage is not None and prepared.num_answers is not None
    weight = torch.exp(log_weight(prepared, logp))
    kept = prepared.live & ~is_clipped(prepared, weight, 0.2)
    share = torch.where(kept, -weight * prepared.advantage / prepared.length / max(prepared.num_answers, 1), 0.0)
    torch.testing.assert_close(gradient, share[:, None] * prepared.mask)


def test_old_answers_have_a_wider_band_by_age() -> None:
    batch, logp = draw(3)
    batch = replace(batch, mask=torch.ones_like(batch.mask), age=torch.full_like(batch.age, 20))
    fresh = replace(batch, age=torch.zeros_like(batch.age))
    assert gepo(batch, logp, clip=0.05)[1]["clip_fraction"] > 0
    assert gepo(batch, logp, clip=0.05, age_band=True)[1]["clip_fraction"] == 0
    torch.testing.assert_close(gepo(fresh, logp, clip=0.05, age_band=True)[0], gepo(fresh, logp, clip=0.05)[0])


def test_clipped_answers_are_told_apart() -> None:
    batch, logp = draw(4)
    batch = replace(
        batch, mask=torch.ones_like(batch.mask), age=torch.arange(12)[:, None] // 6 * torch.ones(1, 6).long()
    )
    metrics = gepo(batch, logp, clip=0.01)[1]
    assert 0 < metrics["clip_fraction_fresh"] < metrics["clip_fraction"]
    parts = metrics["clip_fraction_positive"] + metrics["clip_fraction_negative"]
    assert parts == pytest.approx(metrics["clip_fraction"])
