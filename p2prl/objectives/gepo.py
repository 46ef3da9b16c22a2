"""GEPO: group expectation weights (HeteroRL, arXiv 2508.17850).

In: a batch, log-probs under the policy. Out: loss, metrics.

Invariants: one expectation a prompt group, over all its answers, computed before any shuffle or split; always in log
space; adding a constant to every token's q and p of a group changes nothing.
"""

import torch
from torch import Tensor

from p2prl.objectives.batch import Batch, checked_logp

LOG_WEIGHT_LIMIT = 20.0


def log_weight(batch: Batch, logp: Tensor) -> Tensor:
    """log w_i = clamp(lp_i - logE_g, +-20), [B], of a prepared batch; lp is the mean of the answer's log-probs."""
    assert batch.log_expectation is not None
    mean_p = torch.where(batch.mask, logp, 0.0).sum(1) / batch.length
    return torch.clamp(mean_p - batch.log_expectation, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)


def is_clipped(weight: Tensor, advantage: Tensor, clip: float | None) -> Tensor:
    """bool [B]: the weight has left 1 +- clip on the advantage's side, so the answer has no gradient left."""
    if clip is None:
        return torch.zeros_like(weight, dtype=torch.bool)
    return ((advantage > 0) & (weight > 1 + clip)) | ((advantage < 0) & (weight < 1 - clip))


def weight_metrics(batch: Batch, weight: Tensor, clipped: Tensor) -> dict[str, float]:
    """Shares of the whole batch: those of its parts add up. Fresh answers are told apart, since they clip too."""
    live, count = batch.live, max(batch.num_answers or 0.0, 1.0)
    fresh = torch.where(batch.mask, batch.age, 0).amax(1) == 0 if batch.age.shape[1] else live
    clipped, positive = clipped & live, (batch.advantage if batch.advantage is not None else weight) > 0

    def share(chosen: Tensor) -> float:
        return float(chosen.sum()) / count

    return {
        "gepo_weight_mean": float(torch.where(live, weight.detach(), 0.0).sum()) / count,
        "clip_fraction": share(clipped),
        "clip_fraction_positive": share(clipped & positive),
        "clip_fraction_negative": share(clipped & ~positive),
        "clip_fraction_fresh": share(clipped & fresh),
    }


def gepo(batch: Batch, logp: Tensor, *, clip: float | None = 0.2) -> tuple[Tensor, dict[str, float]]:
    """-mean_i min(w_i A_i, clip(w_i, 1 - eps, 1 + eps) A_i), A = R - group mean.

    log E_g = LSE_i(2 lq_i) - LSE_i(lq_i) over the group; w_i = exp(lp_i - log E_g), gradient through lp_i alone.
    logp [B, T]; A, w [B]; `clip=None`: unclipped.
    """
    batch = batch.prepare()
    logp = checked_logp(batch, logp)
    advantage, live = batch.advantage, batch.live
    assert advantage is not None and batch.num_answers is not None
    weight = torch.exp(log_weight(batch, logp))
    term = weight * advantage
    if clip is not None:
        term = torch.minimum(term, torch.clamp(weight, 1 - clip, 1 + clip) * advantage)
    loss = -torch.where(live, term, 0.0 * term).sum() / max(batch.num_answers, 1.0)
    return loss, weight_metrics(batch, weight.detach(), is_clipped(weight.detach(), advantage, clip))
