"""A node whose line is slower than anchors come arrives at the head in the end. Real files under virtual time."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from p2prl.clock import LoopClock
from p2prl.config import NodeConfig, StorageSection
from p2prl.models.state import state_hash
from p2prl.weights import chain
from tests.unit.node import version_nodes
from tests.unit.node.version_nodes import Node, Swarm
from tests.unit.weights.transfers import virtual

STATE_BYTES = 9 * 2**20  # three pieces
NUM_CHANGED = 600_000  # words of a step: a delta is 4 % of the state
STEP_S, ANCHOR_EVERY = 100.0, 3
ANCHOR_S = STEP_S * ANCHOR_EVERY
RATE = STATE_BYTES / (3 * ANCHOR_S)  # an anchor takes three times their interval
MAX_STEPS = 34


@pytest.fixture(autouse=True)
def large_states(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {0: np.random.default_rng(0).integers(0, 2**16, STATE_BYTES // 2, dtype="<u2")}

    def words(step: int) -> bytes:
        if step not in known:
            source = np.random.default_rng(step)
            values = known.pop(step - 1)
            values[source.integers(0, len(values), NUM_CHANGED)] ^= 1
            known[step] = values
        return known[step].tobytes()

    monkeypatch.setattr(version_nodes, "words", words)


def held_bytes(node: Node) -> int:
    held = node.state.weights.held
    return sum((*held.states.values(), *held.contents.values()))


async def grow(swarm: Swarm) -> None:
    """One version; what the learner does not need any more goes."""
    step = len(swarm.manifests) + 1
    swarm.grow(1, anchors=[step] if step % ANCHOR_EVERY == 1 else [])
    swarm.learner.loop._is_tidy = False
    await swarm.learner.loop._tidy()


async def until_it_follows(swarm: Swarm, joiner: Node, each: Callable[[], None] = lambda: None) -> int:
    """Versions come, and it hears of each; how many came until it had one within a step of the newest."""
    running = asyncio.create_task(joiner.loop.run())
    try:
        while len(swarm.manifests) < MAX_STEPS:
            await grow(swarm)
            each()
            swarm.teach(joiner)
            joiner.loop.heard_of(swarm.manifests[-1][0], swarm.learner.state.me)
            await asyncio.sleep(STEP_S)
            if joiner.state.head.step >= len(swarm.manifests) - 1:
                break
        return len(swarm.manifests)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def slow_swarm(folder: Path, config: NodeConfig | None = None) -> Swarm:
    """An hour old: nothing of its beginning is left."""
    swarm = Swarm(folder / "swarm", LoopClock(), max_age=2)
    swarm.learner = swarm.node(0, config)
    return swarm


async def begin(swarm: Swarm) -> Node:
    joiner = swarm.node(1)
    await swarm.connect(joiner)
    for _ in range(4 * ANCHOR_EVERY + 1):  # an anchor is the newest
        await grow(swarm)
    joiner.state.transport.set_rates(None, RATE)
    return joiner


def test_it_arrives_at_the_head_while_anchors_come_three_times_as_fast(memory_path: Path) -> None:
    """The learner has room for three states: the one that is taken stays, and so does the owner's budget."""

    async def program():
        budget = int(3.3 * STATE_BYTES)
        swarm = slow_swarm(memory_path, NodeConfig(storage=StorageSection(cache=budget)))
        joiner = await begin(swarm)
        began, most_bytes = len(swarm.manifests), 0

        def look() -> None:
            nonlocal most_bytes
            most_bytes = max(most_bytes, held_bytes(swarm.learner))

        num_steps = await until_it_follows(swarm, joiner, look)
        newest = joiner.state.head.step
        assert newest >= num_steps - 1
        assert state_hash(joiner.state.head_path) == swarm.version(newest).hash
        assert num_steps - began <= 20, "what it has to fetch is 1 + .36 + .13 + ... states"
        assert most_bytes <= budget
        got = joiner.state.transport.traffic().received["weights"]
        deltas = sum(swarm.content(step).content_bytes for step in range(began, newest + 1))
        assert got < 1.05 * (STATE_BYTES + deltas), "one anchor, and the deltas since: nothing twice"
        await asyncio.sleep(200.0)
        await grow(swarm)
        anchors = [step for step in swarm.learner.steps() if step % ANCHOR_EVERY == 1]
        assert len(anchors) <= chain.KEEP_ANCHORS, "nobody takes the old one any more"
        swarm.close()

    virtual(program)


def test_a_joiner_that_is_cut_off_goes_on_with_what_it_has_half_of(memory_path: Path) -> None:
    """Also after a newer anchor came, and in its next life."""

    async def program():
        swarm = slow_swarm(memory_path)
        joiner = await begin(swarm)
        swarm.teach(joiner)
        half = swarm.content(13, "anchor")
        obtaining = asyncio.create_task(
            joiner.versions.obtain(swarm.version(13), lambda: (swarm.learner.state.me,)), name="obtain"
        )
        await asyncio.sleep(0.95 * STATE_BYTES / RATE)  # two of its pieces are here
        obtaining.cancel()
        await asyncio.gather(obtaining, return_exceptions=True)
        for _ in range(ANCHOR_EVERY):
            await grow(swarm)
        await joiner.versions.collect()
        lost = frozenset(swarm.content(step).content_hash for step in range(1, 13))
        swarm.network.crash(joiner.state.me)
        for node in (joiner, swarm.node(1)):
            swarm.teach(node)
            path = node.versions.plan(swarm.version(16), lost)
            assert path is not None
            assert [way.content for way in path.ways] == [half, *(swarm.content(step) for step in (14, 15, 16))]
        swarm.close()

    virtual(program)
