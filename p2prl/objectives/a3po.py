"""Decoupled PPO: a proximal policy between sampler and learner, approximated (a3po) or recomputed (decoupled_ppo).

In: a prepared batch, log-probs [B, T] under the policy, ages in versions. Out: loss, metrics.

Notation, a token: d = max(age, 1); log prox = sg(q / d + (1 - 1/d) p); r = exp(p - log prox);
w = sg(exp(log prox - q)); w r = exp(p - q) always; A = R - mean of the prompt group, the same on every
token; N tokens before any is dropped.

Invariants: age 0 and 1 are the same (prox = behaviour, w = 1); a token over the cap drops out and still counts in N.
"""

import torch
from torch import Tensor

from p2prl.errors import BatchError, ConfigError
from p2prl.objectives.batch import RATIO_LIMIT, Batch, token_log_ratio
from p2prl.objectives.objective import Loss, Metrics, objective, one_of, positive, token_mean, token_share
from p2prl.objectives.ppo import clip_metrics, clipped, surrogate


@objective(per="token")
def a3po(
    batch: Batch,
    logp: Tensor,
    *,
    clip: float = 0.2,
    cap: float = 5.0,
    cap_mode: str = "mask",
    dual_clip: float | None = None,
) -> Loss:
    """-(1/N) sum_i sum_t w min(r A, clip(r, 1 - clip, 1 + clip) A), no forward pass for the proximal policy.

    cap: of w; `mask` drops the token, `clamp` bounds its weight. `dual_clip` c > 1: for A < 0 the term before w is at
    least c A. Where prox_logp is known too, the approximation's error is in the metrics. Source: A-3PO, arXiv
    2512.06547; age 0 as its code has it.
    """
    difference = token_log_ratio(batch, logp)
    depth = batch.age.clamp(min=1).to(difference.dtype)
    log_weight = difference.detach() * (1 - 1 / depth)
    loss, metrics = _decoupled(batch, difference - log_weight, log_weight, (clip, cap, cap_mode, dual_clip))
    return loss, metrics | _approximation_error(batch, log_weight)


@objective(per="token")
def decoupled_ppo(
    batch: Batch,
    logp: Tensor,
    *,
    clip: float = 0.2,
    cap: float = 5.0,
    cap_mode: str = "mask",
    dual_clip: float | None = None,
) -> Loss:
    """`a3po` with the proximal policy recomputed: batch.prox_logp [B, T], log-probs under the weights at step start.

    Source: AReaL, arXiv 2505.24298. BatchError without prox_logp.
    """
    if batch.prox_logp is None:
        raise BatchError("decoupled_ppo needs prox_logp, a forward pass at the start of the step; a3po does without")
    difference = token_log_ratio(batch, logp)
    log_weight = token_log_ratio(batch, batch.prox_logp)
    return _decoupled(batch, difference - log_weight, log_weight, (clip, cap, cap_mode, dual_clip))


def _decoupled(
    batch: Batch, log_ratio: Tensor, log_weight: Tensor, options: tuple[float, float, str, float | None]
) -> Loss:
    """log r (with gradient) and log w [B, T] to the loss."""
    clip, cap, cap_mode, dual_clip = options
    positive("clip", clip)
    positive("cap", cap)
    one_of("cap_mode", cap_mode, ("mask", "clamp"))
    if dual_clip is not None and not dual_clip > 1:
        raise ConfigError(f"dual_clip is {dual_clip}; it bounds a ratio that is above 1 already, so it must be above 1")
    assert batch.advantage is not None
    advantage = batch.advantage[:, None]
    ratio = torch.exp(log_ratio.clamp(-RATIO_LIMIT, RATIO_LIMIT))
    weight = torch.exp(log_weight.clamp(-RATIO_LIMIT, RATIO_LIMIT))
    over = weight > cap
    weight = torch.where(over, 0.0 if cap_mode == "mask" else cap, weight)
    term = surrogate(ratio, advantage, clip, clip)
    if dual_clip is not None:
        term = torch.where(advantage < 0, torch.maximum(term, dual_clip * advantage), term)
    metrics = clip_metrics(batch, clipped(ratio.detach(), advantage, clip, clip), advantage)
    return -token_mean(batch, term * weight), metrics | {"token_capped_fraction": token_share(batch, over)}


def _approximation_error(batch: Batch, log_weight: Tensor) -> Metrics:
    """Mean |log prox by age - log prox by forward pass| a token, where both are known."""
    if batch.prox_logp is None:
        return {}
    error = (log_weight - token_log_ratio(batch, batch.prox_logp)).abs()
    return {"token_prox_error": float(token_mean(batch, error))}
