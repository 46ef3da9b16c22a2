"""One optimiser step: groups to a gradient, a gradient to the next weights.

In: a policy, collated rows, the recipe. Out: a `Part`, then a `Step` with the metrics of the status page.

Invariants: only the step's learning rate depends on the effective sample size; a gradient or a rho that is not finite
skips the step, is counted and said, and leaves the weights as they were.
"""

import math
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from p2prl.learner.collate import Rows, collate, micro_batches
from p2prl.learner.committee import Part, merge
from p2prl.learner.logprobs import TokenLogprobs, token_logprobs
from p2prl.learner.objective_options import Call, objective_call
from p2prl.learner.policy import Policy
from p2prl.learner.prox import interpolated, recomputed
from p2prl.learner.score_norms import ScoreNorms
from p2prl.learner.score_step import group_batches, needs_score_norms, scored_step
from p2prl.learner.step_metrics import step_metrics, summary, with_ess, with_sums
from p2prl.objectives.ess import lr_multiplier, usable_rho_on
from p2prl.objectives.registry import find_objective
from p2prl.recipe import Recipe
from p2prl.records import StepInput


@dataclass(frozen=True)
class Step:
    """What a step gave; `skipped` is why it was not made, else empty."""

    metrics: dict[str, float]
    rho_on: float
    skipped: str


def compute_part(policy: Policy, rows: Rows, recipe: Recipe) -> Part:
    """Forward and backward over all micro-batches; the weights stay as they are."""
    call, budget = objective_call(recipe), recipe.learner.micro_batch_tokens
    part = summary(rows)
    if not part.num_answers:
        return part
    policy.zero_gradient()
    if recipe.objective.prox == "recompute":
        rows = recomputed(policy, rows, budget)
    useful = rows.batch.live.nonzero().flatten().tolist()
    lengths = [int(rows.length[row]) for row in useful]
    norms = ScoreNorms(policy.module) if needs_score_norms(*call) else None
    if norms is None:
        batches = [[numbers] for numbers in micro_batches(lengths, budget)]
    else:
        batches = group_batches(lengths, rows.batch.group[useful].tolist(), budget)
    for pieces in batches:
        picked = [torch.tensor([useful[number] for number in numbers], dtype=torch.long) for numbers in pieces]
        try:
            if norms is None:
                part = _micro_step(policy, rows, picked[0], (call, recipe.objective.prox), part)
            else:
                part = _scored_micro_step(policy, rows, picked, call, part, norms)
        except ValueError as error:
            policy.zero_gradient()
            return replace(part, gradient=[], faults=(*part.faults, str(error)))
    return replace(part, gradient=policy.take_gradient())


@torch.no_grad()
def measure_ess(policy: Policy, rows: Rows, recipe: Recipe) -> Part:
    """A forward pass over answers that no step is made of: a part with effective sample sizes and no gradient."""
    call, part = objective_call(recipe), replace(summary(rows), sums={}, maxima={})
    useful = rows.batch.live.nonzero().flatten().tolist()
    lengths = [int(rows.length[row]) for row in useful]
    for numbers in micro_batches(lengths, recipe.learner.micro_batch_tokens):
        picked = torch.tensor([useful[number] for number in numbers], dtype=torch.long)
        batch = rows.batch.split(picked).to(policy.device)
        part = with_ess(part, batch, token_logprobs(policy, rows, batch, picked).logp, call)
    return part


def measure_rho_on(policy: Policy, part: Part, step: StepInput, recipe: Recipe) -> float:
    """What fresh answers give: those of the step's part, and those that only measure. 0.0 without any: not measured."""
    more = msgspec.structs.replace(step, groups=step.fresh, group_ids=(), ages=((0,),) * len(step.fresh))
    parts = [replace(part, gradient=[])]
    if step.fresh:
        parts.append(measure_ess(policy, collate(more, recipe.learner.max_age), recipe))
    whole = merge(parts)
    return usable_rho_on(driving_rho(whole, recipe)) if whole.num_answers else 0.0


def driving_rho(part: Part, recipe: Recipe) -> float:
    """The effective sample size that the recipe lets scale the step; nan when it is undefined."""
    return (part.ess_weights if recipe.objective.step_size == "weights" else part.ess).rho


def apply_part(policy: Policy, part: Part, recipe: Recipe, rho_on: float) -> Step:
    """Merge's result to an optimiser step. rho_on 0.0: this batch is fresh, its own rho becomes rho_on."""
    rho = driving_rho(part, recipe)
    if rho_on == 0.0 and part.num_answers:
        rho_on = rho
    rho_on = usable_rho_on(rho_on) if part.num_answers else rho_on
    multiplier = lr_multiplier(rho, rho_on, recipe.objective.step_power)
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
    return Step(step_metrics(part, per) | used | {"skipped": float(bool(skipped))}, rho_on, skipped)


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


def _micro_step(policy: Policy, rows: Rows, picked: Tensor, how: tuple[Call, str], part: Part) -> Part:
    """`how`: the objective with its options, and where its proximal policy comes from."""
    (objective, options), prox = how
    batch = rows.batch.split(picked).to(policy.device)
    tokens = token_logprobs(policy, rows, batch, picked)
    if prox == "a3po":
        batch = interpolated(batch, tokens.logp)
    loss, metrics = objective(batch, tokens.logp, **options)
    # Sums, not means: the divisor is known when all parts are merged.
    count = batch.num_answers if objective.per == "answer" else batch.num_tokens
    loss = loss * (count or 0.0)
    loss.backward()
    return with_sums(part, batch, tokens, metrics | {"loss": loss.item()}, (objective, options))


def _scored_micro_step(
    policy: Policy, rows: Rows, pieces: list[Tensor], call: Call, part: Part, norms: ScoreNorms
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
        scored = scored_step(norms, run, batch, numbers, call)
    finally:
        policy.shares_prompts = usual
    metrics = scored.metrics | {"loss": scored.loss}
    return with_sums(part, batch, TokenLogprobs(scored.logp, scored.entropy), metrics, call)
