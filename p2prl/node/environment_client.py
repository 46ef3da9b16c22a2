"""The daemon's side of the environment process: prompts and judgements by request.

In: indices, groups. Out: prompts, judgements. A hung or dead child is started again by the next request.

A group whose judging ends the child is asked again answer by answer, so that only the deadly answers are worth 0; after
two of them the others of that group are not judged. Whoever made the group came to the same. What an answer was given
that ends the child, or isn't judged, can't be compared with what the environment says: then the group is refused.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import IO, Any

import msgspec

from p2prl.environments.judge import MAX_DETAIL_CHARACTERS, MAX_SLOW_ANSWERS, group_s, too_slow
from p2prl.environments.messages import (
    JudgeItem,
    Judgement,
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
        # It may still be at the group of somebody who was cancelled.
        self._patience_s = TIMEOUT_S + group_s(recipe.sampling.group_size)
        stop = msgspec.json.encode(recipe.sampling.stop).decode()
        args = (recipe.model.source, str(home.models), msgspec.json.encode(spec).decode(), stop)
        environ = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        module = "p2prl.node.environment_process"
        self._child = Child(module, args, Reply, environ=environ, stderr=stderr)
        self.ready: Ready | None = None
        self._stopped = False
        self._turn = asyncio.Lock()

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
            try:
                found += await self._prompts(some)
            except ChildDied as error:  # maybe of the work that was in it before, or killed for memory
                if self._stopped:
                    raise
                self._child.on_death(str(error))
                found += await self._prompts(some)
        return tuple(found)

    async def _prompts(self, indices: tuple[int, ...]) -> tuple[Prompt, ...]:
        reply: PromptsReply = await self._request(lambda number: PromptsRequest(number, indices), self._patience_s)
        return reply.prompts

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
        reply: TurnsReply = await self._request(lambda number: TurnsRequest(number, items), self._patience_s)
        return reply.items

    async def _turn_alone(self, item: TurnItem) -> tuple[int, ...]:
        try:
            return (await self._turns((item,)))[0]
        except ChildDied:
            if self._stopped:
                raise
            return ()

    async def texts(self, parts: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
        """Of an answer's parts, drawn, given, drawn, ...: what rewards see of those drawn, all of those given."""
        reply: TextsReply = await self._request(lambda number: TextsRequest(number, tuple(parts)), self._patience_s)
        return reply.texts

    async def judge(self, groups: Sequence[Group]) -> tuple[Judgement, ...]:
        return await self.judge_items(tuple(map(judge_group, groups)))

    async def judge_items(self, items: tuple[JudgeItem, ...]) -> tuple[Judgement, ...]:
        """One each. Raises ChildDied when the child can't be started, or dies of a prompt."""
        return tuple([await self._judged(item) for item in items])  # in between, others' requests have their turn

    async def _judged(self, item: JudgeItem) -> Judgement:
        try:
            return (await self._ask(item))[0]
        except ChildDied as error:
            if self._stopped:
                raise
            self._child.on_death(str(error))  # it is asked again here, so nobody else would hear of it
            return await self._one_by_one(item)

    async def _ask(self, item: JudgeItem) -> tuple[Judgement, float]:
        """And how long the child took, without waiting for it or starting it."""
        deadline_s = self._patience_s + group_s(len(item.answers))
        reply, seconds = await self._timed(lambda number: JudgeRequest(number, (item,)), deadline_s)
        return reply.items[0], seconds

    async def _one_by_one(self, item: JudgeItem) -> Judgement:
        """Each answer alone, so that what ended the child is found."""
        prompt, _ = await self._ask(JudgeItem(item.index, item.prompt_ids, ()))  # a deadly prompt raises here
        count = len(item.answers)
        if not prompt.prompt_ok:
            return Judgement(False, (0.0,) * count, ("the prompt has other tokens",) * count)
        judged: list[Judgement] = []
        num_deadly, left_s = 0, group_s(count)
        for place in range(count):
            alone = _only(item, place)
            if num_deadly == MAX_SLOW_ANSWERS:
                why = f"not judged: {num_deadly} answers of this group ended the environment process"
                found = _unjudged(alone, why)
            elif left_s <= 0:
                return too_slow(count)
            else:
                try:
                    found, seconds = await self._ask(alone)
                    left_s -= seconds
                except ChildDied as error:
                    if self._stopped:
                        raise
                    num_deadly += 1
                    found = _unjudged(alone, f"judging it ended the environment process: {error}")
            if found.refused:  # no matter what the others are worth
                return _of_group(found, place, count)
            judged.append(found)
        return Judgement(True, tuple(each.rewards[0] for each in judged), tuple(each.details[0] for each in judged))

    async def stop(self) -> None:
        self._stopped = True
        await self._child.stop()

    async def _request(self, make: Callable[[int], object], timeout_s: float) -> Any:
        return (await self._timed(make, timeout_s))[0]

    async def _timed(self, make: Callable[[int], object], timeout_s: float) -> tuple[Any, float]:
        """One at a time: what ends the child is then what it was asked, and no other's. Dead, it is started again."""
        async with self._turn:
            if self._stopped:
                raise ChildDied("the environment process was stopped")
            if not self._child.alive:
                await self.start()
            began = asyncio.get_running_loop().time()
            reply = await self._child.request(make, timeout_s=timeout_s)
            return reply, asyncio.get_running_loop().time() - began


def _only(item: JudgeItem, place: int) -> JudgeItem:
    finish, runs = item.finishes[place : place + 1], item.runs[place : place + 1]
    return JudgeItem(item.index, item.prompt_ids, item.answers[place : place + 1], finish, runs)


def _unjudged(alone: JudgeItem, why: str) -> Judgement:
    """Of an answer that nothing is known of: worth 0, and refused where it was given what can't be compared."""
    was_given = any(len(runs) > 1 for runs in alone.runs)
    detail = f"answer 0: what it was given can't be compared: {why}" if was_given else why
    return Judgement(True, (0.0,), (detail[:MAX_DETAIL_CHARACTERS],), bad_turns=0 if was_given else -1)


def _of_group(alone: Judgement, place: int, count: int) -> Judgement:
    """A group's, one answer of which is refused."""
    return msgspec.structs.replace(
        alone,
        rewards=(0.0,) * count,
        details=(alone.details[0].replace("answer 0:", f"answer {place}:", 1),) * count,
        bad_finish=place if alone.bad_finish >= 0 else -1,
        bad_turns=place if alone.bad_turns >= 0 else -1,
    )
