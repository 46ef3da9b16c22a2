"""Which head is followed, and what keeps nobody waiting."""

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest

from p2prl.node import weights_loop
from p2prl.records import Content
from p2prl.swarm.election import ElectionState
from p2prl.weights.partial import Disk, Partial
from tests import factories
from tests.unit.node.version_nodes import Node, Swarm, holds


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
