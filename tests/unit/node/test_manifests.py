"""What of the chain stays in memory, what is forgotten, what others still get from us."""

import asyncio
import math
from collections.abc import Callable

import msgspec
import pytest

from p2prl import codec
from p2prl.errors import BadRecord, Unreachable
from p2prl.models.state import Payload, write_payloads
from p2prl.node import manifests
from p2prl.node.manifests import SETTLED, ManifestExchange, ManifestsRequest
from p2prl.node.state import NodeState
from p2prl.records import Manifest, Version, Vote
from p2prl.simulate.scripted_ports import write_version
from tests import factories


def grow(state: NodeState, num: int, *, parent: bytes = bytes(32), salt: str = "", anchors: range = range(0)):
    """A branch of the chain, in memory and in the store; the ids."""
    ids = []
    for _ in range(num):
        before = state.chain.link(parent)
        step = before.version.step + 1
        digest = codec.content_hash(f"{salt} {step}".encode())
        plain = factories.manifest(step, group_ids=(digest,), group_rewards=(0.5,), group_answers=(2,))
        version = Version(1, step, digest)
        contents = (factories.content(digest, 10, before.version),)
        contents += (factories.anchor(step),) if step in anchors else ()
        made = msgspec.structs.replace(
            plain, version=version, parent=before.version, parent_id=parent, contents=contents, num_groups=step
        )
        sealed = codec.seal(made, state.identity, state.swarm)
        parent = codec.sealed_id(sealed)
        state.chain.add(parent, made)
        state.manifests[parent], state.sealed_manifests[parent] = made, sealed
        state.store.save_manifest(parent, sealed, 1, step)
        ids.append(parent)
    return ids


def steps(found: dict[bytes, Manifest]) -> list[int]:
    return sorted(manifest.version.step for manifest in found.values())


@pytest.fixture
def state(make_state: Callable[[], NodeState]) -> NodeState:
    made = make_state()
    learner = made.recipe.learner.model_copy(update={"max_age": 8})
    made.recipe = made.recipe.model_copy(update={"learner": learner})
    return made


def test_the_newest_of_the_chain_are_in_memory_and_all_of_it_in_the_store(state: NodeState) -> None:
    exchange = ManifestExchange(state)
    ids = grow(state, 300, anchors=range(250, 300, 20))
    state.head_id = ids[-1]
    exchange.prune()
    kept = 8 + SETTLED + 1
    assert steps(state.manifests) == list(range(300 - kept + 1, 301))
    assert state.sealed_manifests.keys() == state.manifests.keys()
    assert len(state.store.manifests()) == 300
    assert all(state.age_of(state.chain.link(ids[-1 - age]).version) == age for age in range(300))
    assert [manifest.version.step for _, manifest in state.line()] == list(range(300, 300 - kept, -1))
    assert state.sealed_manifest(ids[0]) is not None
    exchange.prune()
    assert len(state.manifests) == kept


def test_what_peers_take_stays_in_memory_with_all_since(state: NodeState) -> None:
    """Its pieces could not be served, and what leads on from it would go."""
    exchange = ManifestExchange(state)
    ids = grow(state, 300, anchors=range(250, 300, 20))
    state.head_id = ids[-1]
    taken = state.manifests[ids[150]].contents[0].content_hash
    exchange.prune(frozenset({taken}))
    assert steps(state.manifests) == list(range(151, 301))
    exchange.prune()
    assert len(state.manifests) == 8 + SETTLED + 1


@pytest.mark.parametrize("rank", [0, 4, 1024])
def test_a_content_is_bounded_by_what_the_recipe_makes_of_the_base(state: NodeState, rank: int) -> None:
    """Adapters (rank 0: none) may be larger than the model, but never larger than their rank makes them."""
    payloads = [Payload(f"layers.0.{name}.weight", (64, 32), lambda: memoryview(bytes(4096))) for name in "qk"]
    write_payloads(state.base_path, payloads)
    if rank:
        lora = state.recipe.learner.lora.model_copy(update={"rank": rank, "targets": ("q",)})
        learner = state.recipe.learner.model_copy(update={"training": "lora", "lora": lora})
        state.recipe = state.recipe.model_copy(update={"learner": learner})
    most = 2 * rank * (64 + 32) if rank else 2 * 4096
    exchange = ManifestExchange(state)
    (made,) = grow(state, 1)
    for num_bytes, is_refused in ((most, False), (most + 2 * 2**13, True)):
        content = factories.content(b"of that size", num_bytes)
        manifest = msgspec.structs.replace(state.manifests[made], contents=(content,))
        why = "announces a content of" if is_refused else "no majority of votes"  # what is looked at next
        with pytest.raises(BadRecord, match=why):
            exchange.keep(made, manifest, b"")


def test_memory_goes_back_to_the_anchors_but_never_without_bound(
    state: NodeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = ManifestExchange(state)
    ids = grow(state, 300, anchors=range(100, 300, 1000))
    state.head_id = ids[-1]
    sizes = [len(state.sealed_manifests[manifest_id]) for manifest_id in reversed(ids)]
    monkeypatch.setattr(manifests, "MOST_LINE_BYTES", sum(sizes[:250]))
    exchange.prune()
    assert len(state.manifests) == 250


def test_an_anchor_that_somebody_takes_slowly_stays_however_many_versions_come(state: NodeState) -> None:
    """A joiner that took longer than 1024 versions lost what it had begun with."""
    exchange = ManifestExchange(state)
    ids = grow(state, 1300, anchors=range(50, 1300, 40))
    state.head_id = ids[-1]
    anchor = state.manifests[ids[49]].contents[-1].content_hash
    exchange.prune(frozenset({anchor}))
    assert steps(state.manifests) == list(range(50, 1301))


def total(state: NodeState, ids: list[bytes]) -> int:
    return sum(len(state.sealed_manifests[manifest_id]) for manifest_id in ids)


@pytest.mark.parametrize("bound", ["bytes", "count"])
def test_of_side_branches_the_least_are_forgotten(
    state: NodeState, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    exchange = ManifestExchange(state)
    ids = grow(state, 20)
    state.head_id = ids[9]
    ahead = ids[10:]
    short, long = (grow(state, num, parent=ids[9], salt=name) for num, name in ((5, "short"), (8, "long")))
    if bound == "bytes":
        monkeypatch.setattr(manifests, "MOST_BESIDE_BYTES", total(state, [*ahead, *long[:3]]))
    else:
        monkeypatch.setattr(manifests, "MOST_BESIDE", 13)
    exchange.prune()
    left = {*ids, *state.manifests} - {*ids}
    assert set(ids) <= state.manifests.keys() and len(left) == 3
    assert all(state.chain.link(other).parent_id in {ids[9], *left} for other in left), "they hang together"
    gone = {*short, *long} - left
    assert not any(other in state.chain or state.store.manifest(other) for other in gone)
    assert state.sealed_manifests.keys() == state.manifests.keys()


class Giver:
    """A peer that serves these manifests, whatever is asked for."""

    def __init__(self, exchange: ManifestExchange, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[bytes] = []
        self.num_given = 0
        monkeypatch.setattr(exchange._state.transport, "stream", self._stream)

    async def _stream(self, peer: str, name: str, body: bytes, max_bytes: int):
        for item in self.given:
            self.num_given += 1
            yield item


def stranger(state: NodeState, num: int, salt: str = "", **over: object) -> list[bytes]:
    """A branch from the base that another peer signed, oldest first; nothing of it is here."""
    key, before, parent, made = factories.identity(2), state.base, bytes(32), []
    vote = codec.seal(Vote(1, key.peer_id, key.peer_id, (key.peer_id,)), key, state.swarm)
    for step in range(1, num + 1):
        digest = codec.content_hash(f"{salt} {step}".encode())
        manifest = factories.manifest(
            step, version=Version(1, step, digest), parent=before, parent_id=parent, learner=2,
            contents=(factories.content(digest, 10, before),), group_ids=(digest,), group_rewards=(0.5,),
            group_answers=(2,), num_groups=step, votes=(vote,),
        )  # fmt: skip
        made.append(codec.seal(msgspec.structs.replace(manifest, **over), key, state.swarm))
        before, parent = manifest.version, codec.sealed_id(made[-1])
    return made


async def test_what_the_recipe_forbids_is_refused_at_its_first_manifest(
    state: NodeState, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when hundreds of megabytes of it have come."""
    branch = stranger(state, 200)
    exchange = ManifestExchange(state)
    giver = Giver(exchange, monkeypatch)
    giver.given = branch[::-1]
    head = codec.sealed_id(branch[-1])
    learner = state.recipe.learner.model_copy(update={"learners": (state.me,)})
    open_recipe, state.recipe = state.recipe, state.recipe.model_copy(update={"learner": learner})
    with pytest.raises(BadRecord, match="does not let this peer publish"):
        await exchange.fetch(head, ("giver",))
    assert giver.num_given == 1
    state.recipe = open_recipe
    with pytest.raises(BadRecord, match="not asked for"):
        await exchange.fetch(bytes([7]) * 32, ("giver",))
    assert giver.num_given == 2
    large = (factories.content(b"large", 2**41),)
    giver.given = stranger(state, 5, contents=large)[::-1]
    with pytest.raises(BadRecord, match="announces a content of"):
        await exchange.fetch(codec.sealed_id(giver.given[0]), ("giver",))
    giver.given = stranger(state, 5, published_at=math.nan)[::-1]
    with pytest.raises(BadRecord, match="time is no number"):
        await exchange.fetch(codec.sealed_id(giver.given[0]), ("giver",))
    assert (giver.num_given, len(state.manifests)) == (4, 0)


async def test_what_is_followed_stays_until_another_head_is(state: NodeState, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newcomer's whole chain lies beside its head, and what else comes meanwhile must not cut it."""
    monkeypatch.setattr(manifests, "MOST_BESIDE", 10)
    exchange = ManifestExchange(state)
    giver = Giver(exchange, monkeypatch)
    followed, other, next_one = (stranger(state, 100, salt) for salt in ("followed", "other", "next"))
    giver.given = followed[::-1]
    await exchange.fetch(codec.sealed_id(followed[-1]), ("giver",))
    assert len(state.manifests) == 100
    giver.given = other[::-1]
    await exchange.learn(("giver",), Version(1, 100, codec.content_hash(b"other 100")))
    assert len(state.manifests) == 110 and codec.sealed_id(followed[-1]) in state.chain
    giver.given = next_one[::-1]
    await exchange.fetch(codec.sealed_id(next_one[-1]), ("giver",))
    assert len(state.manifests) == 110 and codec.sealed_id(next_one[-1]) in state.chain
    assert codec.sealed_id(followed[-1]) not in state.chain
    monkeypatch.setattr(manifests, "MAX_MANIFEST_BYTES", sum(map(len, followed)) - 1)
    giver.given = followed[::-1]
    with pytest.raises(BadRecord, match="are over"):
        await exchange.fetch(codec.sealed_id(followed[-1]), ("giver",))
    assert len(state.manifests) <= 110


def test_side_branches_that_are_too_old_to_win_are_forgotten(state: NodeState) -> None:
    exchange = ManifestExchange(state)
    ids = grow(state, 100)
    old = grow(state, 20, parent=ids[4], salt="old")
    young = grow(state, 5, parent=ids[94], salt="young")
    state.head_id = ids[-1]
    ages = {other: state.age_of(state.chain.link(other).version) for other in young}
    forgotten = [state.chain.link(other).version for other in old]
    exchange.prune()
    assert all(other not in state.chain and other not in state.manifests for other in old)
    assert all(state.store.manifest(other) is None for other in old)
    assert all(state.age_of(version) is None for version in forgotten)
    assert {other: state.age_of(state.chain.link(other).version) for other in young} == ages
    assert all(other in state.manifests for other in young)
    assert state.chain.best((*young, *ids)) == ids[-1]


async def served(exchange: ManifestExchange, head: bytes, known: tuple[bytes, ...]) -> list[bytes]:
    request = codec.encode(ManifestsRequest(head, known))
    return [codec.sealed_id(item) async for item in exchange._serve("somebody", request)]


async def test_a_late_joiner_gets_also_what_is_only_in_the_store(state: NodeState) -> None:
    exchange = ManifestExchange(state)
    ids = grow(state, 120, anchors=range(100, 120, 5))
    state.head_id = ids[-1]
    exchange.prune()
    assert ids[0] not in state.manifests
    assert await served(exchange, ids[-1], (bytes(32),)) == ids[::-1]
    assert await served(exchange, ids[-1], (ids[50],)) == ids[:50:-1]
    with pytest.raises(Unreachable, match="does not know that head"):
        await served(exchange, b"\x01" * 32, ())
    state.store.forget_manifests([ids[3]])
    with pytest.raises(Unreachable, match="was lost here"):
        await served(exchange, ids[-1], ())


async def test_a_branch_forgotten_while_it_is_served_ends_quietly(state: NodeState) -> None:
    exchange = ManifestExchange(state)
    ids = grow(state, 100)
    side = grow(state, 10, parent=ids[0], salt="side")
    state.head_id = ids[-1]
    items = exchange._serve("somebody", codec.encode(ManifestsRequest(side[-1], ())))
    assert codec.sealed_id(await anext(items)) == side[-1]
    exchange.prune()
    with pytest.raises(Unreachable, match="was lost here"):
        await asyncio.wait_for(anext(items), 5)


def test_lies_about_sizes_are_refused_before_anything_is_kept(state: NodeState) -> None:
    write_version(state.base_path, bytes(1000))
    exchange = ManifestExchange(state)
    (made,) = grow(state, 1)
    manifest = state.manifests[made]
    huge = msgspec.structs.replace(
        manifest.contents[0], content_bytes=2**40 - 1, pieces=tuple(bytes(32) for _ in range(4))
    )
    fits = msgspec.structs.replace(manifest.contents[0], content_bytes=2**22 * 4, pieces=(bytes(32),) * 4)
    for content in (huge, fits):
        lying = msgspec.structs.replace(manifest, contents=(content,), version=Version(1, 1, b"\x07" * 32))
        with pytest.raises(BadRecord, match="announces a content of"):
            exchange.keep(b"\x07" * 32, lying, b"")
    assert len(state.chain) == 2
