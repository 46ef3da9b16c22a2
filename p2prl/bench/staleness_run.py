"""One staleness run: the built-in policy trained on groups that come late.

In: a `RunSpec`. Out: a `Run` and its trace.

    tick t: groups drawn under tick t - delay's weights -> admission -> replay -> collate, part, merge, step -> version
            -> draw the groups that are due later under this version

Everything that decides is the node's: admission's checks, replay's choice, the chain's ages, the learner's step.

Invariants: one seed gives one result, whatever ran before in this process or beside it; a tick to which no usable group
came makes no step and no version.
"""

import math
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from p2prl import codec
from p2prl.bench import laws
from p2prl.bench.staleness import TRACED, Run, RunSpec, Trace, recipe_of
from p2prl.bench.staleness_sampler import Arrival, Sampler
from p2prl.buffer import admission, replay
from p2prl.learner.collate import collate
from p2prl.learner.committee import Part, merge
from p2prl.learner.policy import Policy
from p2prl.learner.step import Step, apply_part, compute_part
from p2prl.recipe import Recipe
from p2prl.records import Group, Manifest, StepInput, Version
from p2prl.rollout.lottery import prompt_index
from p2prl.rollout.worker import reward_mean
from p2prl.swarm.head import BASE_ID, Chain

TERM = 1
_FILE = "weights.safetensors"


def run(spec: RunSpec, breathe: Callable[[int], None]) -> tuple[Run, Trace]:
    """`breathe(num_ticks)` is called often, with the ticks done since; it may raise to stop the run."""
    torch.set_num_threads(1)
    memory = Path("/dev/shm")
    # One file that each version overwrites, and that nobody keeps.
    with tempfile.TemporaryDirectory(prefix="p2prl-staleness-", dir=memory if memory.is_dir() else None) as folder:
        return _Study(spec, Path(folder), breathe).run()


class _Study:
    def __init__(self, spec: RunSpec, folder: Path, breathe: Callable[[int], None]) -> None:
        self._spec, self._breathe, self._file = spec, breathe, folder / _FILE
        self._recipe = recipe_of(spec)
        settings = spec.settings
        plan = laws.schedule(spec.law, spec.age, spec.seed, settings.num_steps, settings.groups_per_step)
        self._due = laws.drawn_at(plan)
        self._sampler = Sampler(self._recipe, folder, spec.seed, lambda: breathe(0))
        self._learner = Learner(Policy.load(self._recipe, folder), self._recipe)
        self._buffer = Buffer(self._recipe, self._sampler)
        self._coming: dict[int, list[Arrival]] = {}
        self._evaluations: list[tuple[int, float]] = []
        self._trace: Trace = {name: [] for name in TRACED}

    def run(self) -> tuple[Run, Trace]:
        settings = self._spec.settings
        self._publish()
        for tick in range(settings.num_steps):
            if tick % settings.eval_every == 0:
                self._evaluations.append((tick, self._sampler.reward(settings.eval_answers)))
            self._draw(tick)
            self._note(self._step(tick))
            self._breathe(1)
        return self._result(self._sampler.reward(settings.final_answers)), self._trace

    def _draw(self, tick: int) -> None:
        wanted = self._due[tick]
        for (later, _), arrival in zip(wanted, self._sampler.draw(tick, wanted), strict=True):
            self._coming.setdefault(later, []).append(arrival)

    def _step(self, tick: int) -> tuple[Step, Part] | None:
        self._buffer.receive(self._coming.pop(tick, []), float(tick))
        step = self._buffer.next_step(self._learner.version, float(tick + 1), self._learner.rho_on)
        if step is None:
            return None
        made = self._learner.train(step)
        self._publish(step)
        return made

    def _publish(self, step: StepInput | None = None) -> None:
        """The policy's weights become a version, and the sampler's."""
        if step is None:
            self._learner.policy.publish(self._file)
        else:
            self._learner.version = Version(TERM, step.parent.step + 1, self._learner.policy.publish(self._file))
            self._buffer.link(step, self._learner.version)
        self._sampler.load(self._file, self._learner.version)

    def _note(self, made: tuple[Step, Part] | None) -> None:
        figures = {} if made is None else made[0].metrics | {"log_ratio_max": made[1].ess.max}
        for name in TRACED:
            value = figures.get(name, math.nan)
            self._trace[name].append(float(f"{value:.5g}") if math.isfinite(value) else None)

    def _result(self, final: float) -> Run:
        spec, best = self._spec, max(final, *(reward for _, reward in self._evaluations))
        return Run(
            objective=spec.objective,
            age=spec.age,
            law=spec.law,
            seed=spec.seed,
            reward_final=final,
            reward_best=best,
            collapsed=final < best / 2,
            num_updates=self._learner.version.step - self._learner.num_skipped,
            num_skipped=self._learner.num_skipped,
            refused=dict(sorted(self._buffer.refused.items())),
            rho_on=self._learner.rho_on,
            evaluations=tuple(self._evaluations),
            settings=spec.settings,
        )


@dataclass
class Learner:
    """The policy, and what a node's learner process does with a step."""

    policy: Policy
    recipe: Recipe
    rho_on: float = 0.0  # measured by the first step, whose groups are fresh in every run
    num_skipped: int = 0
    version: Version = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.policy.version

    def train(self, step: StepInput) -> tuple[Step, Part]:
        part = merge([compute_part(self.policy, collate(step, self.recipe.learner.max_age), self.recipe)])
        made = apply_part(self.policy, part, self.recipe, step.rho_on)
        self.rho_on = made.rho_on
        self.num_skipped += bool(made.skipped)
        return made, part


class Buffer:
    """A node's admission, replay and chain, without its disk."""

    def __init__(self, recipe: Recipe, sampler: Sampler) -> None:
        self._rules = admission.rules_of(
            recipe,
            sampler.tokenizer.hash,
            sampler.tokenizer.stop_ids,
            sampler.num_prompts,
            sampler.engine.vocab_size,
        )
        self._replay = replay.rules_of(recipe)
        base = Version(0, 0, bytes.fromhex(recipe.model.hash))
        self._chain, self._head = Chain(base), BASE_ID
        self._waiting: dict[bytes, tuple[Group, float]] = {}
        self._counters: dict[tuple[str, int], bytes] = {}
        self._known = admission.Knowledge(
            age_of=lambda version: self._chain.age(self._head, version),
            seen=lambda group_id: group_id in self._waiting or group_id in self._chain.trained(self._head),
            group_at=lambda maker, counter: self._counters.get((maker, counter)),
            lottery=lambda maker, version, counter: prompt_index(maker, version, counter, sampler.num_prompts),
        )
        self.refused: Counter[str] = Counter()

    def receive(self, arrivals: Sequence[Arrival], now: float) -> None:
        for arrival in arrivals:
            group = arrival.group
            group_id = codec.content_hash(codec.encode(group))
            reason = admission.examine(group, group_id, group.maker, self._rules, self._known)
            verdict = (
                admission.refusal(group_id, reason)
                if reason
                else admission.conclude(group, group_id, arrival.judgement)
            )
            if verdict.admitted:
                self._waiting[group_id] = group, now
                self._counters[group.maker, group.counter] = group_id
            else:
                self.refused[verdict.reason] += 1

    def next_step(self, parent: Version, now: float, rho_on: float) -> StepInput | None:
        """What replay takes of the groups that wait."""
        entries = [
            replay.Entry(group_id, group.maker, self._youngest(group), admitted_at)
            for group_id, (group, admitted_at) in self._waiting.items()
        ]
        choice = replay.choose(entries, now, self._replay)
        for group_id in choice.dropped:
            del self._waiting[group_id]
            self.refused["too_old"] += 1
        if not choice.batch:
            return None
        groups = tuple(self._waiting.pop(group_id)[0] for group_id in choice.batch)
        ages = tuple(tuple(map(self._age, group.versions)) for group in groups)
        return StepInput(groups, choice.batch, ages, parent, TERM, rho_on)

    def link(self, step: StepInput, version: Version) -> None:
        """The new version joins the chain and is its head."""
        parent = self._chain.link(self._head)
        manifest = Manifest(
            version=version,
            parent=step.parent,
            parent_id=self._head,
            learner=step.groups[0].maker,
            contents=(),
            group_ids=step.group_ids,
            group_rewards=tuple(map(reward_mean, step.groups)),
            group_answers=tuple(len(group.trajectories) for group in step.groups),
            num_groups=parent.num_groups + len(step.groups),
            rho_on=step.rho_on,
            votes=(),
            metrics={},
            published_at=float(version.step),
        )
        self._head = codec.content_hash(codec.encode(manifest))
        self._chain.add(self._head, manifest)

    def _youngest(self, group: Group) -> int | None:
        ages = [age for age in map(self._known.age_of, group.versions) if age is not None]
        return min(ages, default=None)

    def _age(self, version: Version) -> int:
        age = self._known.age_of(version)
        assert age is not None, "only groups of known versions are admitted"
        return age
