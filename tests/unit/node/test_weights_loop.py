"""Which head is followed, and what keeps nobody waiting."""

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest

from p2prl import codec
from p2prl.clock import LoopClock
from p2prl.errors import Unreachable
from p2prl.node import weights_loop
from p2prl.records import Content, Version
from p2prl.swarm.election import ElectionState
from p2prl.weights.messages import HAVE, HaveReply
from p2prl.weights.partial import Disk, Partial
from tests import factories
from tests.unit.node.version_nodes import Node, Swarm, holds, obtain
from tests.unit.weights.transfers import content_of, data_of, virtual


async def follow(node: Node, until: bytes) -> None:
    task = asyncio.create_task(node.loop.run())
    try:
        async with asyncio.timeout(60):
            while node.state.head_id != until:
                node.loop.adopted.clear()
                await node.loop.adopted.wait()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_head_that_stands_still_gives_way_to_other_news(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the leader's own: its content may never come."""
    monkeypatch.setattr(weights_loop, "STANDS_S", 0.3)
    monkeypatch.setattr(weights_loop, "LOOK_S", 0.05)
    swarm.grow(3)
    node = swarm.node(1)
    silent = swarm.network.transport(factories.identity(9).peer_id)
    await swarm.connect(node)
    await silent.start()
    await silent.join(list(swarm.learner.state.transport.addresses()))
    swarm.teach(node)

    async def nothing(peer: str, body: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    silent.serve("have", nothing)
    node.state.election = msgspec.structs.replace(
        ElectionState(node.state.me, node.state.swarm), leader=silent.peer_id, term=1
    )
    node.loop.heard_of(swarm.manifests[2][0], silent.peer_id)
    node.loop.heard_of(swarm.manifests[1][0], swarm.learner.state.me)
    await follow(node, swarm.manifests[1][0])
    assert holds(swarm, node, 2)


async def test_reading_what_came_before_is_no_standstill(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a large version takes long to hash again: cut short each time, it would never come."""
    monkeypatch.setattr(weights_loop, "STANDS_S", 0.2)
    monkeypatch.setattr(weights_loop, "LOOK_S", 0.05)
    swarm.grow(2)
    node = await swarm.newcomer(1)
    real, opened = Partial.open, []

    def slowly(folder: Path, content: Content, disk: Disk | None = None) -> Partial:
        opened.append(content.content_hash)
        threading.Event().wait(1.0)  # of a slow disk
        return real(folder, content, disk)

    monkeypatch.setattr(Partial, "open", slowly)
    learner = swarm.learner.state.me
    node.state.election = msgspec.structs.replace(
        ElectionState(node.state.me, node.state.swarm), leader=learner, term=1
    )
    node.loop.heard_of(swarm.manifests[1][0], learner)
    node.loop.heard_of(swarm.manifests[0][0], factories.identity(9).peer_id)
    await follow(node, swarm.manifests[1][0])
    assert sorted(opened) == sorted(swarm.content(step).content_hash for step in (1, 2)), "each once"


async def test_a_newcomer_takes_manifests_and_weights_and_tidies_up(swarm: Swarm) -> None:
    swarm.grow(20, anchors=[9], since={16: 9})
    node = swarm.node(1)
    await swarm.connect(node)
    swarm.teach(node)  # no election here, so no mandates
    node.loop.heard_of(swarm.manifests[-1][0], swarm.learner.state.me)
    await follow(node, swarm.manifests[-1][0])
    assert holds(swarm, node, 20)
    assert node.state.store.head() == swarm.manifests[-1][0]
    await node.loop._tidy()
    assert node.steps() == [20]


def test_a_disk_that_fills_while_a_head_comes_stops_it_until_there_is_room(memory_path: Path) -> None:
    async def program() -> None:
        swarm = Swarm(memory_path / "swarm", LoopClock())
        swarm.grow(1)
        node = await swarm.newcomer(1)
        serves = False

        async def have(peer: str, body: bytes) -> bytes:
            return codec.encode(HaveReply(b"\x01" if serves else b""))

        swarm.learner.state.transport.serve(HAVE, have)
        running = asyncio.create_task(node.loop.run())
        node.loop.heard_of(swarm.manifests[0][0], swarm.learner.state.me)
        await asyncio.sleep(2.0)
        assert node.state.transfers
        node.state.disk_full = True
        await asyncio.sleep(2 * weights_loop.LOOK_S)
        assert not node.state.transfers
        serves = True
        await asyncio.sleep(60.0)
        assert not node.state.transfers and node.state.head.step == 0
        assert not node.state.faults.of(swarm.learner.state.me), "that is nobody's fault"
        node.state.disk_full = False
        async with asyncio.timeout(10.0):
            await node.loop.adopted.wait()
        assert holds(swarm, node, 1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        swarm.close()

    virtual(program)


async def test_a_way_of_many_states_is_not_begun(swarm: Swarm) -> None:
    """Deltas as large as states: no learner publishes so many without an anchor, and they fill a disk."""

    def huge(step: int, parent: Version, version: Version, contents: list[Content]) -> list[Content]:
        lie = content_of(data_of(40_000, step))
        return [msgspec.structs.replace(lie, kind="delta", base=parent)]

    swarm.grow(8, tell=huge)
    node = await swarm.newcomer(1)
    before = swarm.learner.state.transport.traffic().received
    with pytest.raises(Unreachable, match=r"\d+ bytes in 8 contents"):
        await obtain(swarm, node, 8)
    assert swarm.learner.state.transport.traffic().received == before, "nobody was asked for any of it"
