"""Token-level ratios with PPO's clip: grpo, dr_grpo, dapo.

In: a prepared batch, log-probs [B, T] under the policy. Out: loss, metrics.

Notation: r = exp(p - q) a token [B, T]; S = min(r A, clip(r, 1 - eps, 1 + eps) A); A' = (R - mean) / (sd + 1e-4) and
A = R - mean of the prompt group [B], the same on every token of an answer; B answers, T_i tokens of answer i.

Invariants: the gradient flows through r alone; a clipped token has none.
"""

import torch
from torch import Tensor

from p2prl.objectives.batch import Batch, normalised_advantage, token_ratio
from p2prl.objectives.objective import (
    Loss,
    Metrics,
    answer_mean,
    objective,
    positive,
    token_mean,
    token_share,
    within_answer,
)


def surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """S, of ratio and advantage that broadcast: min(r A, clip(r, 1 - low, 1 + high) A)."""
    return torch.minimum(ratio * advantage, torch.clamp(ratio, 1 - low, 1 + high) * advantage)


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """bool: the ratio has left its band on the advantage's side, so nothing is left of its gradient."""
    return ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))


def clip_metrics(batch: Batch, clipped: Tensor, advantage: Tensor) -> Metrics:
    """Shares of tokens; `clipped` bool [B, T], advantage [B, 1]. Fresh tokens are told apart."""
    return {
        "token_clip_fraction": token_share(batch, clipped),
        "token_clip_fraction_positive": token_share(batch, clipped & (advantage > 0)),
        "token_clip_fraction_negative": token_share(batch, clipped & (advantage < 0)),
        "token_clip_fraction_fresh": token_share(batch, clipped & (batch.age == 0)),
    }


@objective(per="answer")
def grpo(batch: Batch, logp: Tensor, *, clip: float = 0.2) -> Loss:
    """-(1/B) sum_i (1/T_i) sum_t S(A'), eps = clip. Source: DeepSeekMath, arXiv 2402.03300, without its KL term."""
    positive("clip", clip)
    advantage, ratio = normalised_advantage(batch)[:, None], token_ratio(batch, logp)
    loss = -answer_mean(batch, within_answer(batch, surrogate(ratio, advantage, clip, clip)))
    return loss, clip_metrics(batch, clipped(ratio, advantage, clip, clip), advantage)


@objective(per="answer")
def dr_grpo(batch: Batch, logp: Tensor, *, max_length: float, clip: float = 0.2) -> Loss:
    """-(1/(B max_length)) sum_i sum_t S(A), max_length in tokens: neither length nor spread of a group weighs.

    Source: Understanding R1-Zero-like training, arXiv 2503.20783.
    """
    positive("clip", clip)
    positive("max_length", max_length)
    assert batch.advantage is not None
    advantage, ratio = batch.advantage[:, None], token_ratio(batch, logp)
    terms = torch.where(batch.mask, surrogate(ratio, advantage, clip, clip), 0.0 * ratio)
    loss = -answer_mean(batch, terms.sum(1)) / max_length
    return loss, clip_metrics(batch, clipped(ratio, advantage, clip, clip), advantage)


@objective(per="token")
def dapo(batch: Batch, logp: Tensor, *, clip: float = 0.2, clip_high: float | None = None) -> Loss:
    """-(1/N) sum_i sum_t S(A') over all N tokens, band [1 - clip, 1 + clip_high] (None: clip).

    Source: DAPO, arXiv 2503.14476; its dynamic sampling and overlong shaping are the sampler's affair.
    """
    positive("clip", clip)
    positive("clip_high", clip_high)
    high = clip if clip_high is None else clip_high
    advantage, ratio = normalised_advantage(batch)[:, None], token_ratio(batch, logp)
    loss = -token_mean(batch, surrogate(ratio, advantage, clip, high))
    return loss, clip_metrics(batch, clipped(ratio, advantage, clip, high), advantage)
