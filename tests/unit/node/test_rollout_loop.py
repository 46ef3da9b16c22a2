"""How many batches are in work: two of short ones, one of long ones; a new head is loaded at once, also beside them."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from p2prl import codec
from p2prl.buffer.store import Store
from p2prl.clock import LoopClock
from p2prl.config import NodeConfig
from p2prl.events import Ring
from p2prl.identity import Identity
from p2prl.node.children import ChildDied
from p2prl.node.rollout_loop import GROUPS_PER_BATCH, RolloutLoop
from p2prl.node.state import NodeState
from p2prl.paths import Home
from p2prl.recipe import find
from p2prl.records import Group, Version
from p2prl.rollout import messages
from p2prl.rollout.lottery import prompt_index
from p2prl.rollout.scripted_engine import ScriptedEngine, stamped
from p2prl.simulate.scenarios import Pace
from p2prl.simulate.scripted_ports import ScriptedEnvironment
from p2prl.swarm import election
from p2prl.swarm.head import Chain
from p2prl.swarm.membership import Membership
from p2prl.swarm.memory_transport import MemoryNetwork
from p2prl.swarm.metered_transport import MeteredTransport

PATIENCE_S = 10.0


class HeldEngine:
    """An engine port that answers each batch when the test lets it; `batch_s` is what it says that one took."""

    alive = True

    def __init__(self, batch_s: float) -> None:
        self._engine, self._batch_s = ScriptedEngine(), batch_s
        self.queue: list[asyncio.Future[None]] = []
        self.requests: list[messages.Generate] = []
        self.refuse = False  # the next one, as if another version came while it waited
        self.lose_first = False  # the next one's first prompt was not begun
        self.loads: list[int] = []  # batches in work at each change of version
        self.changed = asyncio.Condition()
        self.adopted = asyncio.Event()

    async def start(self, setup: object, *, timeout_s: float = 0.0) -> messages.Ready:
        return messages.Ready("scripted")

    async def request(self, make, *, timeout_s: float):
        request = make(0)
        if isinstance(request, messages.Load):
            self._engine.load(Path(request.path), request.version)
            await self._say(lambda: self.loads.append(len(self.queue)))
            return messages.Loaded(0, request.version)
        loaded = self._engine.version
        assert loaded is not None
        if self.refuse or loaded != request.version:
            self.refuse = False
            return messages.Outdated(0, loaded)
        drawn = self._engine.generate(request.prompts, request.num_answers, request.sampling, request.seed).completions
        held = asyncio.get_running_loop().create_future()
        self.requests.append(request)
        await self._say(lambda: self.queue.append(held))
        await held
        if self.lose_first:
            self.lose_first, drawn[0] = False, []
        completions, versions = stamped(drawn, loaded, self._engine.version or loaded)
        return messages.Generated(0, tuple(map(tuple, completions)), versions, 1, self._batch_s)

    async def stop(self) -> None:
        return None

    def load(self, version: Version) -> None:
        """As a request would, but unseen."""
        self._engine.load(Path(), version)

    async def _say(self, change) -> None:
        async with self.changed:
            change()
            self.changed.notify_all()

    async def until(self, condition) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(condition)

    async def answer(self) -> None:
        """The oldest batch is done."""
        await self._say(lambda: self.queue.pop(0).set_result(None))


class NoLearner:
    """Of the receive loop only what the rollout loop tells it."""

    def set_vocab_size(self, size: int | None) -> None:
        return None

    def offer_own(self, sealed: bytes) -> None:
        return None


async def make_loop(tmp_path: Path, engine: HeldEngine, max_in_flight: int) -> tuple[RolloutLoop, NodeState]:
    recipe, _ = find("addition")
    learner = recipe.learner.model_copy(update={"max_in_flight": max_in_flight})
    recipe = recipe.model_copy(update={"learner": learner})
    home = Home.locate(tmp_path)
    home.create()
    identity = Identity.create(home.identity)
    base, clock = Version(0, 0, bytes.fromhex(recipe.model.hash)), LoopClock()
    transport = MeteredTransport(MemoryNetwork(0).transport(identity.peer_id), clock)
    await transport.start()
    state = NodeState(
        home=home, config=NodeConfig(), recipe=recipe, identity=identity, boot_id=bytes(8), clock=clock,
        transport=transport, store=Store.open(home.database, clock.unix()), events=Ring(100), base=base,
        base_path=tmp_path / "base", chain=Chain(base), membership=Membership(identity.peer_id, bytes(8)),
        election=election.ElectionState(identity.peer_id, recipe.swarm_id), name="one", started_at=clock.unix(),
    )  # fmt: skip
    environment = ScriptedEnvironment(Pace(judge_s=0.0))
    return RolloutLoop(state, environment, NoLearner(), engine, 1, engine.adopted), state  # pyright: ignore[reportArgumentType]


async def _end(running: asyncio.Task, state: NodeState) -> None:
    running.cancel()
    await asyncio.wait([running])
    await state.transport.stop()
    state.store.close()


async def _until(condition) -> None:
    """What the loop says of itself is no event: look."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  there is no event to await
            await asyncio.sleep(0.01)


async def _first_batch(engine: HeldEngine) -> None:
    """It goes alone: how long one takes is not known yet."""
    await engine.until(lambda: len(engine.queue) == 1)
    await asyncio.sleep(0.05)
    assert len(engine.queue) == 1
    await engine.answer()


async def test_short_batches_overlap_and_never_more_groups_wait_than_may(tmp_path: Path) -> None:
    engine = HeldEngine(batch_s=0.005)
    loop, state = await make_loop(tmp_path, engine, max_in_flight=4 * GROUPS_PER_BATCH)
    running = asyncio.create_task(loop.run())
    await _first_batch(engine)
    await engine.until(lambda: len(engine.queue) == 2)
    await engine.answer()
    await engine.until(lambda: len(engine.queue) == 2)  # the third and the fourth
    await engine.answer()
    await engine.answer()
    await _until(lambda: loop.waiting == "waiting_for_learner")
    assert state.num_waiting() == 4 * GROUPS_PER_BATCH
    assert engine.queue == []
    await _end(running, state)


async def test_long_batches_go_one_at_a_time(tmp_path: Path) -> None:
    engine = HeldEngine(batch_s=20.0)
    loop, state = await make_loop(tmp_path, engine, max_in_flight=64)
    running = asyncio.create_task(loop.run())
    await _first_batch(engine)
    await _first_batch(engine)
    await engine.until(lambda: len(engine.queue) == 1)
    await _end(running, state)


def _groups(state: NodeState) -> list[Group]:
    bodies = [state.store.body(row.id) for row in state.store.own_waiting()]
    return [codec.unseal(body, Group, state.swarm).record for body in bodies if body is not None]


async def _new_head(engine: HeldEngine, state: NodeState) -> None:
    state.engine_version = Version(0, 9, bytes(32))  # so the head is another one
    engine.adopted.set()


async def test_a_new_head_is_loaded_beside_the_batches_in_work(tmp_path: Path) -> None:
    engine = HeldEngine(batch_s=0.005)
    loop, state = await make_loop(tmp_path, engine, max_in_flight=64)
    running = asyncio.create_task(loop.run())
    await _first_batch(engine)
    await engine.until(lambda: len(engine.queue) == 2)
    await _new_head(engine, state)
    await engine.until(lambda: len(engine.loads) == 2)
    assert engine.loads == [0, 2]
    await _until(lambda: state.engine_version == state.head)
    await _end(running, state)


async def test_answers_over_a_change_of_version_make_groups_that_name_both(tmp_path: Path) -> None:
    engine = HeldEngine(batch_s=0.005)
    loop, state = await make_loop(tmp_path, engine, max_in_flight=GROUPS_PER_BATCH)
    running = asyncio.create_task(loop.run())
    await engine.until(lambda: len(engine.queue) == 1)
    later = Version(0, 1, bytes(32))
    engine.load(later)
    await engine.answer()
    await _until(lambda: state.num_waiting() == GROUPS_PER_BATCH)
    groups = _groups(state)
    assert {group.versions for group in groups} == {(state.base, later)}
    for group in groups:
        assert group.prompt_index == prompt_index(state.me, state.base, group.counter)
        for trajectory in group.trajectories:
            assert trajectory.completion.segments[0].version == 0
    await _end(running, state)


async def test_what_the_engine_did_not_begin_is_drawn_again_under_its_counter(tmp_path: Path) -> None:
    engine = HeldEngine(batch_s=0.005)
    loop, state = await make_loop(tmp_path, engine, max_in_flight=GROUPS_PER_BATCH)
    engine.refuse = engine.lose_first = True
    running = asyncio.create_task(loop.run())
    await engine.until(lambda: len(engine.queue) == 1)
    await engine.answer()
    await engine.until(lambda: len(engine.queue) == 1)
    assert [len(request.prompts) for request in engine.requests] == [GROUPS_PER_BATCH, 1]
    assert engine.requests[1].prompts == engine.requests[0].prompts[:1]
    await engine.answer()
    await _until(lambda: state.num_waiting() == GROUPS_PER_BATCH)
    counters = [group.counter for group in _groups(state)]
    assert len(set(counters)) == max(counters) - min(counters) + 1 == GROUPS_PER_BATCH
    await _end(running, state)


async def test_draining_waits_for_the_batches_in_work(tmp_path: Path) -> None:
    engine = HeldEngine(batch_s=0.005)
    loop, state = await make_loop(tmp_path, engine, max_in_flight=64)
    running = asyncio.create_task(loop.run())
    await _first_batch(engine)
    await engine.until(lambda: len(engine.queue) == 2)
    state.draining = True
    await engine.answer()
    await asyncio.sleep(0.05)
    assert loop.waiting != "draining"
    assert len(engine.queue) == 1  # none was begun
    await engine.answer()
    await _until(lambda: loop.waiting == "draining")
    assert state.num_waiting() == 3 * GROUPS_PER_BATCH
    await _end(running, state)


async def test_a_failed_batch_ends_the_loop_and_the_others(tmp_path: Path) -> None:
    engine = HeldEngine(batch_s=0.005)
    loop, state = await make_loop(tmp_path, engine, max_in_flight=64)
    running = asyncio.create_task(loop.run())
    await _first_batch(engine)
    await engine.until(lambda: len(engine.queue) == 2)
    first, second = engine.queue
    first.set_exception(ChildDied("out of memory"))
    with pytest.raises(ChildDied, match="out of memory"):
        await asyncio.wait_for(running, PATIENCE_S)
    assert second.cancelled()
    await _end(running, state)


async def test_a_group_that_nobody_may_take_for_its_size_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limit_of = codec.limit_of
    monkeypatch.setattr(codec, "limit_of", lambda kind: 100 if kind is Group else limit_of(kind))
    engine = HeldEngine(batch_s=0.005)
    loop, state = await make_loop(tmp_path, engine, max_in_flight=GROUPS_PER_BATCH)
    running = asyncio.create_task(loop.run())
    await _first_batch(engine)
    await engine.until(lambda: len(engine.queue) == 1)  # others, for those
    assert state.num_waiting() == 0 and state.counts.groups == 0
    assert "run a recipe with smaller groups" in caplog.text
    await _end(running, state)


@pytest.mark.parametrize("fault", ["bad_turns", "bad_finish"])
async def test_a_group_that_comes_out_otherwise_when_judged_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    judge_items = ScriptedEnvironment.judge_items

    async def unsure(self, items):
        first, *others = await judge_items(self, items)
        return (msgspec.structs.replace(first, **{fault: 0}, details=("answer 0: other",)), *others)

    monkeypatch.setattr(ScriptedEnvironment, "judge_items", unsure)
    engine = HeldEngine(batch_s=0.005)
    loop, state = await make_loop(tmp_path, engine, max_in_flight=GROUPS_PER_BATCH)
    running = asyncio.create_task(loop.run())
    await _first_batch(engine)
    await engine.until(lambda: len(engine.queue) == 1)  # one more, for what was left out
    assert state.num_waiting() == GROUPS_PER_BATCH - 1
    assert caplog.text.count("a group was left out") == 1 and "answer 0: other" in caplog.text
    await _end(running, state)
