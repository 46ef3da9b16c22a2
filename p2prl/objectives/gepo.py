"""GEPO: group expectation weights (HeteroRL, arXiv 2508.17850).

In: a prepared batch, log-probs [B, T] under the policy. Out: loss, metrics.

Invariants: one expectation a prompt group, over all its answers, computed before any shuffle or split; always in log
space; adding a constant to every token's q and p of a group changes nothing.
"""

import torch
from torch import Tensor

from p2prl.objectives.batch import Batch
from p2prl.objectives.objective import Loss, Metrics, answer_mean, answer_share, objective, positive, within_answer

LOG_WEIGHT_LIMIT = 20.0


def log_weight(batch: Batch, logp: Tensor) -> Tensor:
    """log w_i = clamp(lp_i - logE_g, +-20), [B], of a prepared batch; lp is the mean of the answer's log-probs."""
    assert batch.log_expectation is not None
    return torch.clamp(within_answer(batch, logp) - batch.log_expectation, -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)


def band(batch: Batch, clip: float | None, age_band: bool) -> tuple[Tensor, Tensor]:
    """Lowest and highest weight [B] that keeps its gradient: 1 -+ clip, or with `age_band` A-3PO's (1 -+ clip)^d.

    d is the mean age of the answer's tokens, at least 1 version: what a policy may drift in d steps of 1 -+ clip each.
    """
    like = batch.length
    if clip is None:
        return torch.zeros_like(like), torch.full_like(like, torch.inf)
    ages = torch.where(batch.mask, batch.age.to(like.dtype), 0.0).sum(1) / like
    depth = ages.clamp(min=1.0) if age_band else torch.ones_like(like)
    return max(1 - clip, 0.0) ** depth, (1 + clip) ** depth


def is_clipped(batch: Batch, weight: Tensor, clip: float | None, age_band: bool = False) -> Tensor:
    """bool [B]: the weight has left its band on the side of R - group mean, so the answer has no gradient left."""
    assert batch.advantage is not None
    low, high = band(batch, clip, age_band)
    return ((batch.advantage > 0) & (weight > high)) | ((batch.advantage < 0) & (weight < low))


def weight_metrics(batch: Batch, weight: Tensor, clipped: Tensor) -> Metrics:
    """Shares of the whole batch: those of its parts add up. Fresh answers are told apart, since they clip too."""
    assert batch.advantage is not None
    fresh = (torch.where(batch.mask, batch.age, 0) == 0).all(1)
    return {
        "gepo_weight_mean": float(torch.where(batch.live, weight, 0.0).sum()) / max(batch.num_answers or 0.0, 1.0),
        "clip_fraction": answer_share(batch, clipped),
        "clip_fraction_positive": answer_share(batch, clipped & (batch.advantage > 0)),
        "clip_fraction_negative": answer_share(batch, clipped & (batch.advantage < 0)),
        "clip_fraction_fresh": answer_share(batch, clipped & fresh),
    }


@objective(per="answer")
def gepo(batch: Batch, logp: Tensor, *, clip: float | None = 0.2, age_band: bool = False) -> Loss:
    """-(1/B) sum_i min(w_i A_i, clip(w_i, 1 - eps, 1 + eps) A_i), A = R - group mean, eps = clip.

    log E_g = LSE_i(2 lq_i) - LSE_i(lq_i) over the group; w_i = exp(lp_i - log E_g), gradient through lp_i alone:
    d w_i / d p_it = w_i / T_i. logp [B, T]; A, w [B]. `clip=None`: unclipped; `age_band`: see `band`. Source:
    HeteroRL, arXiv 2508.17850, with one expectation a prompt group (its code mixes prompts of a shuffled micro-batch).
    """
    positive("clip", clip)
    assert batch.advantage is not None
    weight = torch.exp(log_weight(batch, logp))
    low, high = band(batch, clip, age_band)
    bounded = torch.minimum(torch.maximum(weight, low), high)
    loss = -answer_mean(batch, torch.minimum(weight * batch.advantage, bounded * batch.advantage))
    held = weight.detach()
    return loss, weight_metrics(batch, held, is_clipped(batch, held, clip, age_band))
