"""One optimiser step: groups to a gradient, a gradient to the next weights.

In: a policy, collated rows, the recipe. Out: a `Part`, then a `Step` with the metrics of the status page.

Invariants: only the step's learning rate depends on the effective sample size; a gradient or a rho that is not finite
skips the step, is counted and said, and leaves the weights as they were.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from p2prl.learner.collate import Rows, micro_batches
from p2prl.learner.committee import Part
from p2prl.learner.policy import Policy
from p2prl.learner.score_norms import ScoreNorms
from p2prl.learner.score_step import group_batches, needs_score_norms, scored_step
from p2prl.objectives.batch import Batch, log_ratio
from p2prl.objectives.ess import EssState, lr_multiplier, usable_rho_on
from p2prl.objectives.gepo import is_clipped, log_weight
from p2prl.objectives.kl import sampler_kl
from p2prl.objectives.objective import Objective
from p2prl.objectives.registry import find_objective
from p2prl.recipe import ObjectiveSection, Recipe


@dataclass(frozen=True)
class Step:
    """What a step gave; `skipped` is why it was not made, else empty."""

    metrics: dict[str, float]
    rho_on: float
    skipped: str


@dataclass(frozen=True)
class _Tokens:
    logp: Tensor  # [B, A]
    entropy: Tensor  # [B, A]


def compute_part(policy: Policy, rows: Rows, recipe: Recipe) -> Part:
    """Forward and backward over all micro-batches; the weights stay as they are."""
    objective = find_objective(recipe.objective.name)
    options = objective_options(recipe.objective, recipe.sampling.max_new_tokens)
    batch = rows.batch
    part = _summary(rows)
    useful = batch.live.nonzero().flatten().tolist()
    if not useful:
        return part
    policy.zero_gradient()
    lengths, budget = [int(rows.length[row]) for row in useful], recipe.learner.micro_batch_tokens
    norms = ScoreNorms(policy.module) if needs_score_norms(objective, options) else None
    if norms is None:
        batches = [[numbers] for numbers in micro_batches(lengths, budget)]
    else:
        batches = group_batches(lengths, batch.group[useful].tolist(), budget)
    for pieces in batches:
        picked = [torch.tensor([useful[number] for number in numbers], dtype=torch.long) for numbers in pieces]
        try:
            if norms is None:
                part = _micro_step(policy, rows, picked[0], (objective, options), part)
            else:
                part = _scored_micro_step(policy, rows, picked, (objective, options), part, norms)
        except ValueError as error:
            policy.zero_gradient()
            return replace(part, gradient=[], faults=(*part.faults, str(error)))
    return replace(part, gradient=policy.take_gradient())


def objective_options(section: ObjectiveSection, max_length: int | None = None) -> dict[str, Any]:
    """The recipe's options that its objective takes; `max_length` in tokens."""
    taken = find_objective(section.name).options
    options = {"clip": section.clip, "baseline": section.baseline, "max_length": max_length}
    return {name: value for name, value in options.items() if name in taken}


def apply_part(policy: Policy, part: Part, recipe: Recipe, rho_on: float) -> Step:
    """Merge's result to an optimiser step. rho_on 0.0: this batch is fresh, its own rho becomes rho_on."""
    rho = part.ess_weights.rho if recipe.objective.step_size == "weights" else part.ess.rho
    if rho_on == 0.0 and part.num_answers:
        rho_on = rho
    rho_on = usable_rho_on(rho_on) if part.num_answers else rho_on
    multiplier = lr_multiplier(rho, rho_on)
    per = find_objective(recipe.objective.name).per
    if recipe.objective.step_size == "none" and multiplier > 0:
        multiplier = 1.0
    divisor = max(part.num_answers if per == "answer" else part.num_tokens, 1)
    gradient = [value / divisor for value in part.gradient]
    norm = math.sqrt(sum(value.double().square().sum().item() for value in gradient)) if gradient else 0.0
    rate = recipe.learner.learning_rate * multiplier
    skipped = _reason_to_skip(part, rho, norm)
    if not skipped:
        scale = min(1.0, recipe.learner.max_grad_norm / (norm + 1e-6))
        policy.apply([value * scale for value in gradient], rate)
    used = {"lr": 0.0 if skipped else rate, "lr_multiplier": multiplier, "grad_norm": norm, "rho_on": rho_on}
    return Step(_metrics(part, per) | used | {"skipped": float(bool(skipped))}, rho_on, skipped)


def _reason_to_skip(part: Part, rho: float, norm: float) -> str:
    if part.faults:
        return f"step skipped: {part.faults[0]}"
    if not part.num_answers:
        return "step skipped: none of its groups has an answer with a usable token"
    if not math.isfinite(rho):
        return f"step skipped: the effective sample size of its {part.num_answers} answers is not finite"
    if not math.isfinite(norm):
        return f"step skipped: the gradient of its {part.num_answers} answers is not finite"
    return ""


def _summary(rows: Rows) -> Part:
    """What is known before the forward pass."""
    batch = rows.batch
    live, reward = batch.live, batch.reward
    ages = batch.age[batch.mask].double()
    groups = [reward[live & (batch.group == number)] for number in torch.unique(batch.group[live])]
    sums = {
        "reward": reward[live].double().sum().item(),
        "age": ages.sum().item(),
        "length": float(batch.mask.sum()),
        "equal_reward_groups": float(sum(bool((values == values[0]).all()) for values in groups)),
        "dropped_answers": float(rows.num_dropped + int((~live).sum())),
    }
    maxima = {"age_max": ages.max().item()} if ages.numel() else {}
    return Part([], EssState(), EssState(), int(live.sum()), int(batch.mask.sum()), len(groups), sums, maxima)


def _micro_step(
    policy: Policy, rows: Rows, picked: Tensor, objective: tuple[Objective, dict[str, Any]], part: Part
) -> Part:
    batch = rows.batch.split(picked).to(policy.device)
    tokens = token_logprobs(policy, rows, batch, picked)
    loss, metrics = objective[0](batch, tokens.logp, **objective[1])
    # Sums, not means: the divisor is known when all parts are merged.
    count = batch.num_answers if objective[0].per == "answer" else batch.num_tokens
    loss = loss * (count or 0.0)
    loss.backward()
    return _with_sums(part, batch, tokens, metrics | {"loss": loss.item()}, objective)


def _scored_micro_step(
    policy: Policy,
    rows: Rows,
    pieces: list[Tensor],
    objective: tuple[Objective, dict[str, Any]],
    part: Part,
    norms: ScoreNorms,
) -> Part:
    """The same for an objective that wants score norms: `pieces` make up whole groups."""
    picked = torch.cat(pieces)
    batch = rows.batch.split(picked).to(policy.device)

    def run(chosen: Tensor) -> tuple[Tensor, Tensor]:
        tokens = token_logprobs(policy, rows, batch.split(chosen), picked[chosen])
        return tokens.logp, tokens.entropy

    usual, policy.shares_prompts = policy.shares_prompts, False
    try:
        numbers = torch.arange(len(picked)).split([len(piece) for piece in pieces])
        scored = scored_step(norms, run, batch, numbers, objective)
    finally:
        policy.shares_prompts = usual
    metrics = scored.metrics | {"loss": scored.loss}
    return _with_sums(part, batch, _Tokens(scored.logp, scored.entropy), metrics, objective)


def _with_sums(
    part: Part, batch: Batch, tokens: _Tokens, metrics: dict[str, float], objective: tuple[Objective, dict[str, Any]]
) -> Part:
    """`metrics`: shares of the whole batch, and the loss as a sum."""
    count = {"answer": batch.num_answers or 0.0, "token": batch.num_tokens or 0.0}
    sums = {name: value * (1.0 if name == "loss" else count[_per(name)]) for name, value in metrics.items()}
    sums |= _token_sums(batch, tokens)
    return replace(
        part,
        ess=part.ess.merge(EssState.of(log_ratio(batch, tokens.logp))),
        ess_weights=part.ess_weights.merge(_weights_state(batch, tokens.logp, objective)),
        sums=part.sums | {name: part.sums.get(name, 0.0) + value for name, value in sums.items()},
    )


def token_logprobs(policy: Policy, rows: Rows, batch: Batch, picked: Tensor) -> _Tokens:
    """log_softmax of logits / temperature in float32, at the answers' tokens alone; 0 elsewhere."""
    device = policy.device
    ids = rows.ids[picked].to(device)
    row, offset = batch.mask.nonzero(as_tuple=True)
    position = rows.prompt_length[picked].to(device)[row] + offset
    temperature = rows.temperature[picked].to(device)
    logits = policy.answer_logits(ids, row, position) / temperature[row, None]
    every = torch.log_softmax(logits, -1)
    chosen = every.gather(1, ids[row, position, None]).squeeze(1)
    with torch.no_grad():
        spread = -(every.exp() * every).sum(-1)
    empty = torch.zeros(batch.mask.shape, dtype=torch.float32, device=device)
    return _Tokens(empty.index_put((row, offset), chosen), empty.index_put((row, offset), spread))


@torch.no_grad()
def _token_sums(batch: Batch, tokens: _Tokens) -> dict[str, float]:
    return {
        "kl": sampler_kl(batch, tokens.logp).sum().item(),
        "entropy": tokens.entropy.sum().item(),
        "log_ratio": log_ratio(batch, tokens.logp).sum().item(),
    }


@torch.no_grad()
def _weights_state(batch: Batch, logp: Tensor, objective: tuple[Objective, dict[str, Any]]) -> EssState:
    """Of the weights as used: a clipped answer weighs 0 and still counts. Raw ratios where GEPO's are not used."""
    if not objective[0].name.startswith("gepo"):
        return EssState.of(log_ratio(batch, logp))
    log_weights = log_weight(batch, logp)
    options = objective[0].options | objective[1]
    clipped = is_clipped(batch, log_weights.exp(), options["clip"], options["age_band"])
    return EssState.of(torch.where(clipped, -torch.inf, log_weights)[batch.live])


def _per(metric: str) -> Literal["answer", "token"]:
    return "token" if metric.startswith("token_") else "answer"


def _metrics(part: Part, per: Literal["answer", "token"]) -> dict[str, float]:
    answers, tokens = max(part.num_answers, 1), max(part.num_tokens, 1)
    count = {"answer": answers, "token": tokens}
    sums = dict(part.sums)
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
        "ess_ratio": _finite(part.ess.rho),
        "ess_ratio_weights": _finite(part.ess_weights.rho),
        "weight_top_share": _finite(part.ess.top_share),
    }
    return {name: value / count[_per(name)] for name, value in sums.items()} | given


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
