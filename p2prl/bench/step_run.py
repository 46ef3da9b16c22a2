"""Measures optimiser steps of one model, variant by variant, in rounds.

In: `step.Plan` in the folder. Out: `step.Measured`.

    python -m p2prl.bench.step_run FD FOLDER

The batch: prompts and answers of random tokens, rewards 0 or 1, log-probs as the policy gives them plus a little noise,
ages up to 4 versions. What a step costs does not depend on what the tokens say. The rate is so small that no weight
moves, so every step meets the same policy.
"""

import asyncio
import math
import resource
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.nn.utils import get_total_norm

from p2prl.bench.measuring import run, say
from p2prl.bench.step import PLAN, VARIANTS, Measured, Plan
from p2prl.learner.collate import Rows, collate
from p2prl.learner.committee import Part, merge
from p2prl.learner.logprobs import token_logprobs
from p2prl.learner.policy import Policy
from p2prl.learner.step import apply_part, compute_part
from p2prl.learner.step_metrics import summary, with_ess
from p2prl.objectives.registry import find_objective
from p2prl.recipe import ObjectiveSection, Recipe, find
from p2prl.records import Completion, Group, Sampling, Segment, StepInput, Trajectory, Version

MAKER = "12D3KooW" + "A" * 44
NOISE = 0.02  # of a token's log-prob
MAX_AGE = 4
RATE = 1e-30
WARM_UP = ("plain", "vcpo")
LONG_S = 5.0  # a step that takes longer is told at once
SECTIONS: dict[str, dict[str, Any]] = {
    "plain": {"name": "reinforce", "step_size": "none"},
    "plain_shared": {"name": "reinforce", "step_size": "none"},
    "vcpo": {"name": "vcpo", "step_size": "sequence"},
    "naive": {"name": "vcpo", "step_size": "sequence"},
    "a3po": {"name": "a3po", "step_size": "none"},
    "recompute": {"name": "decoupled_ppo", "step_size": "none", "prox": "recompute"},
}


async def measure(folder: Path) -> dict[str, Any]:
    plan = msgspec.json.decode((folder / PLAN).read_bytes(), type=Plan)
    torch.set_num_threads(plan.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    recipe, _ = find(plan.recipe)
    cache = Path(plan.models_cache) if plan.models_cache else folder / "models"
    policy = Policy.load(recipe, cache, device)
    step = draw(policy, plan)
    num_tokens = sum(
        len(group.prompt_ids) + len(one.completion.token_ids) for group in step.groups for one in group.trajectories
    )
    memory = PeakMemory(device)
    rounds: list[dict[str, float]] = []
    cpu_rounds: list[dict[str, float]] = []
    peaks: dict[str, int] = {}
    until = time.monotonic() + plan.longest_s
    for number in range(1 + plan.num_rounds):
        if number > plan.least_rounds and time.monotonic() > until:
            break
        first = number % len(VARIANTS)  # who begins changes
        order = (*VARIANTS[first:], *VARIANTS[:first]) if number else WARM_UP
        took: dict[str, float] = {}
        busy: dict[str, float] = {}
        for variant in order:
            memory.begin()
            took[variant], busy[variant] = timed(policy, step, variant, recipe)
            if took[variant] > LONG_S:
                say(f"round {number}: {variant} took {took[variant]:.1f} s, {busy[variant]:.1f} s of CPU")
            peaks[variant] = max(peaks.get(variant, 0), memory.peak_bytes())
            await asyncio.sleep(0)  # here it can be stopped
        if number:
            say(f"round {number}: " + ", ".join(f"{name} {took[name]:.3g} s" for name in VARIANTS))
            rounds.append(took)
            cpu_rounds.append(busy)
    return msgspec.to_builtins(Measured(tuple(rounds), tuple(cpu_rounds), peaks, num_tokens, device, plan.threads))


def timed(policy: Policy, step: StepInput, variant: str, recipe: Recipe) -> tuple[float, float]:
    """Seconds of one step: on the clock, and of all threads' CPU time."""
    chosen = variant_recipe(recipe, variant)
    policy.shares_prompts = variant != "plain"
    wait(policy)
    started, before = time.perf_counter(), time.process_time()
    rows = collate(step, chosen.learner.max_age)
    part = naive_part(policy, rows, chosen) if variant == "naive" else compute_part(policy, rows, chosen)
    done = apply_part(policy, merge([part]), chosen, 1.0)
    wait(policy)
    if done.skipped:
        raise RuntimeError(f"{variant}: {done.skipped}")
    return time.perf_counter() - started, time.process_time() - before


def variant_recipe(recipe: Recipe, variant: str) -> Recipe:
    learner = recipe.learner.model_copy(update={"learning_rate": RATE, "compute": "float32"})
    section = ObjectiveSection.model_validate(SECTIONS[variant])
    return recipe.model_copy(update={"objective": section, "learner": learner})


def naive_part(policy: Policy, rows: Rows, recipe: Recipe) -> Part:
    """VCPO as its authors compute it: a forward and a backward pass an answer, two gradients kept for each group."""
    part, batch = summary(rows), rows.batch
    call = find_objective("vcpo"), {}
    cap = call[0].options["cap"]
    whole = [torch.zeros_like(master) for master in policy.masters.values()]
    for group in batch.group.unique().tolist():
        with_reward, without = ([torch.zeros_like(value) for value in whole] for _ in range(2))
        top = bottom = 0.0
        for row in ((batch.group == group) & batch.live).nonzero().flatten().tolist():
            picked = torch.tensor([row])
            one = batch.split(picked).to(policy.device)
            policy.zero_gradient()
            logp = token_logprobs(policy, rows, one, picked).logp
            logp.sum().backward()
            score = policy.take_gradient()
            ratio = (logp.detach() - one.behavior_logp)[one.mask].sum().item()
            omega = math.exp(min(ratio, math.log(cap))) / int(one.mask.sum())
            reward, square = float(batch.reward[row]), (omega * get_total_norm(score).item()) ** 2
            top, bottom = top + square * reward, bottom + square
            add(with_reward, score, omega * reward)
            add(without, score, omega)
            part = with_ess(part, one, logp.detach(), call)
        add(whole, with_reward, -1.0)
        add(whole, without, top / bottom if bottom else 0.0)
    return replace(part, gradient=whole)


def add(total: list[torch.Tensor], gradient: list[torch.Tensor], times: float) -> None:
    for mine, value in zip(total, gradient, strict=True):
        mine.add_(value, alpha=times)


class PeakMemory:
    """The most this process held since `begin`: of the GPU where there is one; else the resident set."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"

    def begin(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the kernel's high-water mark begins anew
        except OSError:
            pass  # not Linux: the mark is that of the whole process

    def peak_bytes(self) -> int:
        if self._cuda:
            return torch.cuda.max_memory_allocated()
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
        except (OSError, StopIteration):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def wait(policy: Policy) -> None:
    if policy.device.type == "cuda":
        torch.cuda.synchronize()


# -- the batch ------------------------------------------------------------------------------------------------------


def draw(policy: Policy, plan: Plan) -> StepInput:
    """The batch of the plan's shape; the same each time."""
    source = torch.Generator().manual_seed(0)
    module: Any = policy.module
    vocabulary = module.get_input_embeddings().num_embeddings
    size = (plan.num_groups, plan.group_size, plan.answer_tokens)
    prompts = torch.randint(0, vocabulary, (plan.num_groups, plan.prompt_tokens), generator=source)
    answers = torch.randint(0, vocabulary, size, generator=source)
    logp = torch.zeros(size)
    rows = collate(step_of(policy, prompts, answers, logp), MAX_AGE)
    everyone = torch.arange(len(rows.ids))
    with torch.no_grad():
        found = token_logprobs(policy, rows, rows.batch.to(policy.device), everyone).logp
    drifted = found.cpu().view(size) + NOISE * torch.randn(size, generator=source)
    return step_of(policy, prompts, answers, drifted)


def step_of(policy: Policy, prompts: torch.Tensor, answers: torch.Tensor, logp: torch.Tensor) -> StepInput:
    groups = []
    for number, prompt in enumerate(prompts.tolist()):
        trajectories = tuple(
            trajectory(tokens.tolist(), logp[number, place], float((number + place) % 3 == 0))
            for place, tokens in enumerate(answers[number])
        )
        groups.append(group_of(number, tuple(prompt), trajectories, policy.version))
    ids = tuple(number.to_bytes(32, "little") for number in range(len(groups)))
    ages = tuple((number % (MAX_AGE + 1),) for number in range(len(groups)))
    return StepInput(tuple(groups), ids, ages, policy.version, 1, 1.0)


def trajectory(tokens: list[int], logp: torch.Tensor, reward: float) -> Trajectory:
    data = logp.numpy().astype("<f4").tobytes()
    return Trajectory(Completion(tuple(tokens), data, (Segment(0, len(tokens)),), "length"), reward)


def group_of(number: int, prompt: tuple[int, ...], trajectories: tuple[Trajectory, ...], version: Version) -> Group:
    return Group(
        maker=MAKER,
        counter=number,
        environment="random tokens",
        environment_version="1",
        tokenizer_hash=bytes(32),
        prompt_index=number,
        prompt_ids=prompt,
        versions=(version,),
        trajectories=trajectories,
        sampling=Sampling(1.0, 1.0, 0, len(trajectories[0].completion.token_ids)),
        engine="random tokens",
        made_at=0.0,
    )


if __name__ == "__main__":
    raise SystemExit(run(measure))
