"""Other ways to bound a token's step: cispo, m2po, dppo, minpro, r2vpo.

In: a prepared batch, log-probs [B, T] under the policy. Out: loss, metrics.

Notation: r = exp(p - q) a token [B, T]; A' = (R - mean) / (sd + 1e-4) of the prompt group [B]; N tokens of the batch.

Invariants: every loss is a sum over tokens by N; what a mask drops still counts in N.
"""

import torch
from torch import Tensor

from p2prl.errors import BatchError
from p2prl.objectives.batch import (
    RATIO_LIMIT,
    Batch,
    normalised_advantage,
    tail_moments,
    token_log_ratio,
    token_ratio,
)
from p2prl.objectives.objective import Loss, objective, one_of, positive, token_mean, token_share
from p2prl.objectives.ppo import clip_metrics, clipped, surrogate

# r2vpo squares the ratio: e^20 is the most that stays finite in float32 with room for sums.
_SQUARED_LIMIT = 20.0
_DPPO_THRESHOLDS = {"tv": 0.15, "kl": 0.05}
_LEAST = 1e-30  # of a probability whose logarithm is taken, the same in float32 and float64


@objective(per="token")
def cispo(batch: Batch, logp: Tensor, *, clip_high: float = 0.28, clip_low: float | None = None) -> Loss:
    """-(1/N) sum_i sum_t sg(clip(r, 1 - clip_low, 1 + clip_high)) A' p: every token keeps a gradient.

    `clip_low` None: no lower bound, as the authors ran it. Source: MiniMax-M1, arXiv 2506.13585.
    """
    positive("clip_high", clip_high)
    positive("clip_low", clip_low)
    ratio = token_ratio(batch, logp.detach())
    weight = ratio.clamp(None if clip_low is None else 1 - clip_low, 1 + clip_high)
    loss = -token_mean(batch, weight * normalised_advantage(batch)[:, None] * logp)
    return loss, {"token_capped_fraction": token_share(batch, weight != ratio)}


@objective(per="token")
def m2po(batch: Batch, logp: Tensor, *, second_moment: float = 0.04) -> Loss:
    """-(1/N) sum_i sum_t M r A': M drops the fewest tokens that bring the mean of (log r)^2 under `second_moment`.

    Which tokens drifted most is asked of prox_logp, so that parts agree with the whole; without it, of the policy, and
    then the batch must be whole. Source: M2PO, arXiv 2510.01161, and its place in AReaL (the mask is over all tokens).
    """
    positive("second_moment", second_moment)
    moment = batch.tail_moment
    if moment is None:
        if float(batch.mask.sum()) != batch.num_tokens:
            raise BatchError("m2po ranks the tokens of a whole batch; give it prox_logp before the batch is split")
        moment = tail_moments(batch, logp)
    kept = moment < second_moment
    ratio = token_ratio(batch, logp)
    loss = -token_mean(batch, torch.where(kept, ratio * normalised_advantage(batch)[:, None], 0.0 * ratio))
    return loss, {"token_clip_fraction": token_share(batch, ~kept)}


@objective(per="token")
def dppo(
    batch: Batch, logp: Tensor, *, divergence: str = "tv", threshold: float | None = None, cap: float = 20.0
) -> Loss:
    """-(1/N) sum_i sum_t M sg(min(r, cap)) A' p: M drops a token that moved past `threshold` on its advantage's side.

    The move is measured on the two outcomes "this token" and "any other": total variation |e^p - e^q| (`tv`), or
    KL(q||p) of the pair (`kl`); unlike a ratio it does not forbid a rare token to grow. `threshold` None: what the paper
    advises, 0.15 for tv and 0.05 for kl. Source: DPPO (binary variants), arXiv 2602.04879, equation 12, and the mask of
    its implementations in verl and TRL.
    """
    one_of("divergence", divergence, ("tv", "kl"))
    positive("threshold", threshold)
    positive("cap", cap)
    advantage, held = normalised_advantage(batch)[:, None], logp.detach()
    q = torch.where(batch.mask, batch.behavior_logp, 0.0)
    grown = torch.exp(held) - torch.exp(q)
    moved = grown.abs() if divergence == "tv" else _binary_kl(q, held)
    limit = _DPPO_THRESHOLDS[divergence] if threshold is None else threshold
    dropped = (moved > limit) & torch.where(advantage > 0, grown > 0, grown < 0)
    weight = token_ratio(batch, held).clamp(max=cap)
    loss = -token_mean(batch, torch.where(dropped, 0.0 * logp, weight * advantage * logp))
    return loss, {"token_clip_fraction": token_share(batch, dropped)}


def _binary_kl(q: Tensor, p: Tensor) -> Tensor:
    """KL of (e^q, 1 - e^q) to (e^p, 1 - e^p), log-probs of any shape."""
    rest_q, rest_p = -torch.expm1(q.clamp(max=0.0)), -torch.expm1(p.clamp(max=0.0))
    rest = rest_q * (torch.log(rest_q.clamp(min=_LEAST)) - torch.log(rest_p.clamp(min=_LEAST)))
    return torch.exp(q) * (q - p) + rest


@objective(per="token")
def minpro(batch: Batch, logp: Tensor, *, clip: float = 0.2, clip_high: float = 0.28) -> Loss:
    """-(1/N) sum_i sum_t S with the ratio m r: m_t = sg(min of r over the answer's tokens before t), 1 for the first.

    S = min(m r A', clip(m r, 1 - clip, 1 + clip_high) A'). The exact weight of a token is the product of the ratios up to
    it, which explodes with length; m stands for the part before it. Source: MinPRO, arXiv 2601.22718 (its abstract, and
    the tests of two public implementations of its hard clip; not its full text).
    """
    positive("clip", clip)
    positive("clip_high", clip_high)
    advantage, log_ratio = normalised_advantage(batch)[:, None], token_log_ratio(batch, logp)
    weight = torch.exp((_least_before(batch, log_ratio.detach()) + log_ratio).clamp(-RATIO_LIMIT, RATIO_LIMIT))
    loss = -token_mean(batch, surrogate(weight, advantage, clip, clip_high))
    return loss, clip_metrics(batch, clipped(weight, advantage, clip, clip_high), advantage)


def _least_before(batch: Batch, log_ratio: Tensor) -> Tensor:
    """[B, T]: the least log ratio among an answer's drawn tokens before this one; 0 where there are none."""
    drawn = torch.where(batch.mask, log_ratio, torch.inf)
    before = torch.cat([torch.full_like(drawn[:, :1], torch.inf), drawn[:, :-1]], 1)
    least = torch.cummin(before, 1).values
    return torch.where(least == torch.inf, 0.0, least)


@objective(per="token")
def r2vpo(batch: Batch, logp: Tensor, *, penalty: float = 0.04) -> Loss:
    """-(1/N) sum_i sum_t (r A' - penalty (r - 1)^2), the second moment of the ratio about 1 instead of a clip.

    `penalty` is the Lagrange multiplier, held fixed: the authors move it between steps so that the metric
    `token_ratio_variance` stays under a target, which is the caller's to do. Log-ratios within +-20. Source: R2VPO,
    arXiv 2601.03320 (its abstract, and two public re-implementations of the formula; not its full text).
    """
    positive("penalty", penalty)
    ratio = torch.exp(token_log_ratio(batch, logp).clamp(-_SQUARED_LIMIT, _SQUARED_LIMIT))
    square = (ratio - 1).square()
    loss = -token_mean(batch, ratio * normalised_advantage(batch)[:, None] - penalty * square)
    return loss, {"token_ratio_variance": float(token_mean(batch, square.detach()))}
