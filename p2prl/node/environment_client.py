"""The daemon's side of the environment process: prompts and judgements by request.

In: indices, groups. Out: prompts, judgements. A hung or dead child is started again by the next request.

A group whose judging ends the child is asked again answer by answer, so that only the deadly answers are worth 0; after
two of them the others of that group are not judged. Whoever made the group came to the same.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import IO

import msgspec

from p2prl.environments.judge import MAX_DETAIL_CHARACTERS, MAX_SLOW_ANSWERS
from p2prl.environments.messages import (
    JudgeItem,
    Judgement,
    JudgeReply,
    JudgeRequest,
    PromptsReply,
    PromptsRequest,
    Ready,
    Reply,
    TextsReply,
    TextsRequest,
    TurnItem,
    TurnsReply,
    TurnsRequest,
)
from p2prl.environments.rewarder import Limits
from p2prl.environments.spec import spec_of
from p2prl.node.children import Child, ChildDied
from p2prl.paths import Home
from p2prl.recipe import Recipe, data_folders
from p2prl.records import Group, Prompt
from p2prl.rollout.worker import judge_group

TIMEOUT_S = 60.0
PROMPTS_AT_ONCE = 8
TURNS_AT_ONCE = 8


class EnvironmentClient:
    def __init__(self, recipe: Recipe, home: Home, stderr: IO[bytes] | None = None) -> None:
        spec = spec_of(recipe.environment, data_folders((home.datasets,)))
        self._num_turns = spec.rules.max_turns
        # The child does one thing at a time: whoever asks it may have to wait for somebody else's group.
        self._patience_s = TIMEOUT_S + self._judging_s(recipe.sampling.group_size)
        stop = msgspec.json.encode(recipe.sampling.stop).decode()
        args = (recipe.model.source, str(home.models), msgspec.json.encode(spec).decode(), stop)
        environ = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        module = "p2prl.node.environment_process"
        self._child = Child(module, args, Reply, environ=environ, stderr=stderr)
        self.ready: Ready | None = None
        self._stopped = False
        self._starting = asyncio.Lock()

    def on_death(self, handler: Callable[[str], None]) -> None:
        """`handler(why)` hears of a death that no request of ours ran into."""
        self._child.on_death = handler

    async def start(self) -> Ready:
        self._stopped = False
        self.ready = await self._child.start(None)
        assert isinstance(self.ready, Ready)
        return self.ready

    async def prompts(self, indices: Sequence[int]) -> tuple[Prompt, ...]:
        found: list[Prompt] = []
        for first in range(0, len(indices), PROMPTS_AT_ONCE):  # each request has the whole deadline
            some = tuple(indices[first : first + PROMPTS_AT_ONCE])
            await self._alive()
            reply: PromptsReply = await self._child.request(
                lambda number, some=some: PromptsRequest(number, some), timeout_s=self._patience_s
            )
            found += reply.prompts
        return tuple(found)

    async def turns(self, items: Sequence[TurnItem]) -> tuple[tuple[int, ...], ...]:
        """What each answer is given before its next turn; () where it is over, as it is where asking ends the child:
        to judge that answer ends it too, here and everywhere."""
        found: list[tuple[int, ...]] = []
        for first in range(0, len(items), TURNS_AT_ONCE):
            some = tuple(items[first : first + TURNS_AT_ONCE])
            try:
                found += await self._turns(some)
            except ChildDied as error:
                if self._stopped:
                    raise
                self._child.on_death(str(error))
                found += [await self._turn_alone(item) for item in some]
        return tuple(found)

    async def _turns(self, items: tuple[TurnItem, ...]) -> tuple[tuple[int, ...], ...]:
        await self._alive()
        reply: TurnsReply = await self._child.request(
            lambda number: TurnsRequest(number, items), timeout_s=self._patience_s
        )
        return reply.items

    async def _turn_alone(self, item: TurnItem) -> tuple[int, ...]:
        try:
            return (await self._turns((item,)))[0]
        except ChildDied:
            if self._stopped:
                raise
            return ()

    async def texts(self, answers: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
        """What rewards see of each, to be shown."""
        await self._alive()
        reply: TextsReply = await self._child.request(
            lambda number: TextsRequest(number, tuple(answers)), timeout_s=self._patience_s
        )
        return reply.texts

    async def judge(self, groups: Sequence[Group]) -> tuple[Judgement, ...]:
        return await self.judge_items(tuple(map(judge_group, groups)))

    async def judge_items(self, items: tuple[JudgeItem, ...]) -> tuple[Judgement, ...]:
        """One each. Raises ChildDied when the child can't be started, or dies of a prompt."""
        return tuple([await self._judged(item) for item in items])  # in between, others' requests have their turn

    async def _judged(self, item: JudgeItem) -> Judgement:
        try:
            return await self._ask(item)
        except ChildDied as error:
            if self._stopped:
                raise
            self._child.on_death(str(error))  # it is asked again here, so nobody else would hear of it
            return await self._one_by_one(item)

    async def _ask(self, item: JudgeItem) -> Judgement:
        await self._alive()
        deadline_s = self._patience_s + self._judging_s(len(item.answers))
        reply: JudgeReply = await self._child.request(
            lambda number: JudgeRequest(number, (item,)), timeout_s=deadline_s
        )
        return reply.items[0]

    def _judging_s(self, num_answers: int) -> float:
        """Of a group, at most; it may have two slow answers and a slow prompt."""
        call_s = Limits().call_s
        return self._num_turns * max(TIMEOUT_S, num_answers * call_s) + (MAX_SLOW_ANSWERS + 1) * call_s

    async def _one_by_one(self, item: JudgeItem) -> Judgement:
        """Each answer alone, so that what ended the child is found."""
        prompt = await self._ask(JudgeItem(item.index, item.prompt_ids, ()))  # a deadly prompt raises here
        if not prompt.prompt_ok:
            count = len(item.answers)
            return Judgement(False, (0.0,) * count, ("the prompt has other tokens",) * count)
        judged: list[tuple[float, str]] = []
        num_deadly = 0
        for place, answer in enumerate(item.answers):
            if num_deadly == MAX_SLOW_ANSWERS:
                judged.append((0.0, f"not judged: {num_deadly} answers of this group ended the environment process"))
                continue
            try:
                finish, runs = item.finishes[place : place + 1], item.runs[place : place + 1]
                alone = await self._ask(JudgeItem(item.index, item.prompt_ids, (answer,), finish, runs))
                if alone.bad_finish >= 0 or alone.bad_turns >= 0:  # no matter what the others are worth
                    count, why = len(item.answers), alone.details[0].replace("answer 0:", f"answer {place}:", 1)
                    return msgspec.structs.replace(
                        alone,
                        rewards=(0.0,) * count,
                        details=(why,) * count,
                        bad_finish=place if alone.bad_finish >= 0 else -1,
                        bad_turns=place if alone.bad_turns >= 0 else -1,
                    )
                judged.append((alone.rewards[0], alone.details[0]))
            except ChildDied as error:
                if self._stopped:
                    raise
                num_deadly += 1
                why = f"judging it ended the environment process: {error}"
                judged.append((0.0, why[:MAX_DETAIL_CHARACTERS]))
        rewards, details = tuple(reward for reward, _ in judged), tuple(detail for _, detail in judged)
        return Judgement(True, rewards, details)

    async def stop(self) -> None:
        self._stopped = True
        await self._child.stop()

    async def _alive(self) -> None:
        """Two requests that find it dead start one child: a second start would end the first."""
        async with self._starting:
            if not self._child.alive:
                await self.start()
