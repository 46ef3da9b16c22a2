"""Draws: prompts by lottery, answers by the engine, rewards by the environment, signed groups to the swarm.

In: the head's weights, the environment. Out: groups in the store, announcements.

Invariants: a counter is used once, also over kill -9; a new head is loaded at once, also in mid-answer, but for an
evaluation; a group begins under the version its prompt was drawn for, or its prompt is drawn again; nothing is drawn while
`max_in_flight` of our groups wait for the learner or are in work.
"""

import asyncio
import math
from collections.abc import Sequence

from p2prl import codec
from p2prl.environments.messages import Ready
from p2prl.environments.registry import HELD_OUT_FROM
from p2prl.errors import P2prlError
from p2prl.node.announcements import announce
from p2prl.node.conversations import Conversations
from p2prl.node.engine_keeper import EngineKeeper
from p2prl.node.ports import ChildPort, EnvironmentPort
from p2prl.node.receive_loop import ReceiveLoop
from p2prl.node.state import NodeState
from p2prl.node.supervisor import end_tasks
from p2prl.records import Group, Prompt, Tokens, Version
from p2prl.rollout import messages, worker
from p2prl.rollout.worker import GROUPS_PER_BATCH as GROUPS_PER_BATCH

EVAL_ANSWERS = 4  # to each held-out prompt: their mean has half the sampling noise of one answer
LOAD_TIMEOUT_S = 120.0
SILENCE_S = 45.0  # of an engine at work, which gives a sign of life every few seconds: then it hangs
IDLE_S = 0.2


class RolloutLoop:
    def __init__(
        self,
        state: NodeState,
        environment: EnvironmentPort,
        receive: ReceiveLoop,
        engine: ChildPort,
        threads: int,
        adopted: asyncio.Event,
    ) -> None:
        """`adopted` is set with each new head; only this loop clears it."""
        self._state, self._environment, self._receive = state, environment, receive
        self._engine, self._adopted = engine, adopted
        self._keeper = EngineKeeper(state, engine, threads)
        self._conversations = Conversations(environment, self._request, state.recipe.environment.max_turns)
        self._context: int | None = None  # the engine's
        self._num_answers = 0  # that the engine works on at once; 0: request by request
        self._loading = asyncio.Lock()  # held while the engine's version changes, or must not
        self._follower: asyncio.Task | None = None
        self._engine_name = ""
        self._next_eval_step = 0
        self._drawing: list[asyncio.Task] = []
        self._num_in_work = 0  # groups of `_drawing`
        self._batch_s = math.inf  # what the last batch took the engine
        self._drawn_at = 0.0
        self.waiting = ""  # why nothing is drawn, for the status

    async def run(self) -> None:
        await self._start_engine()
        follower = self._follower = asyncio.create_task(self._follow_head(), name="follow head")
        try:
            while True:
                await self._step()
        except P2prlError as error:
            self._keeper.failed(error)
            raise
        finally:
            await end_tasks([follower, *self._drawing])
            self._drawing, self._num_in_work = [], 0

    async def _step(self) -> None:
        """Begin a batch, or wait a moment where none may be."""
        state = self._state
        size, at_once = worker.in_work(self._num_answers, state.recipe.sampling.group_size, self._batch_s)
        await self._fewer_than(at_once)
        if state.draining or state.disk_full:
            await self._fewer_than(1)
            self.waiting = "draining" if state.draining else "disk_full"
            await asyncio.sleep(IDLE_S)
            return
        await self._load_head()
        await self._evaluate_when_due()
        state.drop_old()
        allowed = worker.allowed(state.num_waiting() + self._num_in_work, state.recipe.learner.max_in_flight)
        if allowed <= 0:
            self.waiting = "" if self._drawing else "waiting_for_learner"
            await (self._fewer_than(len(self._drawing)) if self._drawing else asyncio.sleep(IDLE_S))
            return
        self.waiting = ""
        num_groups = min(allowed, size)
        self._num_in_work += num_groups
        self._drawing.append(asyncio.create_task(self._draw(num_groups), name="draw"))

    async def _fewer_than(self, number: int) -> None:
        """Wait until so few batches are in work; raises what one of them raised."""
        while True:
            ended = [task for task in self._drawing if task.done()]
            self._drawing = [task for task in self._drawing if not task.done()]
            for task, failure in [(task, task.exception()) for task in ended]:  # every failure is read, one is raised
                if failure is not None:
                    raise failure
                self._num_in_work -= task.result()
            if self._follower is not None and self._follower.done():
                self._follower.result()
            if len(self._drawing) < number:
                return
            watched = [*self._drawing, *([self._follower] if self._follower else [])]
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)

    async def _start_engine(self) -> None:
        state = self._state
        state.engine_ready, state.engine_version = False, None
        ready = await self._environment.start() if self._environment.ready is None else self._environment.ready
        started = await self._keeper.start(ready.stop_ids, ready.pad_id)
        self._engine_name, self._num_answers = started.name, started.num_answers
        self._context = started.context
        self._receive.set_vocab_size(started.vocab_size)

    async def _follow_head(self) -> None:
        """Load each new head at once, whatever is in work."""
        while True:
            await self._adopted.wait()
            self._adopted.clear()
            if self._state.engine_version is not None:
                await self._load_head()

    async def _load_head(self) -> None:
        state = self._state
        async with self._loading:
            if state.engine_version == state.head and self._engine.alive:
                return
            head, path = state.head, str(state.head_path)
            with state.reading(head):
                await self._engine.request(lambda number: messages.Load(number, path, head), timeout_s=LOAD_TIMEOUT_S)
            state.engine_version, state.engine_ready = head, True

    async def _generate(
        self, version: Version, prompts: Sequence[Prompt], num_answers: int, seed: int
    ) -> messages.Generated | messages.Outdated:
        """First turns."""
        self._conversations.check_room(prompts, self._state.recipe.longest_answer, self._context)
        return await self._request(version, tuple(prompt.token_ids for prompt in prompts), num_answers, seed)

    async def _request(
        self, version: Version, prompts: tuple[Tokens, ...], num_answers: int, seed: int
    ) -> messages.Generated | messages.Outdated:
        sampling = self._state.recipe.sampling.record()
        return await self._engine.request(
            lambda number: messages.Generate(number, version, prompts, num_answers, sampling, seed), timeout_s=SILENCE_S
        )

    async def _draw(self, num_groups: int) -> int:
        """One batch from its prompts to its announcement; gives `num_groups` back."""
        state, ready = self._state, self._environment.ready
        assert ready is not None
        counters: Sequence[int] = state.store.next_counters(num_groups)
        version = state.engine_version
        while counters:  # again for those that were not begun before another version was loaded
            assert version is not None
            draws = worker.next_batch(state.me, version, counters, ready.num_prompts)
            prompts = await self._environment.prompts([draw.prompt_index for draw in draws])
            started = state.now()
            seed = worker.call_seed(state.boot_id, counters[0])
            drawn = await self._generate(version, prompts, state.recipe.sampling.group_size, seed)
            if isinstance(drawn, messages.Outdated):
                version = drawn.version
                continue
            begun = [part for part in zip(draws, prompts, drawn.completions, strict=True) if part[2]]
            if begun:
                whole, drawn = await self._conversations.go_on(begun, drawn, seed)
                if whole:
                    await self._finish(whole, drawn, started)
            made = {draw.counter for draw, _, _ in begun}
            counters = [counter for counter in counters if counter not in made]
            version = state.engine_version
        return num_groups

    async def _finish(self, begun: Sequence[worker.Begun], drawn: messages.Generated, started: float) -> None:
        """Judge, seal and announce what a request gave."""
        state, ready = self._state, self._environment.ready
        assert ready is not None
        elapsed_s = max(state.now() - max(started, self._drawn_at), 1e-6)  # without the wait for the batch before
        self._batch_s, self._drawn_at = drawn.wall_s, state.now()
        state.counts.tokens += drawn.num_tokens
        items = tuple(worker.judge_item(prompt, answers) for _, prompt, answers in begun)
        judgements = await self._environment.judge_items(items)
        origin, made_at = self._origin(ready), state.clock.unix()
        both = list(zip(begun, judgements, strict=True))
        for judgement in judgements:
            if judgement.refused:  # too slow, or not as it says: receivers would come to the same
                state.emit("log", level="warning", event="a group was left out", why=judgement.details[0])
        groups = [
            worker.make_group(origin, draw, prompt, answers, drawn.versions, judgement, made_at)
            for (draw, prompt, answers), judgement in both
            if not judgement.refused
        ]
        state.measures.drawn(groups, elapsed_s, made_at)
        if groups:
            await self._publish(groups)

    def _origin(self, ready: Ready) -> worker.Origin:
        state = self._state
        return worker.Origin(
            maker=state.me,
            environment=state.recipe.environment.name,
            environment_version=ready.environment_version,
            tokenizer_hash=ready.tokenizer_hash,
            sampling=state.recipe.sampling.record(),
            engine=self._engine_name,
        )

    async def _publish(self, groups: Sequence[Group]) -> None:
        state = self._state
        headers = []
        for group in groups:
            sealed = codec.seal(group, state.identity, state.swarm)
            if len(sealed) > codec.limit_of(Group):  # nobody would take it, and it would count against us
                why = f"it has {len(sealed)} bytes; run a recipe with smaller groups or shorter answers"
                state.emit("log", level="warning", event="a group was left out", why=why)
                continue
            group_id = codec.sealed_id(sealed)
            header = worker.header(group, group_id, len(sealed))
            state.store.save_group(group, group_id, sealed, own=True, now=state.clock.unix())
            state.wanted.own(state.me, header, state.now())
            state.counts.groups += 1
            state.counts.answers += len(group.trajectories)
            headers.append(header)
            if state.stands_by():
                self._receive.offer_own(sealed)
        if not headers:
            return
        state.emit("rollout", groups=len(headers), reward=sum(h.reward_mean for h in headers) / len(headers))
        await announce(state, headers)

    async def _evaluate_when_due(self) -> None:
        """The leader's engine answers the held-out prompts each `eval.every` versions."""
        state, rule = self._state, self._state.recipe.eval
        version = state.engine_version
        if not state.leads or rule.prompts == 0 or version is None or version.step < self._next_eval_step:
            return
        self._next_eval_step = (version.step // rule.every + 1) * rule.every
        try:
            prompts = await self._environment.prompts(range(HELD_OUT_FROM, HELD_OUT_FROM + rule.prompts))
            async with self._loading:  # all of it under one version
                drawn = await self._generate(version, prompts, EVAL_ANSWERS, seed=0)
                if isinstance(drawn, messages.Outdated):
                    self._next_eval_step = version.step  # a new head came just before: soon again
                    return
                draws = [worker.Draw(0, prompt.index) for prompt in prompts]
                begun = list(zip(draws, prompts, drawn.completions, strict=True))
                whole, _ = await self._conversations.go_on(begun, drawn, seed=0)
            items = tuple(worker.judge_item(prompt, answers) for _, prompt, answers in whole)
            judged = await self._environment.judge_items(items)
        except P2prlError as error:
            state.emit("log", level="warning", event="evaluation failed", why=str(error)[:200])
            return
        state.eval_reward, state.eval_error = worker.mean_and_error([judgement.rewards for judgement in judged])
        state.eval_step = version.step
        state.emit(
            "log",
            level="info",
            event="evaluated",
            version=str(version),
            reward=round(state.eval_reward, 4),
            standard_error=round(state.eval_error, 4),
        )
