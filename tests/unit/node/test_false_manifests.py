"""What a stranger says of an honest version, where anybody may publish: it harms nobody but itself."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2prl import codec
from p2prl.errors import BadRecord
from p2prl.records import Content, Vote
from p2prl.weights.contents import content_of
from p2prl.weights.partial import Partial, part_bytes
from p2prl.weights.store import path_of
from tests.unit.node.version_nodes import Node, Swarm, holds, obtain


def say(swarm: Swarm, stranger: Node, step: int, contents: Sequence[Content]) -> bytes:
    """It published that version too, on its own vote; the id of its manifest, which it serves."""
    me = stranger.state.me
    term = swarm.version(step).term
    vote = codec.seal(Vote(term, me, me, (me,)), stranger.state.identity, swarm.recipe.swarm_id)
    honest = swarm.manifests[step - 1][2]
    made = msgspec.structs.replace(honest, learner=me, contents=tuple(contents), votes=(vote,))
    data = codec.seal(made, stranger.state.identity, swarm.recipe.swarm_id)
    name, state = codec.sealed_id(data), stranger.state
    state.chain.add(name, made)
    state.manifests[name], state.sealed_manifests[name] = made, data
    return name


async def pair(swarm: Swarm) -> tuple[Node, Node]:
    node, stranger = swarm.node(1), swarm.node(2)
    await swarm.connect(node, stranger)
    swarm.teach(node)
    return node, stranger


@pytest.mark.parametrize(
    "lie",
    [{"content_bytes": 1, "pieces": (codec.content_hash(b"x"),)}, {"pieces": (bytes(32),)}, {"content_bytes": 1}],
    ids=["short", "other pieces", "other size"],
)
@pytest.mark.parametrize("kind", ["anchor", "delta"])
async def test_an_honest_name_with_another_size_or_list_is_refused(
    swarm: Swarm, kind: str, lie: dict[str, Any]
) -> None:
    swarm.grow(2, anchors=[1])
    node, stranger = await pair(swarm)
    honest = swarm.content(1, kind)
    Partial.open(node.state.home.blobs, honest).close()
    false = say(swarm, stranger, 1, [msgspec.structs.replace(honest, **lie)])
    with pytest.raises(BadRecord, match="announces a content under a name that is not that of its pieces") as failure:
        await node.loop.manifests.fetch(false, (stranger.state.me,))
    assert failure.value.peer == stranger.state.me
    assert false not in node.state.chain and false not in node.state.manifests
    await obtain(swarm, node, 2, stranger)
    assert holds(swarm, node, 2)
    assert not node.versions._bad and node.state.faults.of(swarm.learner.state.me) == 0


async def test_a_strangers_own_content_is_tried_and_bars_itself_alone(swarm: Swarm, tmp_path: Path) -> None:
    """One byte is cheaper than an honest delta, and comes first."""
    swarm.grow(2)
    node, stranger = await pair(swarm)
    (tmp_path / "lie").write_bytes(b"x")
    lie = content_of(tmp_path / "lie", "delta", swarm.base)
    path = path_of(stranger.state.home.blobs, lie.content_hash)
    path.parent.mkdir(parents=True)
    (tmp_path / "lie").rename(path)
    stranger.state.weights.look()
    await node.loop.manifests.fetch(say(swarm, stranger, 1, [lie]), (stranger.state.me,))
    await obtain(swarm, node, 2, stranger)
    assert holds(swarm, node, 2)
    assert [way[0] for way in node.versions._bad] == [lie.content_hash] and lie.content_hash not in node.contents()
    assert node.state.faults.of(stranger.state.me) == 1 and node.state.faults.of(swarm.learner.state.me) == 0
    path = node.versions.plan(swarm.version(1))
    assert path is not None and [way.content for way in path.ways] == [swarm.content(1)]


async def test_what_came_of_an_honest_content_outlives_false_names_of_it(swarm: Swarm) -> None:
    swarm.grow(1)
    node, stranger = await pair(swarm)
    honest = swarm.content(1)
    partial = Partial.open(node.state.home.blobs, honest)
    assert partial.put(0, swarm.file(honest).read_bytes())
    partial.close()
    node.state.weights.look()
    false = say(swarm, stranger, 1, [msgspec.structs.replace(honest, content_bytes=1)])
    with pytest.raises(BadRecord):
        await node.loop.manifests.fetch(false, (stranger.state.me,))
    assert part_bytes(node.state.home.blobs, honest.content_hash) == honest.content_bytes
    await obtain(swarm, node, 1, stranger)
    assert holds(swarm, node, 1)
    assert node.state.transport.traffic().received.get("weights", 0) == 0, "not fetched again"
