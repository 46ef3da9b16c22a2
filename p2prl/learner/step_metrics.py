"""What a step says of itself: sums while micro-batches run, means at the very end.

In: rows, log-probs, an objective's metrics. Out: a `Part` whose sums grow; the metrics of the status page.

Invariants: a mean is over all answers or tokens of the step, whoever computed them; `clip_fraction_fresh` is a share
of the fresh answers (or tokens) alone: GEPO's weights clip some even when nothing is stale.
"""

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from p2prl.learner.collate import Rows
from p2prl.learner.committee import Part
from p2prl.learner.logprobs import TokenLogprobs
from p2prl.objectives.batch import Batch, log_ratio
from p2prl.objectives.ess import EssState
from p2prl.objectives.gepo import is_clipped, log_weight
from p2prl.objectives.kl import sampler_kl
from p2prl.objectives.objective import Objective

# What a clipped answer is to a person, whatever the objective clips.
_TOKEN_CLIPS = ("clip_fraction", "clip_fraction_positive", "clip_fraction_negative", "clip_fraction_fresh")
_CAPPED = ("vcpo", "tis")  # objectives whose weight is min(e^l, cap)


def summary(rows: Rows) -> Part:
    """What is known before the forward pass."""
    batch = rows.batch
    live, reward, fresh = batch.live, batch.reward, batch.mask & (batch.age == 0)
    ages = batch.age[batch.mask].double()
    groups = [reward[live & (batch.group == number)] for number in torch.unique(batch.group[live])]
    sums = {
        "reward": reward[live].double().sum().item(),
        "age": ages.sum().item(),
        "length": float(batch.mask.sum()),
        "equal_reward_groups": float(sum(bool((values == values[0]).all()) for values in groups)),
        "dropped_answers": float(rows.num_dropped + int((~live).sum())),
        "fresh_answers": float((live & (fresh == batch.mask).all(1)).sum()),
        "fresh_tokens": float(fresh.sum()),
    }
    maxima = {"age_max": ages.max().item()} if ages.numel() else {}
    return Part([], EssState(), EssState(), int(live.sum()), int(batch.mask.sum()), len(groups), sums, maxima)


def with_sums(
    part: Part,
    batch: Batch,
    tokens: TokenLogprobs,
    metrics: dict[str, float],
    objective: tuple[Objective, dict[str, Any]],
) -> Part:
    """`metrics`: shares of the whole batch, and the loss as a sum."""
    count = {"answer": batch.num_answers or 0.0, "token": batch.num_tokens or 0.0}
    sums = {name: value * (1.0 if name == "loss" else count[_per(name)]) for name, value in metrics.items()}
    sums |= _token_sums(batch, tokens)
    return replace(
        with_ess(part, batch, tokens.logp, objective),
        sums=part.sums | {name: part.sums.get(name, 0.0) + value for name, value in sums.items()},
        log_ratios=(*part.log_ratios, *_log_ratios(batch, tokens.logp)),
    )


def with_ess(part: Part, batch: Batch, logp: Tensor, objective: tuple[Objective, dict[str, Any]]) -> Part:
    """The part with these answers in both effective sample sizes."""
    return replace(
        part,
        ess=part.ess.merge(EssState.of(log_ratio(batch, logp))),
        ess_weights=part.ess_weights.merge(_weights_state(batch, logp, objective)),
    )


def step_metrics(part: Part, per: Literal["answer", "token"]) -> dict[str, float]:
    answers, tokens = max(part.num_answers, 1), max(part.num_tokens, 1)
    count = {"answer": answers, "token": tokens}
    sums = dict(part.sums)
    fresh = {"answer": sums.pop("fresh_answers", 0.0), "token": sums.pop("fresh_tokens", 0.0)}
    given = {
        "loss": sums.pop("loss", 0.0) / count[per],
        "reward_mean": sums.pop("reward", 0.0) / answers,
        "log_ratio_mean": sums.pop("log_ratio", 0.0) / answers,
        "completion_length": sums.pop("length", 0.0) / answers,
        "kl": sums.pop("kl", 0.0) / tokens,
        "entropy": sums.pop("entropy", 0.0) / tokens,
        "age_mean": sums.pop("age", 0.0) / tokens,
        "age_max": part.maxima.get("age_max", 0.0),
        "equal_reward_groups": sums.pop("equal_reward_groups", 0.0),
        "dropped_answers": sums.pop("dropped_answers", 0.0),
        "tokens": float(part.num_tokens),
        "answers": float(part.num_answers),
        "fresh_fraction": fresh["answer"] / answers,
        "ess_ratio": _finite(part.ess.rho),
        "ess_ratio_weights": _finite(part.ess_weights.rho),
        "weight_top_share": _finite(part.ess.top_share),
    }
    shares = {}
    for name, value in sums.items():
        total = fresh[_per(name)] if name.endswith("_fresh") else count[_per(name)]
        shares[name] = value / max(total, 1.0)
    for name in _TOKEN_CLIPS:
        if f"token_{name}" in shares:
            shares.setdefault(name, shares[f"token_{name}"])
    return shares | given


@torch.no_grad()
def _token_sums(batch: Batch, tokens: TokenLogprobs) -> dict[str, float]:
    return {
        "kl": sampler_kl(batch, tokens.logp).sum().item(),
        "entropy": tokens.entropy.sum().item(),
        "log_ratio": log_ratio(batch, tokens.logp).sum().item(),
    }


@torch.no_grad()
def _log_ratios(batch: Batch, logp: Tensor) -> list[tuple[int, float]]:
    return list(zip(batch.group[batch.live].tolist(), log_ratio(batch, logp).tolist(), strict=True))


@torch.no_grad()
def _weights_state(batch: Batch, logp: Tensor, objective: tuple[Objective, dict[str, Any]]) -> EssState:
    """Of the weights as used: a clipped answer weighs 0 and still counts. Raw ratios where an answer has no weight."""
    options = objective[0].options | objective[1]
    if objective[0].name.startswith("gepo"):
        log_weights = log_weight(batch, logp)
        clipped = is_clipped(batch, log_weights.exp(), options["clip"], options["age_band"])
        return EssState.of(torch.where(clipped, -torch.inf, log_weights)[batch.live])
    ratios = log_ratio(batch, logp)
    if objective[0].name in _CAPPED:
        ratios = ratios.clamp(max=math.log(options["cap"]))
    elif objective[0].name == "mis":
        ratios = torch.where(ratios > math.log(options["cap"]), -torch.inf, ratios)
    return EssState.of(ratios)


def _per(metric: str) -> Literal["answer", "token"]:
    return "token" if metric.startswith("token_") else "answer"


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
