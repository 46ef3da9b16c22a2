"""GEPO's weights with VCPO's minimum-variance baseline: the swarm's default (arXiv 2508.17850 and 2602.17616).

In: a batch, log-probs under the policy, per-answer score norms where they are known. Out: loss, metrics.

Invariants: with the mean baseline its gradient is that of `gepo`; equal rewards and groups of one give no gradient; the
minimum-variance baseline needs its groups whole and says so when they are not.
"""

from typing import Literal

import torch
from torch import Tensor

from p2prl.objectives.batch import Batch, checked_logp, group_max, group_sum
from p2prl.objectives.gepo import is_clipped, log_weight, weight_metrics


def gepo_vcpo(
    batch: Batch,
    logp: Tensor,
    *,
    clip: float | None = 0.2,
    baseline: Literal["mean", "min_variance"] = "min_variance",
) -> tuple[Tensor, dict[str, float]]:
    """-(1/B) sum_i live_i w_i (R_i - b_g), gradient through w_i (`gepo`) alone.

    live_i: not clipped on the side of R_i - mean_g R; W_i = (live_i w_i ||s_i|| / T_i)^2; b_g = sum(W R) / sum(W), the
    plain mean when that is undefined or score norms are not known. logp [B, T]; the rest [B].
    """
    if baseline not in ("mean", "min_variance"):
        raise ValueError(f"there is no baseline {baseline!r}; use 'mean' or 'min_variance'")
    batch = batch.prepare()
    logp = checked_logp(batch, logp)
    assert batch.advantage is not None and batch.num_answers is not None
    weight = torch.exp(log_weight(batch, logp))
    held = weight.detach()
    clipped = is_clipped(held, batch.advantage, clip)
    advantage = batch.advantage
    least = baseline == "min_variance" and batch.score_norm is not None
    if least:
        advantage = least_variance_advantage(batch, torch.where(clipped, 0.0, held))
    kept = batch.live & ~clipped
    loss = -torch.where(kept, weight * advantage, 0.0 * weight).sum() / max(batch.num_answers, 1.0)
    return loss, weight_metrics(batch, held, clipped) | {"baseline_min_variance": float(least)}


def least_variance_advantage(batch: Batch, omega: Tensor) -> Tensor:
    """R - b_g [B], b the constant that makes the group's gradient least variable; `omega` [B] multiplies the score."""
    assert batch.score_norm is not None and batch.group_size is not None and batch.advantage is not None
    live = batch.live
    values, index = torch.unique(batch.group, return_inverse=True)
    number = len(values)
    if bool((group_sum(live.long(), index, number)[index] != batch.group_size)[live].any()):
        raise ValueError("the minimum-variance baseline needs whole groups; this part of the batch cuts one")
    score = torch.where(live, omega * batch.score_norm / batch.length, 0.0)
    top = group_max(score, index, number)[index]
    # By the group's largest before squaring: neither under- nor overflow.
    square = torch.where(top > 0, score / torch.where(top > 0, top, 1.0), 0.0).square()
    total = group_sum(square, index, number)
    # The advantage, not the reward, is averaged: the same baseline, and exactly 0 for equal rewards.
    shift = group_sum(square * batch.advantage, index, number) / torch.where(total > 0, total, 1.0)
    usable = (total > 0) & shift.isfinite()
    advantage = batch.advantage - torch.where(usable, shift, 0.0)[index]
    return torch.where(live, advantage, 0.0)
