"""A version's weights come the cheapest way that works; what is wrong is never used, and whose fault it is is known."""

import asyncio
import random
import threading
from pathlib import Path

import msgspec
import pytest

from p2prl.config import NodeConfig, StorageSection
from p2prl.errors import BadRecord, PeerError, StoreError, Unreachable
from p2prl.learner.publish import Folders, publish
from p2prl.models.state import state_hash
from p2prl.records import Content, DeltaBase, StepReport, Version
from p2prl.simulate.scripted_ports import write_version
from p2prl.weights import delta
from p2prl.weights.contents import content_of
from p2prl.weights.partial import part_paths
from p2prl.weights.store import path_of
from tests import factories
from tests.unit.node.version_nodes import NUM_WORDS, Swarm, holds, obtain, words


async def test_a_follower_fetches_deltas_alone_and_a_newcomer_what_is_cheapest(swarm: Swarm) -> None:
    swarm.grow(20, anchors=[10], since={16: 10})
    follower, newcomer = swarm.node(1), swarm.node(2)
    await swarm.connect(follower, newcomer)
    for node in (follower, newcomer):
        swarm.teach(node)
    await obtain(swarm, follower, 3)
    assert follower.contents() == {swarm.content(step).content_hash for step in (1, 2, 3)}
    assert holds(swarm, follower, 3)
    assert follower.steps() == [3], "what lies between is not written"
    got = follower.state.transport.traffic().received["weights"]
    assert got < sum(swarm.content(step).content_bytes for step in (1, 2, 3)) + 3000
    await obtain(swarm, newcomer, 20)
    assert holds(swarm, newcomer, 20)
    plan = swarm.node(3)
    swarm.teach(plan)
    path = plan.versions.plan(swarm.version(20))
    assert path is not None
    assert newcomer.contents() == {way.content.content_hash for way in path.ways}
    assert path.num_bytes < 2 * NUM_WORDS


async def test_a_newcomer_may_start_at_an_anchor_and_serves_it_then(swarm: Swarm) -> None:
    def strangers(step: int, parent: Version, version: Version, contents: list[Content]) -> list[Content]:
        return contents if step > 1 else contents[1:]  # nothing leads from the base

    swarm.grow(4, anchors=[1, 3], tell=strangers)
    one, other = swarm.node(1), swarm.node(2)
    await swarm.connect(one, other)
    swarm.teach(one)
    swarm.teach(other)
    await obtain(swarm, one, 4)
    assert holds(swarm, one, 3) and holds(swarm, one, 4)
    assert one.contents() == {swarm.content(4).content_hash}, "an anchor lies here once, as the state"
    swarm.network.crash(swarm.learner.state.me)
    await asyncio.wait_for(other.versions.obtain(swarm.version(4), lambda: (one.state.me,)), 60)
    assert holds(swarm, other, 4)


async def test_an_anchor_made_of_deltas_is_served_too(swarm: Swarm) -> None:
    swarm.grow(3, anchors=[3])
    one, other = swarm.node(1), swarm.node(2)
    await swarm.connect(one, other)
    swarm.teach(one)
    await obtain(swarm, one, 3)
    assert swarm.content(3, "anchor").content_hash not in one.contents()
    found = one.versions.served.find(swarm.content(3, "anchor").content_hash)
    assert found == one.state.weights.state_path(swarm.version(3).hash)
    assert one.versions.served.find(bytes(32)) is None


async def test_an_anchor_of_other_bytes_than_ours_is_not_served_for_it(swarm: Swarm) -> None:
    """The same state in a file of another layout: its hash is the version's, its bytes are not the content's."""

    def another(step: int, parent: Version, version: Version, contents: list[Content]) -> list[Content]:
        path = swarm.learner.state.weights.state_path(version.hash)
        content = path.read_bytes()
        head = int.from_bytes(content[:8], "little")
        (swarm.folder / "wide").write_bytes(
            (head + 8).to_bytes(8, "little") + content[8 : 8 + head] + b" " * 8 + content[8 + head :]
        )
        assert state_hash(swarm.folder / "wide") == version.hash
        return [contents[0], content_of(swarm.folder / "wide", "anchor", None)]

    swarm.grow(1, anchors=[1], tell=another)
    node = await swarm.newcomer(1)
    await obtain(swarm, node, 1)
    assert node.versions.served.find(swarm.content(1, "anchor").content_hash) is None


async def wrong_bits(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("lie", ["result", "parent", "noise", "older"])
async def test_a_delta_that_gives_another_result_is_its_learners_fault(swarm: Swarm, lie: str) -> None:
    """The content is what the manifest names; what it gives is not what the manifest says."""

    def lying(step: int, parent: Version, version: Version, contents: list[Content]) -> list[Content]:
        if step != 3:
            return contents
        blobs, made = swarm.learner.state.home.blobs, swarm.folder / "lie"
        here = swarm.learner.state.weights.state_path
        if lie == "result":
            write_version(swarm.folder / "other", words(9))
            delta.encode(here(parent.hash), swarm.folder / "other", made)
        elif lie == "parent":
            delta.encode(here(swarm.version(1).hash), here(version.hash), made)
        elif lie == "older":
            delta.encode(here(parent.hash), here(swarm.version(1).hash), made)
        else:
            made.write_bytes(bytes(range(256)) * 10)
        content = content_of(made, "delta", parent)
        path_of(blobs, content.content_hash).parent.mkdir(exist_ok=True)
        made.rename(path_of(blobs, content.content_hash))
        return [content, *contents[1:]]

    swarm.grow(3, anchors=[3], tell=lying)
    swarm.grow(1)
    node = await swarm.newcomer(1)
    await obtain(swarm, node, 4)
    assert holds(swarm, node, 4), "over the anchor"
    assert node.state.faults.of(swarm.learner.state.me) == 1
    bad = swarm.content(3).content_hash
    assert bad not in node.contents()
    assert [way[0] for way in node.versions._bad] == [bad]
    path = node.versions.plan(swarm.version(3))
    assert path is not None and path.ways == ()
    assert not list(node.state.home.states.glob("*.staged")), "a wrong result is left nowhere"
    assert b'weights_failures_total{reason="bad_record"} 1.0' in node.state.measures.metrics.text()


async def test_a_wrong_version_without_another_way_is_never_used(swarm: Swarm) -> None:
    def lying(step: int, parent: Version, version: Version, contents: list[Content]) -> list[Content]:
        path = swarm.folder / "lie"
        path.write_bytes(b"nothing")
        content = content_of(path, "anchor" if step == 1 else "delta", None if step == 1 else parent)
        target = path_of(swarm.learner.state.home.blobs, content.content_hash)
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
        return [content]

    swarm.grow(1, tell=lying)
    node = await swarm.newcomer(1)
    with pytest.raises(BadRecord, match="is wrong") as failure:
        await obtain(swarm, node, 1)
    assert failure.value.peer == swarm.learner.state.me
    assert node.state.weights.held.states == {} and node.contents() == set()
    assert node.versions.plan(swarm.version(1)) is None
    with pytest.raises(Unreachable, match="no way leads"):
        await obtain(swarm, node, 1)


async def test_a_good_delta_under_a_false_name_stays_good_under_its_own(swarm: Swarm) -> None:
    """Whoever names an honest delta in a manifest of another result harms nobody but itself."""
    swarm.grow(1)
    node = await swarm.newcomer(1)
    honest = swarm.manifests[0][2]
    liar = Version(1, 1, b"\x07" * 32)
    false = msgspec.structs.replace(honest, version=liar, learner=factories.identity(7).peer_id)
    node.state.manifests[b"\x07" * 32] = false
    with pytest.raises(BadRecord) as failure:
        await asyncio.wait_for(node.versions.obtain(liar, lambda: (swarm.learner.state.me,)), 60)
    assert failure.value.peer == false.learner
    assert node.state.weights.has_content(swarm.content(1).content_hash), "its own way still needs it"
    await obtain(swarm, node, 1)
    assert holds(swarm, node, 1)


async def test_a_content_that_nobody_has_is_walked_around(swarm: Swarm) -> None:
    swarm.grow(3, anchors=[2])
    node = await swarm.newcomer(1)
    swarm.learner.state.weights.drop_content(swarm.content(1).content_hash)
    await obtain(swarm, node, 3)
    assert holds(swarm, node, 2) and holds(swarm, node, 3)
    assert not node.versions._bad, "it may come later"


async def test_what_rotted_here_is_got_again_and_nobody_is_blamed(swarm: Swarm) -> None:
    swarm.grow(4)
    node = await swarm.newcomer(1)
    await obtain(swarm, node, 2)
    await wrong_bits(node.state.weights.state_path(swarm.version(2).hash))
    await obtain(swarm, node, 3)
    assert holds(swarm, node, 3)
    assert not node.state.weights.has_state(swarm.version(2).hash)
    await wrong_bits(node.state.weights.content_path(swarm.content(1).content_hash))
    node.state.weights.drop_state(swarm.version(3).hash)
    await obtain(swarm, node, 4)
    assert holds(swarm, node, 4)
    assert node.state.faults.of(swarm.learner.state.me) == 0


async def test_a_cache_deleted_under_a_node_is_filled_again(swarm: Swarm) -> None:
    swarm.grow(3)
    node = await swarm.newcomer(1)
    await obtain(swarm, node, 2)
    for path in [*node.state.home.states.rglob("*"), *node.state.home.blobs.rglob("*")]:
        if path.is_file():
            path.unlink()
    await obtain(swarm, node, 3)
    assert holds(swarm, node, 3)


async def test_a_model_that_changed_on_disk_says_so(swarm: Swarm) -> None:
    swarm.grow(1)
    node = await swarm.newcomer(1)
    await wrong_bits(swarm.folder / "base")
    with pytest.raises(StoreError, match="base changed; delete it"):
        await obtain(swarm, node, 1)


async def test_a_full_disk_is_ours_to_say(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm.grow(1)
    node = await swarm.newcomer(1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("p2prl.weights.delta.apply", full)
        with pytest.raises(StoreError, match="No space left on device; free some space"):
            await obtain(swarm, node, 1)
    assert node.state.faults.of(swarm.learner.state.me) == 0
    await obtain(swarm, node, 1)
    assert holds(swarm, node, 1)


async def test_whoever_is_cut_short_while_it_applies_leaves_nothing_wrong(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm.grow(2)
    node = await swarm.newcomer(1)
    applying, go_on, real = threading.Event(), threading.Event(), delta.apply

    def slow(*args: object, **more: object) -> None:
        applying.set()
        assert go_on.wait(30)
        real(*args, **more)  # pyright: ignore

    monkeypatch.setattr("p2prl.weights.delta.apply", slow)
    task = asyncio.create_task(obtain(swarm, node, 2))
    await asyncio.to_thread(applying.wait, 30)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert not node.state.weights.has_state(swarm.version(2).hash)
    go_on.set()
    monkeypatch.undo()
    await obtain(swarm, node, 2)
    assert holds(swarm, node, 2)
    assert node.state.in_use == {}


async def test_a_node_that_starts_makes_its_newest_version_again_of_what_is_here(swarm: Swarm) -> None:
    swarm.grow(3)
    node = await swarm.newcomer(1)
    await obtain(swarm, node, 1)
    await obtain(swarm, node, 3)
    await wrong_bits(node.state.weights.state_path(swarm.version(3).hash))
    swarm.network.crash(node.state.me)
    again = swarm.node(1)
    assert again.state.head == swarm.version(1)
    assert "weights_corrupt" in again.state.health
    await again.loop._remake()
    assert again.state.head == swarm.version(3) and holds(swarm, again, 3)


# -- what goes ------------------------------------------------------------------------------------------------------


async def test_old_versions_go_and_what_is_read_or_may_be_followed_stays(swarm: Swarm) -> None:
    swarm.recipe = swarm.recipe.model_copy(update={"learner": swarm.recipe.learner.model_copy(update={"max_age": 4})})
    swarm.learner = swarm.node(0)
    swarm.grow(12, anchors=[3, 6, 9])
    node = swarm.learner
    part, listed = part_paths(node.state.home.blobs, bytes(32))
    part.parent.mkdir()
    for path in (part, listed):
        path.write_bytes(b"of no version here")
    with node.state.reading(swarm.version(2)):
        await node.versions.collect()
        assert node.steps() == [2, 6, 9, 12]
    await node.versions.collect()
    assert node.steps() == [6, 9, 12]
    assert node.contents() == {swarm.content(step).content_hash for step in range(6, 13)}
    assert not part.exists() and not listed.exists()


async def test_a_newcomer_keeps_what_it_has_of_a_version_on_its_way(swarm: Swarm) -> None:
    swarm.grow(3)
    node = await swarm.newcomer(1)
    swarm.learner.state.weights.drop_content(swarm.content(2).content_hash)
    with pytest.raises(PeerError):
        await obtain(swarm, node, 3)
    had = node.contents()
    assert had
    await node.versions.collect()
    assert node.contents() == had


async def test_the_budget_leaves_the_head_alone(swarm: Swarm) -> None:
    swarm.grow(6, anchors=[2, 4])
    small = NodeConfig(storage=StorageSection(cache=1000))
    node = swarm.node(0, small)
    await node.versions.collect()
    assert node.steps() == [6]
    assert node.contents() == {swarm.content(6).content_hash}


async def test_a_step_that_came_to_nothing_leaves_no_file(swarm: Swarm) -> None:
    swarm.grow(2)
    node, folders = swarm.learner, Folders(swarm.learner.state.home.states, swarm.learner.state.home.blobs)
    bases = [DeltaBase(node.state.head, str(node.state.head_path))]
    before = (node.state.weights.held, sorted(node.state.home.cache.rglob("*/*/*/*")))
    made = publish(lambda path: write_version(path, words(7)), folders, bases, anchor=True)
    report = StepReport(Version(1, 3, made.hash), str(made.path), made.contents, 1.0, {}, 1, 1, 1.0, ())
    node.versions.came_to_nothing(report)
    assert (node.state.weights.held, sorted(p for p in node.state.home.cache.rglob("*/*/*/*"))) == before
    known = swarm.manifests[-1][2]
    same = StepReport(known.version, "", known.contents, 1.0, {}, 1, 1, 1.0, ())
    node.versions.came_to_nothing(same)
    assert node.state.weights.held == before[0], "another has the very same"


async def test_any_order_of_arrival_ends_in_the_same_store(swarm: Swarm) -> None:
    """Versions are followed in any order, some never, some twice, and some of their contents came before."""
    swarm.grow(6)
    source, stores = random.Random(0), []
    for number in range(1, 17):
        node = swarm.node(number)
        await swarm.connect(node)
        swarm.teach(node)
        for step in source.sample(range(1, 7), source.randint(0, 3)):  # as of an attempt that failed later
            path = node.state.weights.content_path(swarm.content(step).content_hash)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(swarm.file(swarm.content(step)).read_bytes())
        node.state.weights.look()
        for step in [*source.choices(range(1, 7), k=source.randint(0, 6)), 6]:
            await obtain(swarm, node, step)
            assert holds(swarm, node, step)
        node.loop.adopt(swarm.manifests[-1][0])
        await node.versions.collect()
        stores.append((node.steps(), sorted(node.state.weights.held.contents)))
    assert stores == [([6], sorted(swarm.content(step).content_hash for step in range(1, 7)))] * len(stores)
