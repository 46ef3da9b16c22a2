"""What rots on a holder's disk: its peers don't blame it, its owner is told, and it is got again."""

import asyncio
import threading
from pathlib import Path

import msgspec
import pytest

from p2prl.node.state import NodeState
from p2prl.records import StepReport
from p2prl.swarm.election import ElectionState
from p2prl.weights.contents import name_of_file
from tests import factories
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


async def test_what_a_complaint_finds_whole_stays(swarm: Swarm) -> None:
    """A piece was misread once, or the file was replaced meanwhile."""
    swarm.grow(2, anchors=[2])
    holder, _ = await pair(swarm, 2)
    served, name, anchor = (
        holder.versions.served,
        swarm.content(2).content_hash,
        swarm.content(2, "anchor").content_hash,
    )
    path = served.find(anchor)
    for each in (name, anchor):
        await served._rotted(each)
    assert holder.state.weights.has_content(name) and holder.state.has_state(swarm.version(2)) and served.lost == set()
    assert served.find(anchor) == path


async def test_a_state_is_read_once_for_all_the_anchors_that_manifests_name_of_it(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm.grow(2, anchors=[2])
    holder, _ = await pair(swarm, 2)
    served, read = holder.versions.served, []
    monkeypatch.setattr("p2prl.node.served.name_of_file", lambda path: read.append(path) or name_of_file(path))
    honest = swarm.manifests[1][2]
    false = [factories.content(b"false %d" % number, 1000) for number in range(20)]
    for number, content in enumerate(false):
        holder.state.manifests[bytes([number]) * 32] = msgspec.structs.replace(honest, contents=(content,))
    assert [served.find(content.content_hash) for content in false] == [None] * 20
    path = holder.state.state_path(swarm.version(2))
    assert served.find(swarm.content(2, "anchor").content_hash) == path and read == [path]
    holder.versions.served.forget_all_but(set())
    assert served.find(swarm.content(2, "anchor").content_hash) == path and read == [path], "it is here still"


async def test_our_own_state_is_not_read_for_its_anchor(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm.grow(1, anchors=[1])
    learner, manifest = swarm.learner, swarm.manifests[0][2]
    learner.versions.published(StepReport(manifest.version, "", manifest.contents, 1.0, {}, 1, 1, 1.0, ()))
    monkeypatch.setattr("p2prl.node.served.name_of_file", lambda path: pytest.fail("it was read"))
    found = learner.versions.served.find(swarm.content(1, "anchor").content_hash)
    assert found == learner.state.state_path(swarm.version(1))


async def test_while_a_large_file_is_read_nobody_waits_for_another(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm.grow(2, anchors=[1, 2])
    holder, _ = await pair(swarm, 2)
    served, begun, go_on = holder.versions.served, threading.Event(), threading.Event()
    first, second = (swarm.content(step, "anchor").content_hash for step in (1, 2))
    await obtain(swarm, holder, 1)
    served.made(swarm.version(1).hash)

    def slowly(path: Path) -> bytes:
        begun.set()
        assert go_on.wait(10)
        return name_of_file(path)

    monkeypatch.setattr("p2prl.node.served.name_of_file", slowly)
    reading = asyncio.create_task(asyncio.to_thread(served.find, first))
    await asyncio.to_thread(begun.wait, 10)
    assert served.find(second) is None and served.find(bytes(32)) is None, "at once"
    go_on.set()
    assert await reading == holder.state.state_path(swarm.version(1))
    assert served.find(second) == holder.state.state_path(swarm.version(2))
