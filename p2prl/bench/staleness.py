"""The staleness study: which runs it has, what one is told, what one says. No torch.

In: names of objectives, ages, seeds, a law. Out: `RunSpec`s with a key each; the records that parent and worker exchange.

An objective is named as in the registry, with choices of the recipe behind colons: `gepo_vcpo:mean:weights` (baseline;
what sizes the step: `ess` of the raw ratios, of the `weights` used, or `none`), `gepo:unclipped`, and any other key of
the recipe's section, or option of the objective, with its value: `grpo:clip=0.3`, `tis:cap=4.0`.
Without a word on it, `vcpo` and `gepo_vcpo` size their step by `ess` and the others don't, as their papers have it.

Invariant: a run's key changes with anything that may change its result: settings, seed, model, versions of the software.
"""

import itertools
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import msgspec
from blake3 import blake3
from pydantic import ValidationError

from p2prl import __version__
from p2prl.bench.laws import LAWS
from p2prl.errors import ConfigError
from p2prl.recipe import ObjectiveSection, Recipe, explain, find

BASE_RECIPE = "addition"
NO_MAX_AGE = 100_000
FULL_OBJECTIVES = (
    "gepo_vcpo",
    "gepo_vcpo:weights",
    "gepo_vcpo:min_variance:baseline_over=all",
    "gepo_vcpo:min_variance:baseline_over=all:weights",
    "gepo",
    "vcpo",
    "a3po",
    "grpo",
    "tis",
)
QUICK_OBJECTIVES = ("gepo_vcpo", "gepo", "grpo", "tis")
FULL_AGES, QUICK_AGES = (0, 8, 16, 32, 64, 128, 256), (0, 32)
FULL_SEEDS, QUICK_SEEDS = 5, 2
FULL_STEPS, QUICK_STEPS = 300, 250

_STEP_SIZES = {"ess": "sequence", "weights": "weights", "none": "none"}
_BASELINES = ("mean", "min_variance")
_SIZES_ITS_STEP = ("vcpo", "gepo_vcpo")
_NEEDS_PROX = ("decoupled_ppo", "m2po")


class Settings(msgspec.Struct, frozen=True):
    """What all runs of a study share. Rewards are of sampled answers to the first held-out prompts."""

    num_steps: int = FULL_STEPS
    groups_per_step: int = 32
    learning_rate: float = 3e-4
    max_age: int = NO_MAX_AGE
    eval_every: int = 25
    eval_answers: int = 512
    final_answers: int = 2048


class RunSpec(msgspec.Struct, frozen=True):
    """One run: everything that its result follows from."""

    objective: str
    law: str
    age: int
    seed: int
    settings: Settings = Settings()

    @property
    def name(self) -> str:
        """For its files: readable, and another one for other settings."""
        readable = self.objective.replace(":", "-").replace("=", "")
        return f"{readable}_{self.law}_age{self.age}_seed{self.seed}_{self.key()[:8]}"

    def key(self) -> str:
        recipe = recipe_of(self)
        about = {
            "spec": msgspec.to_builtins(self),
            "recipe": recipe.swarm_id.hex(),
            "software": [__version__, *(version(package) for package in ("torch", "transformers"))],
        }
        return blake3(msgspec.msgpack.Encoder(order="sorted").encode(about)).hexdigest()


class Run(msgspec.Struct, frozen=True):
    """What a run found. `reward_best`: the most of its evaluations, the one of its start and the final one included.

    `refused`: groups by admission's reason. `num_updates`: optimiser steps made, of `settings.num_steps` ticks.
    `evaluations`: (tick, reward) of `settings.eval_answers` answers each.
    """

    objective: str
    age: int
    law: str
    seed: int
    reward_final: float
    reward_best: float
    collapsed: bool
    num_updates: int
    num_skipped: int
    refused: dict[str, int]
    rho_on: float
    evaluations: tuple[tuple[int, float], ...]
    settings: Settings


# What each tick leaves in the trace; nan where no step was made.
TRACED = (
    "reward_mean",
    "age_mean",
    "ess_ratio",
    "ess_ratio_weights",
    "grad_norm",
    "kl",
    "lr_multiplier",
    "log_ratio_max",
    "weight_top_share",
    "skipped",
)
Trace = dict[str, list[float | None]]  # by name, a number a tick


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message to a worker: one spec of each objective, to be refused now rather than in an hour."""

    specs: tuple[RunSpec, ...]


class Job(msgspec.Struct, frozen=True, tag=True):
    spec: RunSpec


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The worker is loaded, and knows the objectives."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    num_ticks: int


class Done(msgspec.Struct, frozen=True, tag=True):
    run: Run
    trace: Trace
    wall_s: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    message: str


Request = Setup | Job
Reply = Ready | Progress | Done | Failed


def plan(
    objectives: Sequence[str], ages: Sequence[int], num_seeds: int, law: str, settings: Settings
) -> tuple[RunSpec, ...]:
    """Seed by seed, so that a study that is stopped early has compared all it has. ConfigError names what is wrong."""
    if not objectives or not ages or num_seeds < 1:
        raise ConfigError("a study needs at least one objective, one age and one seed")
    if law not in LAWS:
        raise ConfigError(f"there is no delay law {law!r}; there are: {', '.join(LAWS)}")
    if any(age < 0 for age in ages):
        raise ConfigError(f"ages are numbers of versions from 0 up, not {min(ages)}")
    specs = tuple(
        RunSpec(objective, law, age, seed, settings)
        for seed, age, objective in itertools.product(
            range(num_seeds), sorted(set(ages)), dict.fromkeys(objectives)
        )
    )  # fmt: skip
    for spec in specs[: len(set(objectives))]:
        recipe_of(spec)
    return specs


def recipe_of(spec: RunSpec) -> Recipe:
    """The recipe that a node would train by: that of the demo, with the run's objective and bounds."""
    settings = spec.settings
    learner = {
        "groups_per_step": settings.groups_per_step,
        "learning_rate": settings.learning_rate,
        "max_age": settings.max_age,
        "longest_wait_s": 1.0,  # one tick: a step is made with what has come
    }
    base = find(BASE_RECIPE)[0].model_dump(mode="json", by_alias=True)
    changed = {"objective": objective_section(spec.objective), "learner": base["learner"] | learner}
    try:
        return Recipe.model_validate(base | changed)
    except ValidationError as error:
        raise ConfigError(f"no recipe can be made for {spec.objective}: {explain(error, Recipe)}") from None


def objective_section(text: str) -> dict[str, Any]:
    """The recipe's section for `name:choice:...`; whether there is such an objective is for the registry to say."""
    name, *choices = text.split(":")
    section: dict[str, Any] = {
        "name": name,
        "baseline": "mean",
        "step_size": "sequence" if name in _SIZES_ITS_STEP else "none",
        "step_power": 0.5 if name == "vcpo" else 1.0,  # its authors' rule, and the default of a recipe
        "prox": "recompute" if name in _NEEDS_PROX else "none",
    }
    for choice in choices:
        if choice in _STEP_SIZES:
            section["step_size"] = _STEP_SIZES[choice]
        elif choice in _BASELINES:
            section["baseline"] = choice
        elif choice == "unclipped":
            section["clip"] = None
        elif "=" in choice:
            key, _, value = choice.partition("=")
            if key in ObjectiveSection.model_fields:
                section[key] = _value(value)
            else:
                section.setdefault("options", {})[key] = _value(value)
        else:
            known = (*_STEP_SIZES, *_BASELINES, "unclipped", "KEY=VALUE")
            raise ConfigError(f"{text!r} has the choice {choice!r}; known are: {', '.join(known)}")
    return section


def _value(text: str) -> Any:
    """As TOML has it; a bare word is a text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
