"""k3 on the sampler's tokens is KL(q || p), not the other direction."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.objectives import Batch
from p2prl.objectives.kl import sampler_kl
from tests.batches import draw


def every_outcome(q: torch.Tensor) -> Batch:
    """One token an answer, an answer each outcome."""
    number = len(q)
    return Batch(
        group=torch.zeros(number, dtype=torch.long),
        mask=torch.ones(number, 1, dtype=torch.bool),
        behavior_logp=q.log()[:, None],
        reward=torch.zeros(number, dtype=torch.float64),
        age=torch.zeros(number, 1, dtype=torch.long),
    ).prepare()


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_its_mean_under_the_sampler_is_kl_of_sampler_to_policy(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    q, p = torch.softmax(torch.randn(2, 7, generator=source, dtype=torch.float64), -1)
    k3 = sampler_kl(every_outcome(q), p.log()[:, None]).squeeze(1)
    torch.testing.assert_close((q * k3).sum(), (q * (q / p).log()).sum())
    assert (k3 >= 0).all()


def test_the_other_direction_would_be_chi_square_minus_kl() -> None:
    q = torch.tensor([0.9, 0.1], dtype=torch.float64)
    p = torch.tensor([0.999, 0.001], dtype=torch.float64)
    difference = (q / p).log()
    other = (q * (difference.exp() - difference - 1)).sum()
    chi_square = (q * (q / p)).sum() - 1
    torch.testing.assert_close(other, chi_square - (q * difference).sum())
    mine = (q * sampler_kl(every_outcome(q), p.log()[:, None]).squeeze(1)).sum()
    assert other > 10 * mine


def test_padding_counts_nothing_and_one_lost_token_is_not_all_that_shows() -> None:
    batch, logp = draw(3)
    batch = replace(batch, mask=torch.ones_like(batch.mask)).prepare()
    logp[0, 0] = 5000.0
    found = sampler_kl(replace(batch, mask=torch.arange(6) < 3 * torch.ones(12, 1)), logp)
    assert not found[:, 3:].any() and found.isfinite().all()
