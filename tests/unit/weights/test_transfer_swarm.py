"""A new version in a swarm of 16: how often the learner uploads it, and what happens when those it gave it to die."""

import asyncio
from pathlib import Path

import pytest

from p2prl.records import PIECE_BYTES, Content
from p2prl.weights.spare import LEARNER
from tests.unit.weights.transfers import MIB, Node, Swarm, data_of, now, virtual

HEADS = 1.01  # what the heads of pieces and refusals add


async def led(folder: Path, num_nodes: int, up: float | None) -> tuple[Swarm, Node, list[Node]]:
    """A swarm, its learner, the others."""
    swarm = await Swarm(folder, num_nodes, up=up).start()
    learner, *others = swarm.nodes
    learner.is_learner = True
    return swarm, learner, others


async def spread(swarm: Swarm, content: Content, data: bytes, nodes: list[Node]) -> list[float]:
    """All fetch at once; when each has it."""
    began = now()

    async def one(node: Node) -> float:
        path = await node.fetch(content)
        assert path.read_bytes() == data
        return now() - began

    return await asyncio.gather(*(one(node) for node in nodes))


@pytest.mark.parametrize(("num_pieces", "up"), [(1, 4.0 * MIB), (1, None), (5, 4.0 * MIB)])
def test_16_nodes_get_it_with_three_copies_from_the_learner(tmp_path: Path, num_pieces: int, up: float | None):
    async def program():
        swarm, learner, others = await led(tmp_path, 16, up)
        data = data_of(num_pieces * PIECE_BYTES - 5)
        times = await spread(swarm, learner.hold(data), data, others)
        assert learner.given_bytes <= 3 * HEADS * len(data)
        if up is not None:
            alone = 15 * len(data) / up
            assert max(times) < alone / 2, "the others' lines carry most of it"

    virtual(program)


def test_when_those_die_that_have_it_the_learner_serves_again(tmp_path: Path):
    async def program():
        swarm, learner, others = await led(tmp_path, 8, 4.0 * MIB)
        data = data_of(PIECE_BYTES)
        content = learner.hold(data)
        first, rest = others[:3], others[3:]
        await spread(swarm, content, data, first)
        assert learner.given_bytes >= len(data)
        for node in first:
            swarm.network.crash(node.peer)
        began = now()
        await spread(swarm, content, data, rest)
        assert now() - began < 15.0
        assert learner.given_bytes <= (3 + 3) * HEADS * len(data), "three that died, three for the others"

    virtual(program)


def test_those_that_take_it_and_hide_it_make_nobody_wait_for_long(tmp_path: Path):
    async def program():
        swarm, learner, others = await led(tmp_path, 8, 4.0 * MIB)
        data = data_of(PIECE_BYTES)
        content = learner.hold(data)
        greedy, rest = others[:3], others[3:]
        await spread(swarm, content, data, greedy)
        for node in greedy:  # as one that gets, and says that it has nothing
            node.find(content.content_hash).unlink()  # type: ignore[union-attr]
        began = now()
        await spread(swarm, content, data, rest)
        assert now() - began < 15.0

    virtual(program)


def test_copies_that_freeze_on_their_way_make_nobody_wait_for_long(tmp_path: Path):
    async def program():
        swarm, learner, others = await led(tmp_path, 6, 4.0 * MIB)
        data = data_of(PIECE_BYTES)
        content = learner.hold(data)
        frozen, rest = others[:3], others[3:]
        stuck = [asyncio.create_task(node.fetch(content)) for node in frozen]
        await asyncio.sleep(0.3)
        swarm.network.partition([node.peer for node in frozen], [node.peer for node in (learner, *rest)])
        began = now()
        await spread(swarm, content, data, rest)
        assert now() - began < LEARNER.slow_s + 15.0
        for task in stuck:
            task.cancel()
        await asyncio.wait(stuck)

    virtual(program)
