"""What a node takes up from its home, also when it rotted or was left half-way."""

import hashlib
import shutil
import struct

import pytest

from p2prl import codec, records
from p2prl.learner.publish import Folders, publish
from p2prl.node.restore import SILENT_S, restore
from p2prl.node.state import NodeState
from p2prl.node.weights_loop import WeightsLoop
from p2prl.paths import Home
from p2prl.recipe import Recipe
from p2prl.records import DeltaBase, Group, Version
from p2prl.simulate.scripted_ports import write_version
from tests import factories
from tests.unit.node.version_nodes import Node, Swarm, holds


def weights(number: int) -> bytes:
    """What the policy is of: a version differs from the one before in one word."""
    return struct.pack("<512H", *[number] * number, *[0] * (512 - number))


def grow(state: NodeState, num_versions: int) -> list[bytes]:
    """Versions with their weights in the home, the first whole, the others deltas; the ids of their manifests."""
    folders = Folders(state.home.states, state.home.blobs)
    parent, parent_id, ids = state.base, bytes(32), []
    bases: tuple[DeltaBase, ...] = ()
    for number in range(1, num_versions + 1):
        made = publish(lambda path, number=number: write_version(path, weights(number)), folders, bases, False)
        version = Version(1, number, made.hash)
        group = hashlib.sha256(b"%d" % number).digest()
        manifest = factories.manifest(
            number, version=version, parent=parent, parent_id=parent_id, contents=made.contents, group_ids=(group,)
        )
        sealed = codec.seal(manifest, state.identity, state.swarm)
        parent, parent_id = version, codec.sealed_id(sealed)
        bases = (DeltaBase(version, str(made.path)),)
        state.chain.add(parent_id, manifest)
        state.manifests[parent_id], state.sealed_manifests[parent_id] = manifest, sealed
        state.head_id = parent_id
        ids.append(parent_id)
    state.weights.open()
    return ids


def keep(state: NodeState, ids: list[bytes]) -> None:
    for manifest_id in ids:
        version = state.manifests[manifest_id].version
        state.store.save_manifest(manifest_id, state.sealed_manifests[manifest_id], version.term, version.step)


def test_the_chain_is_taken_up_at_its_head(make_state) -> None:
    state = make_state()
    ids = grow(state, 3)
    keep(state, ids)
    again = make_state()
    restore(again)
    assert again.head_id == ids[-1]
    assert again.health == {}
    assert again.election.silent_until == 0.0


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_weights_that_rotted_are_dropped_for_those_before(make_state, damage: str) -> None:
    state = make_state()
    ids = grow(state, 3)
    keep(state, ids)
    path = state.head_path
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-1] + b"\xff" if damage == "flipped" else content[: len(content) // 2])
    again = make_state()
    restore(again)
    assert again.head_id == ids[1]
    assert not path.exists()
    assert ("weights_corrupt" in again.health) == (damage != "gone")


def test_a_manifest_under_another_id_does_not_count(make_state) -> None:
    state = make_state()
    ids = grow(state, 2)
    keep(state, ids[:1])
    state.store.save_manifest(bytes(32), state.sealed_manifests[ids[1]], 1, 2)
    again = make_state()
    restore(again)
    assert again.head_id == ids[0]


def test_a_node_whose_store_rotted_keeps_its_chain_and_is_silent_for_a_while(make_state) -> None:
    state = make_state()
    ids = grow(state, 3)
    keep(state, ids)
    state.store.close()
    state.home.database.write_bytes(b"nothing like a database" * 500)
    again = make_state()
    before = again.now()
    restore(again)
    assert again.head_id == ids[-1]
    assert again.health["store_corrupt"][0] == "warning"
    assert again.election.silent_until >= before + SILENT_S


def test_what_a_failure_kept_from_the_store_is_settled_later(make_state) -> None:
    state = make_state()
    ids = grow(state, 3)
    keep(state, ids[:2])  # the disk filled up before the third, and before any mark
    weights_loop = WeightsLoop(state)
    groups = [state.manifests[manifest_id].group_ids[0] for manifest_id in ids]
    assert not any(state.store.has_group(group) for group in groups)
    weights_loop.settle()
    assert all(state.store.has_group(group) for group in groups)
    assert [manifest_id for manifest_id, _ in state.store.manifests()] == ids
    assert state.store.head() == ids[-1]


async def start(node: Node) -> None:
    """What a start does with the home, the first collection of garbage too."""
    node.loop.settle()
    await node.loop.versions.collect()


def run_recipe(swarm: Swarm, learning_rate: float) -> Node:
    """The learner's home again, with that recipe."""
    swarm.close()
    swarm.network._nodes.clear()
    learner = swarm.recipe.learner.model_copy(update={"learning_rate": learning_rate})
    changed = swarm.recipe.model_copy(update={"learner": learner})
    swarm.recipe = Recipe.model_validate(changed.model_dump(by_alias=True))  # a copy would keep the id
    return swarm.node(0)


def sealed_for(swarm: Swarm, group: Group) -> tuple[bytes, bytes]:
    sealed = codec.seal(group, factories.identity(0), swarm.recipe.swarm_id)
    return codec.sealed_id(sealed), sealed


def to_older_folders(home: Home) -> None:
    for folder in (home.states, home.blobs):
        for path in list(folder.iterdir()):
            shutil.move(path, folder.parent / path.name)
        folder.rmdir()


async def test_a_home_that_runs_another_recipe_keeps_what_the_first_one_trained(swarm: Swarm) -> None:
    swarm.grow(3, anchors=[3])
    rate, contents = swarm.recipe.learner.learning_rate, swarm.learner.contents()
    swarm.learner.state.store.save_voted_term(7)
    group = factories.group(0, 1)
    group_id, sealed = sealed_for(swarm, group)
    swarm.learner.state.store.save_group(group, group_id, sealed, own=True, now=1.0)
    second = run_recipe(swarm, rate / 2)
    await start(second)
    assert (second.state.head.step, second.state.weights.held.states, second.contents()) == (0, {}, set())
    assert (second.state.store.own_waiting(), second.state.store.voted_term()) == ([], 0)
    assert second.state.store.group(group_id) is None and "weights_unread" not in second.state.health
    second.state.drop_old()
    again = run_recipe(swarm, rate)
    assert (again.state.head.step, again.steps(), again.contents()) == (3, [1, 2, 3], contents)
    assert [row.id for row in again.state.store.own_waiting()] == [group_id] and again.state.store.voted_term() == 7


async def test_what_another_release_trained_is_kept_and_said(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm.grow(3, anchors=[3])
    state, rate = swarm.learner.state, swarm.recipe.learner.learning_rate
    states, contents = state.weights.held.states, state.weights.held.contents
    monkeypatch.setattr(records, "WIRE_SCHEMA", records.WIRE_SCHEMA + 1)
    newer = run_recipe(swarm, rate)
    await start(newer)
    assert (newer.state.head.step, len(newer.state.manifests)) == (0, 0)
    assert (newer.state.weights.held.states, newer.state.weights.held.contents) == (states, contents)
    level, message, fix, _ = newer.state.health["weights_unread"]
    assert level == "warning" and message.startswith("3 versions in the store can't be read") and "--unread" in fix
    monkeypatch.undo()
    again = run_recipe(swarm, rate)
    assert (again.state.head.step, again.steps()) == (3, [1, 2, 3])


async def test_a_home_of_an_older_release_starts_and_says_what_it_can_not_read(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights in one folder for all recipes, manifests and groups of another schema."""
    swarm.grow(3, anchors=[3])
    home, rate = swarm.learner.state.home, swarm.recipe.learner.learning_rate
    for counter, state in ((1, "own"), (2, "admitted")):
        group_id, sealed = sealed_for(swarm, group := factories.group(0, counter))
        swarm.learner.state.store.save_group(group, group_id, sealed, own=True, now=1.0)
        if state == "admitted":
            swarm.learner.state.store.set_state([group_id], state, "", 1.0)
    to_older_folders(home)
    monkeypatch.setattr(records, "WIRE_SCHEMA", records.WIRE_SCHEMA + 1)
    newer = run_recipe(swarm, rate)
    await start(newer)
    assert "weights_unread" in newer.state.health and newer.state.head.step == 0
    assert newer.state.store.own_waiting() == newer.state.store.admitted_untrained() == []
    assert len(list(home.of(b"").states.glob("??/*"))) == 3


async def test_weights_of_a_home_of_an_older_release_move_to_their_swarm(swarm: Swarm) -> None:
    """There they lay in one folder for all recipes; what is of none that is known here stays there."""
    swarm.grow(3, anchors=[3])
    home = swarm.learner.state.home
    above = home.of(b"")
    to_older_folders(home)
    stranger = above.states / "ab" / ("ab" * 32)
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_bytes(b"of another recipe")
    again = run_recipe(swarm, swarm.recipe.learner.learning_rate)
    await start(again)
    assert (again.state.head.step, again.steps()[-1]) == (3, 3) and holds(swarm, again, 3)
    assert stranger.read_bytes() == b"of another recipe"
    assert [path for path in above.blobs.glob("??/*")] == []
    assert again.state.weights.state_path(swarm.version(3).hash).is_relative_to(home.states)
