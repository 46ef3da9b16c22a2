"""One ratio an answer: reinforce (none at all), gspo, tis, mis, vespo.

In: a prepared batch, log-probs [B, T] under the policy. Out: loss, metrics.

Notation: l = sum of (p - q) over an answer's tokens, lp and lq means over them [B]; A' and A as in `ppo`; T_i tokens.

Invariants: weights of `tis`, `mis` and `vespo` are detached, the gradient flows through p alone; no weight is ever
exponentiated before it is bounded.
"""

import math

import torch
from torch import Tensor

from p2prl.objectives.batch import RATIO_LIMIT, Batch, normalised_advantage, sequence_log_ratio, token_log_ratio
from p2prl.objectives.objective import (
    Loss,
    answer_mean,
    answer_share,
    objective,
    positive,
    token_mean,
    within_answer,
)
from p2prl.objectives.ppo import clipped, surrogate

# Of a sequence's log-weight in `vespo`, as in its authors' code.
_VESPO_LIMIT = 20.0


@objective(per="answer")
def reinforce(batch: Batch, logp: Tensor) -> Loss:
    """-(1/B) sum_i (1/T_i) sum_t p A, no correction for staleness: what collapses first. Source: Williams 1992."""
    assert batch.advantage is not None
    return -answer_mean(batch, within_answer(batch, logp) * batch.advantage), {}


@objective(per="answer")
def gspo(batch: Batch, logp: Tensor, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Loss:
    """-(1/B) sum_i min(s A', clip(s, 1 - clip_low, 1 + clip_high) A'), s = exp(lp - lq), gradient through s.

    Source: GSPO, arXiv 2507.18071.
    """
    positive("clip_low", clip_low)
    positive("clip_high", clip_high)
    advantage = normalised_advantage(batch)
    mean = within_answer(batch, token_log_ratio(batch, logp))
    ratio = torch.exp(mean.clamp(-RATIO_LIMIT, RATIO_LIMIT))
    loss = -answer_mean(batch, surrogate(ratio, advantage, clip_low, clip_high))
    return loss, {"clip_fraction": answer_share(batch, clipped(ratio, advantage, clip_low, clip_high))}


@objective(per="answer")
def tis(batch: Batch, logp: Tensor, *, cap: float = 2.0) -> Loss:
    """-(1/B) sum_i sg(min(e^l, cap)) A' (1/T_i) sum_t p. Sequence level: elsewhere the name means token level.

    Source: truncated importance sampling as VCPO's baseline, arXiv 2602.17616.
    """
    positive("cap", cap)
    log_weight = sequence_log_ratio(batch, logp)
    weight = torch.exp(log_weight.clamp(max=math.log(cap)))
    loss = -answer_mean(batch, weight * normalised_advantage(batch) * within_answer(batch, logp))
    return loss, {"capped_fraction": answer_share(batch, log_weight > math.log(cap))}


@objective(per="answer")
def mis(batch: Batch, logp: Tensor, *, cap: float = 2.0) -> Loss:
    """`tis` with weight 0 above the cap: such an answer drops out. Sequence level too."""
    positive("cap", cap)
    log_weight = sequence_log_ratio(batch, logp)
    over = log_weight > math.log(cap)
    weight = torch.where(over, 0.0, torch.exp(log_weight.clamp(max=math.log(cap))))
    loss = -answer_mean(batch, weight * normalised_advantage(batch) * within_answer(batch, logp))
    return loss, {"capped_fraction": answer_share(batch, over)}


@objective(per="token")
def vespo(
    batch: Batch,
    logp: Tensor,
    *,
    power_positive: float = 2.0,
    decay_positive: float = 3.0,
    power_negative: float = 3.0,
    decay_negative: float = 2.0,
) -> Loss:
    """-(1/N) sum_i sg(phi(e^l)) A' sum_t p, phi(w) = w^power e^(decay (1 - w)), by the sign of A'; phi(1) = 1.

    The kernel falls off on both sides: an answer far more or far less likely than when it was drawn hardly counts.
    Source: VESPO, arXiv 2602.10693, and the constants of its authors' code.
    """
    for name, value in (("power_positive", power_positive), ("decay_positive", decay_positive)):
        positive(name, value)
    for name, value in (("power_negative", power_negative), ("decay_negative", decay_negative)):
        positive(name, value)
    advantage = normalised_advantage(batch)
    log_weight = sequence_log_ratio(batch, logp).clamp(-_VESPO_LIMIT, _VESPO_LIMIT)
    favoured = advantage >= 0
    power = torch.where(favoured, power_positive, power_negative)
    decay = torch.where(favoured, decay_positive, decay_negative)
    kernel = torch.exp(power * log_weight + decay * (1 - torch.exp(log_weight)))
    loss = -token_mean(batch, (kernel * advantage)[:, None] * logp)
    return loss, {
        "vespo_weight_mean": float(torch.where(batch.live, kernel, 0.0).sum()) / max(batch.num_answers or 0, 1)
    }
