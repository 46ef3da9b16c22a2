"""Real optimiser steps of a model, and what each step's delta costs.

In: `weights.Plan` in the folder. Out: the `deltas.Pair`s of the last steps at each learning rate.

    python -m p2prl.bench.weights_run FD FOLDER

The steps are a node's: groups drawn by the engine under the version that the step starts from, judged by the environment,
trained on by the learner. The learning rate stays what it is: nothing scales it.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from p2prl.bench import deltas
from p2prl.bench.measuring import run, say
from p2prl.bench.weights import PLAN, Plan
from p2prl.environments.judge import Judge
from p2prl.environments.spec import open_environment, spec_of
from p2prl.learner.collate import collate
from p2prl.learner.committee import merge
from p2prl.learner.policy import Policy
from p2prl.learner.step import apply_part, compute_part
from p2prl.models.load import load_module, load_tokenizer
from p2prl.models.stop_strings import StopStrings
from p2prl.recipe import Recipe, data_folders, find
from p2prl.records import Group, StepInput, Version
from p2prl.rollout.transformers_engine import TransformersEngine
from p2prl.rollout.worker import Draw, Origin, judge_item, make_group

MAKER = "12D3KooW" + "A" * 44
MOST_DRAWS = 4  # times the groups of a step: a group whose answers are all worth the same teaches nothing


async def measure(folder: Path) -> list[Any]:
    plan = msgspec.json.decode((folder / PLAN).read_bytes(), type=Plan)
    torch.set_num_threads(plan.threads)
    pairs: list[deltas.Pair] = []
    for rate in plan.rates:
        parent, child = folder / "parent.state", folder / "child.state"
        for step in Training(plan, rate, folder).steps(parent, child):
            await asyncio.sleep(0)  # here it can be stopped
            if step >= plan.first_step:
                pair = deltas.measure(parent, child, folder, rate=rate, step=step, threads=plan.threads)
                pairs.append(pair)
                share, zstd = pair.num_bytes["delta"] / pair.full_bytes, pair.wall_s["zstd"]
                say(
                    f"rate {rate:g}, step {step}: delta {share:.3%} of the full size; by the seconds of zstd -3, "
                    f"encode {pair.wall_s['delta'] / zstd:.2f}, apply {pair.wall_s['apply'] / zstd:.2f}"
                )
            else:
                say(f"rate {rate:g}, step {step}")
    return [msgspec.to_builtins(pair) for pair in pairs]


class Training:
    """A learner with a sampler beside it."""

    def __init__(self, plan: Plan, rate: float, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        cache = Path(plan.models_cache) if plan.models_cache else folder / "models"
        self._recipe = recipe = _recipe(plan, rate)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._policy = Policy.load(recipe, cache, device)
        tokenizer = load_tokenizer(recipe.model.source, cache)
        module = load_module(recipe.model.source, cache, torch.float32).to(device)
        stops = StopStrings(recipe.sampling.stop, tokenizer.decode, tokenizer.stop_ids)
        self._engine = TransformersEngine(module, tokenizer.stop_ids, tokenizer.pad_id, stops=stops)
        environment = open_environment(spec_of(recipe.environment, data_folders()))
        self._judge = Judge(environment, tokenizer, lambda work: work(), stops)
        self._origin = Origin(
            MAKER,
            recipe.environment.name,
            environment.version,
            tokenizer.hash,
            recipe.sampling.record(),
            self._engine.name,
        )
        self._num_drawn = 0

    def steps(self, parent: Path, child: Path) -> Iterator[int]:
        """The number of each step made, from the state in `parent` to that in `child`."""
        version = self._policy.version
        current = self._folder / "current.state"
        self._policy.publish(current)
        _link(current, parent)
        for step in range(1, self._plan.num_steps + 1):
            self._engine.load(current, version)
            groups = self._draw()
            ids = tuple(number.to_bytes(32, "little") for number in range(len(groups)))
            batch = StepInput(groups, ids, ((0,),) * len(groups), version, 1, 1.0)
            rows = collate(batch, self._recipe.learner.max_age)
            made = apply_part(self._policy, merge([compute_part(self._policy, rows, self._recipe)]), self._recipe, 1.0)
            if made.skipped:
                raise RuntimeError(made.skipped)
            version = Version(1, step, self._policy.publish(current))
            self._policy.version = version
            _link(current, child)
            yield step
            child.replace(parent)

    def _draw(self) -> tuple[Group, ...]:
        wanted, groups = self._plan.num_groups, []
        for left in reversed(range(MOST_DRAWS * wanted)):
            group = self._group()
            rewards = {trajectory.reward for trajectory in group.trajectories}
            if len(rewards) > 1 or left < wanted - len(groups):
                groups.append(group)
            if len(groups) == wanted:
                break
        return tuple(groups)

    def _group(self) -> Group:
        draw = Draw(self._num_drawn, self._num_drawn)
        self._num_drawn += 1
        prompt = self._judge.prompt(draw.prompt_index)
        size, sampling = self._recipe.sampling.group_size, self._origin.sampling
        drawn = self._engine.generate([prompt.token_ids], size, sampling, draw.counter)
        (answers,) = drawn.completions
        judgement = self._judge.check(judge_item(prompt, answers))
        return make_group(self._origin, draw, prompt, answers, drawn.versions, judgement, 0.0)


def _link(current: Path, name: Path) -> None:
    """Publishing makes a new file each time, and never writes into one."""
    name.unlink(missing_ok=True)
    name.hardlink_to(current)


def _recipe(plan: Plan, rate: float) -> Recipe:
    recipe, _ = find(plan.recipe)
    learner = {"learning_rate": rate, "micro_batch_tokens": plan.micro_batch_tokens}
    return recipe.model_copy(
        update={
            "learner": recipe.learner.model_copy(update=learner),
            "objective": recipe.objective.model_copy(update={"step_size": "none"}),
            "sampling": recipe.sampling.model_copy(update={"max_new_tokens": plan.answer_tokens}),
        }
    )


if __name__ == "__main__":
    raise SystemExit(run(measure))
