"""Paths that are long, costly, doubled or rotted: they cost bounded work and disk, and only the guilty are blamed."""

import asyncio
import threading
from pathlib import Path

import pytest
from blake3 import blake3

from p2prl.config import NodeConfig
from p2prl.errors import BadRecord, StoreError
from p2prl.records import Content, Version
from p2prl.simulate.scripted_ports import write_version
from p2prl.weights import apply, delta
from p2prl.weights.contents import content_of
from p2prl.weights.partial import Partial, left_over
from p2prl.weights.store import path_of
from tests.unit.node import version_nodes
from tests.unit.node.version_nodes import NUM_WORDS, Node, Swarm, holds, obtain, words

Passes = list[int]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """How many deltas were applied at once, pass by pass."""
    made: Passes = []
    real = delta.apply

    def counted(parent: Path, deltas: list[Path], *args: object, **more: object) -> None:
        made.append(len(deltas))
        real(parent, deltas, *args, **more)  # pyright: ignore

    monkeypatch.setattr("p2prl.weights.delta.apply", counted)
    return made


async def newcomer(swarm: Swarm, config: NodeConfig | None = None) -> Node:
    node = swarm.node(1, config)
    await swarm.connect(node)
    swarm.teach(node)
    return node


def state_files(node: Node) -> int:
    return sum(path.is_file() for path in node.state.home.states.rglob("*"))


async def test_steps_that_change_nothing_share_a_content(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_nodes, "words", lambda step: words(min(step, 1)))
    swarm.grow(4)
    assert swarm.content(3).content_hash == swarm.content(4).content_hash
    node = await newcomer(swarm)
    await obtain(swarm, node, 4)
    assert holds(swarm, node, 4)


async def test_a_long_path_is_applied_in_passes_that_leave_no_state_behind(swarm: Swarm, passes: Passes) -> None:
    swarm.grow(2 * delta.MAX_MERGED + 3)
    node = await newcomer(swarm)
    await obtain(swarm, node, 2 * delta.MAX_MERGED + 3)
    assert passes == [delta.MAX_MERGED, delta.MAX_MERGED, 3]
    assert holds(swarm, node, 2 * delta.MAX_MERGED + 3) and state_files(node) == 1


async def test_a_delta_bomb_is_a_pass_of_its_own(swarm: Swarm, passes: Passes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight moves a step: a hundred bytes, and the work of a hundred deltas."""

    def all_change(step: int) -> bytes:
        return b"".join((16_000 + step + number % 7).to_bytes(2, "little") for number in range(NUM_WORDS))

    monkeypatch.setattr(version_nodes, "words", lambda step: words(0) if step == 0 else all_change(step))
    swarm.grow(10)
    assert all(swarm.content(step).content_bytes < 0.02 * 2 * NUM_WORDS for step in range(2, 11))
    node = await newcomer(swarm)
    await obtain(swarm, node, 10)
    assert max(passes) <= apply.MAX_REWRITES and holds(swarm, node, 10)
    assert node.steps() == [1, 10], "the anchor, and the version"


async def test_a_pass_that_nobody_waits_for_stops_and_the_next_attempt_goes_on(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "MAX_MERGED", 2)
    swarm.grow(6)
    node = await newcomer(swarm)
    applying, go_on, real, ended = threading.Event(), threading.Event(), delta.apply, threading.Event()
    failures: list[BaseException] = []

    def slow(parent: Path, deltas: list[Path], *args: object, **more: object) -> None:
        if node.steps():  # the second pass
            applying.set()
            assert go_on.wait(30)
        try:
            real(parent, deltas, *args, **more)  # pyright: ignore
        except BaseException as error:
            failures.append(error)
            ended.set()
            raise

    with monkeypatch.context() as patch:
        patch.setattr("p2prl.weights.delta.apply", slow)
        task = asyncio.create_task(obtain(swarm, node, 6))
        await asyncio.to_thread(applying.wait, 30)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        go_on.set()
        assert await asyncio.to_thread(ended.wait, 30)
    assert "nobody wants" in str(failures[0]) and node.steps() == [2]
    path = node.versions.plan(swarm.version(6))
    assert path is not None and path.base == swarm.version(2)
    await obtain(swarm, node, 6)
    assert holds(swarm, node, 6) and not list(node.state.home.states.glob("*.staged"))


async def test_finding_the_wrong_delta_of_a_long_path_leaves_one_state(swarm: Swarm) -> None:
    def lying(step: int, parent: Version, version: Version, contents: list[Content]) -> list[Content]:
        """Leads, it says, to the version; it doesn't."""
        if step != 8:
            return contents
        made = swarm.folder / "lie"
        write_version(swarm.folder / "other", words(99))
        delta.encode(swarm.learner.state.weights.state_path(parent.hash), swarm.folder / "other", made)
        data = bytearray(made.read_bytes())
        data[40:72] = version.hash
        made.write_bytes(data[:-32] + blake3(data[:-32]).digest())
        content = content_of(made, "delta", parent)
        path_of(swarm.learner.state.home.blobs, content.content_hash).parent.mkdir(exist_ok=True)
        made.rename(path_of(swarm.learner.state.home.blobs, content.content_hash))
        return [content]

    swarm.grow(8, tell=lying)
    node = await newcomer(swarm)
    with pytest.raises(BadRecord, match="gives another state"):
        await obtain(swarm, node, 8)
    assert [way[0] for way in node.versions._bad] == [swarm.content(8).content_hash]
    assert node.steps() == [7] and state_files(node) == 1, "the last good one may be gone on from"


@pytest.mark.parametrize("damage", ["rotted", "gone"])
async def test_an_anchor_that_rotted_before_it_was_used_is_nobodys_fault(swarm: Swarm, damage: str) -> None:
    swarm.grow(1, anchors=[1], tell=lambda step, parent, version, contents: contents[1:])
    content = swarm.content(1, "anchor")
    node = await newcomer(swarm)
    path = path_of(node.state.home.blobs, content.content_hash)
    path.parent.mkdir()
    path.write_bytes(bytes(content.content_bytes))
    node.state.weights.open()
    if damage == "gone":
        path.unlink()
    await obtain(swarm, node, 1)
    assert holds(swarm, node, 1)
    assert not node.versions._bad and node.state.faults.of(swarm.learner.state.me) == 0


async def test_an_anchor_whose_state_is_made_again_is_compared_again(swarm: Swarm) -> None:
    """It may have come in another layout than the one that deltas give."""
    swarm.grow(2, anchors=[2])
    node = await newcomer(swarm)
    name, anchor = swarm.version(2).hash, swarm.content(2, "anchor").content_hash
    node.versions.served.is_anchor(bytes(32), name)
    await obtain(swarm, node, 2)
    assert node.versions.served.find(anchor) == node.state.weights.state_path(name)


async def test_parts_of_what_is_not_wanted_any_more_go(swarm: Swarm) -> None:
    """Also where the version is on our chain: it is here, or nobody needed it."""
    swarm.grow(4, anchors=[2, 4])
    node = await newcomer(swarm)
    await obtain(swarm, node, 3)
    node.loop.adopt(swarm.manifests[2][0])
    for step in (2, 4):
        Partial.open(node.state.home.blobs, swarm.content(step, "anchor")).close()
    await node.versions.collect()
    ahead = swarm.content(4, "anchor").content_hash.hex()
    assert {path.name[1:65] for path in left_over(node.state.home.blobs)} == {ahead}


async def test_what_can_not_be_dropped_keeps_nobody_from_the_next_head(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm.grow(3)
    node = await newcomer(swarm)
    with monkeypatch.context() as patch:
        patch.setattr(node.state.weights, "drop_parts", refuse)
        await node.loop._tidy()
    assert node.state.health["weights_kept"][1] == "can't drop weights"
    node.loop._is_tidy = False
    await node.loop._tidy()
    assert "weights_kept" not in node.state.health


def refuse(*_: object) -> None:
    raise StoreError("can't drop weights")


async def test_a_learner_whose_parent_rotted_publishes_the_whole_state(swarm: Swarm) -> None:
    """A delta from what is no version would fit nobody's."""
    swarm.grow(1)
    path = swarm.learner.state.weights.state_path(swarm.version(1).hash)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    swarm.grow(1)
    assert [content.kind for content in swarm.manifests[1][2].contents] == ["anchor"]
    node = await newcomer(swarm)
    await obtain(swarm, node, 2)
    assert holds(swarm, node, 2)


def test_a_delta_is_held_to_what_its_header_says(tmp_path: Path) -> None:
    """While it is read: that is what a pass is planned by."""
    write_version(tmp_path / "old", words(0))
    child = write_version(tmp_path / "new", words(5))
    delta.encode(tmp_path / "old", tmp_path / "new", tmp_path / "delta")
    data = bytearray((tmp_path / "delta").read_bytes())
    data[80:88] = (1).to_bytes(8, "little")
    (tmp_path / "delta").write_bytes(data[:-32] + blake3(data[:-32]).digest())
    assert delta.read_header(tmp_path / "delta").num_changed == 1
    with pytest.raises(BadRecord, match="holds other changes than it says"):
        delta.apply(tmp_path / "old", [tmp_path / "delta"], tmp_path / "out", expected=child)
