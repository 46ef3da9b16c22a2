"""What rots on a holder's disk: its peers don't blame it, its owner is told, and it is got again."""

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest

from p2prl.node.served import LOOK_AGAIN_S
from p2prl.node.state import NodeState
from p2prl.swarm.election import ElectionState
from p2prl.weights.store import content_digest
from tests.unit.node.version_nodes import Node, Swarm, holds, obtain

Told = list[tuple[str, str, dict[str, object]]]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def listen(state: NodeState) -> Told:
    told: Told = []
    state.log = lambda level, event, values: told.append((level, event, values))
    return told


async def pair(swarm: Swarm, step: int) -> tuple[Node, Node]:
    """A holder that got this version, and one that wants it."""
    holder, wanting = swarm.node(1), swarm.node(2)
    await swarm.connect(holder, wanting)
    for node in (holder, wanting):
        swarm.teach(node)
    await obtain(swarm, holder, step)
    return holder, wanting


async def take_from(holder: Node, wanting: Node, swarm: Swarm, step: int) -> None:
    await asyncio.wait_for(wanting.versions.obtain(swarm.version(step), lambda: (holder.state.me,)), 60)


async def taken_until_it_is_found(holder: Node, wanting: Node, swarm: Swarm, step: int) -> None:
    found = asyncio.Event()
    holder.versions.served.on_lost = found.set
    taking = asyncio.create_task(take_from(holder, wanting, swarm, step))
    await asyncio.wait_for(found.wait(), 60)
    holder.versions.served.on_lost = holder.loop._wake.set
    taking.cancel()
    await asyncio.gather(taking, return_exceptions=True)
    assert not wanting.state.has_state(swarm.version(step))


async def mended(swarm: Swarm, node: Node) -> None:
    """Its loop does it, without any news."""
    state = node.state
    state.election = msgspec.structs.replace(
        ElectionState(state.me, state.swarm), leader=swarm.learner.state.me, term=1
    )
    assert node.versions.served.lost
    node.loop._wake.set()
    running = asyncio.create_task(node.loop.run())
    try:
        async with asyncio.timeout(60):
            while node.versions.served.lost:  # noqa: ASYNC110 nothing tells of it
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_delta_that_rotted_is_dropped_told_of_and_got_again(swarm: Swarm) -> None:
    swarm.grow(2)
    holder, wanting = await pair(swarm, 2)
    told, name = listen(holder.state), swarm.content(2).content_hash
    flip(holder.state.weights.content_path(name))
    await taken_until_it_is_found(holder, wanting, swarm, 2)
    assert wanting.state.faults.of(holder.state.me) == 0, "nothing false came"
    assert not holder.state.weights.has_content(name)
    assert [event for level, event, _ in told if level == "warning"] == [
        f"the delta {name.hex()[:16]} rotted on this disk; it is got again"
    ]
    await mended(swarm, holder)
    assert holder.state.weights.has_content(name)
    await take_from(holder, wanting, swarm, 2)
    assert holds(swarm, wanting, 2)


async def test_a_state_that_rotted_stays_for_its_readers_until_it_is_made_again(swarm: Swarm) -> None:
    """As an anchor it is served, as the head it is in use."""
    swarm.grow(2, anchors=[2], tell=lambda step, parent, version, contents: contents[-1:] if step == 2 else contents)
    holder, wanting = await pair(swarm, 2)
    told, name, path = listen(holder.state), swarm.version(2).hash, holder.state.state_path(swarm.version(2))
    assert holder.versions.served.find(swarm.content(2, "anchor").content_hash) == path
    flip(path)
    await taken_until_it_is_found(holder, wanting, swarm, 2)
    assert path.is_file() and not holder.state.weights.has_state(name)
    assert any("the state" in event and "rotted" in event for _, event, _ in told)
    await mended(swarm, holder)
    assert holds(swarm, holder, 2)
    await take_from(holder, wanting, swarm, 2)
    assert holds(swarm, wanting, 2)


async def test_what_nobody_gives_any_more_is_asked_for_again_later(swarm: Swarm) -> None:
    swarm.grow(1)
    holder, wanting = await pair(swarm, 1)
    name = swarm.content(1).content_hash
    flip(holder.state.weights.content_path(name))
    await taken_until_it_is_found(holder, wanting, swarm, 1)
    await holder.versions.mend(tuple)
    assert holder.versions.served.lost == {name}
    await holder.versions.mend(lambda: (swarm.learner.state.me,))
    assert holder.versions.served.lost == set() and holder.state.weights.has_content(name)


async def test_a_false_manifest_makes_nobody_drop_an_honest_file(swarm: Swarm) -> None:
    """It names the content, and other pieces of it."""
    swarm.grow(1)
    holder, wanting = await pair(swarm, 1)
    honest = swarm.manifests[0][2]
    false = msgspec.structs.replace(swarm.content(1), pieces=(bytes(32),))
    holder.state.manifests[b"\x07" * 32] = msgspec.structs.replace(honest, contents=(false,))
    await take_from(holder, wanting, swarm, 1)
    assert holds(swarm, wanting, 1)
    del holder.state.manifests[swarm.manifests[0][0]]  # now it knows the false one alone
    await holder.versions.served._rotted(false.content_hash)
    assert holder.state.weights.has_content(false.content_hash) and holder.versions.served.lost == set()


async def test_complaints_of_peers_cost_one_reading_of_the_file_a_while(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest names the right file and false pieces of it: each piece that anybody takes of it seems to have rotted."""
    swarm.grow(1)
    holder, _ = await pair(swarm, 1)
    served, name, read = holder.versions.served, swarm.content(1).content_hash, []
    monkeypatch.setattr("p2prl.node.served.wrong_content", lambda path, name: read.append(path) or "")
    for _ in range(5):
        await served._rotted(name)
    assert len(read) == 1
    now = holder.state.now()
    monkeypatch.setattr(type(holder.state), "now", lambda self: now + LOOK_AGAIN_S)
    await served._rotted(name)
    assert len(read) == 2, "it may have rotted since"


async def test_while_a_large_file_is_read_nobody_waits_for_another(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm.grow(2, anchors=[1, 2])
    holder, _ = await pair(swarm, 2)
    served, begun, go_on = holder.versions.served, threading.Event(), threading.Event()
    first, second = (swarm.content(step, "anchor").content_hash for step in (1, 2))
    await obtain(swarm, holder, 1)
    served.forget_all_but(set())

    def slowly(path: Path) -> bytes:
        begun.set()
        assert go_on.wait(10)
        return content_digest(path)

    monkeypatch.setattr("p2prl.node.served.content_digest", slowly)
    reading = asyncio.create_task(asyncio.to_thread(served.find, first))
    await asyncio.to_thread(begun.wait, 10)
    assert served.find(second) is None and served.find(bytes(32)) is None, "at once"
    go_on.set()
    assert await reading == holder.state.state_path(swarm.version(1))
    assert served.find(second) == holder.state.state_path(swarm.version(2))
