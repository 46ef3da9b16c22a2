"""A new version in a swarm of 16: how often the learner uploads it, and what happens when those it gave it to die."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from p2prl import codec
from p2prl.errors import PeerError
from p2prl.records import PIECE_BYTES, Content
from p2prl.weights.holders import HolderRules
from p2prl.weights.messages import HAVE, PIECES, HaveReply, PieceHead, PieceRequest
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


def says_that_it_is_busy(node: Node, ask: tuple[str, ...] = ()) -> None:
    """It has the one piece, and never gives it."""

    async def have(peer: str, body: bytes) -> bytes:
        return codec.encode(HaveReply(b"\x01"))

    async def pieces(peer: str, body: bytes) -> AsyncIterator[bytes]:
        yield codec.encode(PieceHead(0, 0, ask))

    node.transport.serve(HAVE, have)
    node.transport.serve_stream(PIECES, pieces)


@pytest.mark.parametrize("name_each_other", [False, True])
def test_those_that_take_it_and_are_busy_for_ever_cut_nobody_off(tmp_path: Path, name_each_other: bool):
    async def program():
        swarm, learner, others = await led(tmp_path, 6, 8.0 * MIB)
        data = data_of(PIECE_BYTES)
        content = learner.hold(data)
        greedy, rest = others[:3], others[3:]
        await spread(swarm, content, data, greedy)
        for node in greedy:
            says_that_it_is_busy(node, tuple(each.peer for each in greedy) if name_each_other else ())
        began = now()
        await spread(swarm, content, data, rest)
        assert now() - began < HolderRules().starved_s + 10.0

    virtual(program)


@pytest.mark.parametrize("leads", [True, False])
def test_many_that_take_it_slowly_one_after_the_other_and_are_busy_then_cut_nobody_off(tmp_path: Path, leads: bool):
    async def program():
        swarm, learner, others = await led(tmp_path, 16, 8.0 * MIB)
        learner.is_learner = leads
        data = data_of(3 * MIB)
        content = learner.hold(data)
        *greedy, last = others
        request = codec.encode(PieceRequest(content.content_hash, (0,), 2**17))

        async def take_slowly(node: Node) -> None:
            """Asked for until it comes, then read for nearly as long as a server bears with."""
            num_bytes = 0
            while num_bytes < len(data):
                num_bytes = 0
                with contextlib.suppress(PeerError):
                    async for item in node.transport.stream(learner.peer, PIECES, request, max_bytes=2**40):
                        await asyncio.sleep(LEARNER.slow_s / 25 if num_bytes else 0.0)
                        num_bytes += len(item)
                await asyncio.sleep(0.2)

        for node in greedy:
            says_that_it_is_busy(node)
        taking = [asyncio.create_task(take_slowly(node)) for node in greedy]
        await asyncio.sleep(1.0)
        began = now()
        await spread(swarm, content, data, [last])
        assert now() - began < LEARNER.longest_s
        for task in taking:
            task.cancel()
        await asyncio.wait(taking)

    virtual(program)


def test_those_that_drip_it_cut_nobody_off(tmp_path: Path):
    """A byte now and then: the stream lives, and no piece ever comes of it."""

    async def program():
        swarm, learner, others = await led(tmp_path, 5, 8.0 * MIB)
        data = data_of(PIECE_BYTES)
        content = learner.hold(data)
        *greedy, last = others
        await spread(swarm, content, data, greedy)

        async def drip(peer: str, body: bytes) -> AsyncIterator[bytes]:
            yield codec.encode(PieceHead(0, PIECE_BYTES))
            for at in range(PIECE_BYTES):
                yield data[at : at + 1]
                await asyncio.sleep(1.0)

        for node in greedy:
            node.transport.serve_stream(PIECES, drip)
        began = now()
        await spread(swarm, content, data, [last])
        assert now() - began < LEARNER.longest_s + 10.0

    virtual(program)
