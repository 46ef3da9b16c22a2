"""The samplers of a staleness run: what they draw under each version, and when it comes.

In: weights as a version's file, which groups of the schedule are to be drawn under them. Out: `records.Group`s, made and
judged by the node's own code; rewards on held-out prompts.

Groups are drawn while their version is the newest and held until the tick that trains on them: the same data as from
a sampler that lags, without keeping old weights. They come from one maker, whose counter follows from tick and slot.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch
from blake3 import blake3

from p2prl.environments.judge import Judge
from p2prl.environments.messages import Judgement
from p2prl.environments.registry import HELD_OUT_FROM, Environment
from p2prl.environments.spec import open_environment, spec_of
from p2prl.identity import Identity
from p2prl.models.char_tokenizer import CharTokenizer
from p2prl.models.load import load_module
from p2prl.models.stop_strings import StopStrings
from p2prl.recipe import Recipe, data_folders
from p2prl.records import Group, Version
from p2prl.rollout.transformers_engine import TransformersEngine
from p2prl.rollout.worker import Draw, Origin, judge_item, make_group, next_batch

T = TypeVar("T")
CHUNK_GROUPS = 256  # in one call to the engine: a word to the parent between two
ANSWERS_PER_PROMPT = 4  # in an evaluation: many prompts tell more than many answers
_EVAL_SEED = 2026


class Arrival:
    """A group on its way: `judgement` is what a receiver finds too, rewards being deterministic."""

    __slots__ = ("group", "judgement")

    def __init__(self, group: Group, judgement: Judgement) -> None:
        self.group, self.judgement = group, judgement


class Sampler:
    """One maker with its engine and its environment."""

    def __init__(self, recipe: Recipe, cache: Path, seed: int, breathe: Callable[[], None]) -> None:
        self._recipe, self._seed, self._breathe = recipe, seed, breathe
        self.tokenizer = CharTokenizer()
        module = load_module(recipe.model.source, cache, torch.float32)
        stops = StopStrings(recipe.sampling.stop, self.tokenizer.decode, self.tokenizer.stop_ids)
        self.engine = TransformersEngine(module, self.tokenizer.stop_ids, self.tokenizer.pad_id, stops=stops)
        environment = open_environment(spec_of(recipe.environment, data_folders()))
        self.num_prompts = environment.num_prompts
        self._judge = Judge(_Remembering(environment), self.tokenizer, _unlimited, stops)
        key = Identity.from_seed(blake3(b"p2prl staleness maker %d" % seed).digest())
        self.origin = Origin(
            maker=key.peer_id,
            environment=recipe.environment.name,
            environment_version=environment.version,
            tokenizer_hash=self.tokenizer.hash,
            sampling=recipe.sampling.record(),
            engine=self.engine.name,
        )

    def load(self, weights: Path, version: Version) -> None:
        self.engine.load(weights, version)

    def draw(self, tick: int, wanted: Sequence[tuple[int, int]]) -> list[Arrival]:
        """The groups of these (tick, slot) of the schedule, under the weights of `tick`."""
        counters = [self.counter(*place) for place in wanted]
        arrivals: list[Arrival] = []
        for first in range(0, len(counters), CHUNK_GROUPS):
            self._breathe()
            arrivals += self._draw(self._call_seed(tick, first), counters[first : first + CHUNK_GROUPS])
        return arrivals

    def counter(self, tick: int, slot: int) -> int:
        return tick * self._recipe.learner.groups_per_step + slot

    def reward(self, num_answers: int) -> float:
        """Mean over sampled answers to the first held-out prompts; the same prompts and seed each time."""
        indices = [HELD_OUT_FROM + number for number in range(-(-num_answers // ANSWERS_PER_PROMPT))]
        prompts = [self._judge.prompt(index) for index in indices]
        ids = [prompt.token_ids for prompt in prompts]
        answers = self.engine.generate(ids, ANSWERS_PER_PROMPT, self.origin.sampling, _EVAL_SEED).completions
        rewards = [
            self._judge.reward(index, completion.token_ids)[0]
            for index, completions in zip(indices, answers, strict=True)
            for completion in completions
        ][:num_answers]
        return sum(rewards) / len(rewards)

    def _draw(self, seed: int, counters: Sequence[int]) -> list[Arrival]:
        version = self.engine.version
        assert version is not None, "load comes before draw"
        draws: tuple[Draw, ...] = next_batch(self.origin.maker, version, counters, self.num_prompts)
        prompts = [self._judge.prompt(draw.prompt_index) for draw in draws]
        ids = [prompt.token_ids for prompt in prompts]
        drawn = self.engine.generate(ids, self._recipe.sampling.group_size, self.origin.sampling, seed)
        arrivals = []
        for draw, prompt, completions in zip(draws, prompts, drawn.completions, strict=True):
            judgement = self._judge.check(judge_item(prompt, completions))
            group = make_group(self.origin, draw, prompt, completions, drawn.versions, judgement, float(draw.counter))
            arrivals.append(Arrival(group, judgement))
        return arrivals

    def _call_seed(self, tick: int, first: int) -> int:
        digest = blake3(b"p2prl staleness draw %d %d %d" % (self._seed, tick, first)).digest(length=8)
        return int.from_bytes(digest, "little") % 2**63


class _Remembering:
    """Implements `registry.Environment`: rewards are deterministic, and most answers to a prompt are the same."""

    def __init__(self, environment: Environment) -> None:
        self.name, self.version, self.num_prompts = environment.name, environment.version, environment.num_prompts
        self.prompt = lru_cache(maxsize=2048)(environment.prompt)
        self.reward = lru_cache(maxsize=16384)(environment.reward)


def _unlimited(work: Callable[[], T]) -> T:
    """The built-in environment is ours: it neither hangs nor raises."""
    return work()
