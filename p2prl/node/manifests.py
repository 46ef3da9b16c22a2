"""Manifests between nodes: asked for back to one that we know, checked, kept, served.

In: manifests of peers and our own. Out: the chain, `NodeState.manifests`, the store.

Invariants: what is kept is signed, allowed by the recipe, mandated where a term begins, and its sizes are sane. In memory
is the part of the chain that plans and the page need; older ones are in the store. Side branches that are too old to win
are forgotten, and of the others what is least in chain order, down to a bound; but for the one that is followed, which
has its own. Nobody who drips keeps us: all has a deadline.
"""

import asyncio
import heapq
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice

import msgspec

from p2prl import codec
from p2prl.errors import BadRecord, PeerError, Unreachable
from p2prl.models.lora_rule import lora_of
from p2prl.node.state import NodeState
from p2prl.records import Manifest, Version, Wire
from p2prl.swarm.head import OrderKey, order_key
from p2prl.swarm.mandate import check_mandate
from p2prl.weights import chain
from p2prl.weights.bounds import most_bytes

MAX_MANIFESTS = 4096  # in one stream; a longer chain takes several
MAX_MANIFEST_BYTES = 256 * 2**20  # of one chain
MANIFESTS_S = 300.0  # for the manifests of one peer
YIELD_EVERY = 32
SETTLED = 64  # versions whose marks are written again after a failure
MOST_LINE_BYTES = 64 * 2**20  # of the head's chain in memory, whatever its learner publishes and peers take
MOST_BESIDE, MOST_BESIDE_BYTES = 4096, 16 * 2**20  # manifests of all side branches, but for the followed one


class ManifestsRequest(Wire, frozen=True):
    """Newest first from `head` down to any of `known`."""

    head: bytes
    known: tuple[bytes, ...]
    version: Version | None = None  # given where only the version of the head is known


class ManifestExchange:
    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._followed = self._arriving = codec.ZERO_HASH  # a head; the newest that came of the next one
        base = state.base_path
        self.most_bytes = chain.MAX_VERSION_BYTES
        if base.exists():
            self.most_bytes = most_bytes(base, lora_of(state.recipe.learner))
        state.transport.serve_stream("manifests", self._serve)

    async def fetch(self, head: bytes, peers: tuple[str, ...]) -> None:
        """Manifests from `head` back to one that we know, checked and added oldest first.

        They stay until another head is fetched. Raises PeerError.
        """
        known = self._state.chain
        try:
            if head not in known:
                await self._fetch(ManifestsRequest(head, self._known()), peers, lambda: head in known)
            self._followed = head
        finally:
            self._arriving = codec.ZERO_HASH
            self._forget_least()
        if head not in known:
            raise BadRecord(f"the manifests of the head are over {MAX_MANIFEST_BYTES} bytes")

    async def learn(self, peers: tuple[str, ...], version: Version) -> None:
        """The manifests that lead to a version that somebody drew under, from whoever has them. Raises PeerError."""
        known = self._state.chain
        if known.find(version) is None:
            request = ManifestsRequest(codec.ZERO_HASH, self._known(), version)
            try:
                await self._fetch(request, peers, lambda: known.find(version) is not None)
            finally:
                self._forget_least()

    def _known(self) -> tuple[bytes, ...]:
        return tuple(dict.fromkeys([self._state.head_id, *list(self._state.manifests)[-64:]]))

    async def _fetch(self, request: ManifestsRequest, peers: tuple[str, ...], done: Callable[[], bool]) -> None:
        failure: PeerError = Unreachable("nobody gives the manifests of the head")
        for peer in dict.fromkeys(peers):
            try:
                found = await asyncio.wait_for(self._take(peer, request), MANIFESTS_S)
                for number, data in enumerate(reversed(found)):
                    if number % YIELD_EVERY == 0:
                        await asyncio.sleep(0)  # thousands, where a node joins late
                    sealed = self._unsealed(data)
                    self.keep(sealed.id, sealed.record, data)
                    if request.version is None:
                        self._arriving = sealed.id
                if done():
                    return
            except TimeoutError:
                failure = Unreachable(f"the manifests did not come within {MANIFESTS_S:.0f} s", peer=peer)
            except PeerError as error:
                failure = error
        raise failure

    async def _take(self, peer: str, request: ManifestsRequest) -> list[bytes]:
        """Newest first down to one whose parent we know, or to where `peer` has no more.

        As bytes: a decoded manifest takes four times as much, and these may be lies.
        """
        state, left, parent_id = self._state, MAX_MANIFEST_BYTES, codec.ZERO_HASH
        found: list[bytes] = []
        while True:
            num_before = len(found)
            async for item in state.transport.stream(peer, "manifests", codec.encode(request), max_bytes=left):
                sealed = self._unsealed(item)
                if found and parent_id != sealed.id:
                    raise BadRecord("a manifest that is not the parent of the one before", peer=peer)
                if not found and request.version is None and request.head != sealed.id:
                    raise BadRecord("a manifest that was not asked for", peer=peer)
                self._check(sealed.record)
                found.append(item)
                left, parent_id = left - len(item), sealed.record.parent_id
                if len(found) - num_before > MAX_MANIFESTS:
                    raise BadRecord("more manifests than the limit", peer=peer)
            if len(found) - num_before < MAX_MANIFESTS or parent_id in state.chain:
                return found
            request = ManifestsRequest(parent_id, request.known)

    def _unsealed(self, data: bytes) -> codec.Sealed[Manifest]:
        return codec.unseal(data, Manifest, self._state.swarm, owner=lambda manifest: manifest.learner)

    def _check(self, manifest: Manifest) -> None:
        """What can be told without its parent. Raises BadRecord."""
        chain.check(manifest, self.most_bytes)
        allowed = self._state.recipe.learner.learners
        if allowed and manifest.learner not in allowed:
            raise BadRecord("the recipe does not let this peer publish", peer=manifest.learner)
        if not math.isfinite(manifest.published_at):
            raise BadRecord("a manifest whose time is no number", peer=manifest.learner)

    def keep(self, manifest_id: bytes, manifest: Manifest, data: bytes) -> None:
        """Add a verified manifest to the chain and the store."""
        state = self._state
        self._check(manifest)
        parent = state.chain.link(manifest.parent_id) if manifest.parent_id in state.chain else None
        if parent is None or (parent.version.term, parent.learner) != (manifest.version.term, manifest.learner):
            check_mandate(manifest, state.swarm)
        if state.chain.add(manifest_id, manifest):
            state.manifests[manifest_id] = manifest
            state.sealed_manifests[manifest_id] = data
            term = manifest.version.term
            if term > max((known for known, _ in state.term_changes), default=0):
                state.term_changes = [*state.term_changes[-99:], (term, state.clock.unix())]
            state.store.save_manifest(manifest_id, data, manifest.version.term, manifest.version.step)

    def prune(self, pulled: frozenset[bytes] = frozenset()) -> None:
        """Forget what the head's chain left behind, but for what leads on from contents that peers take from us.

        Not while a branch is followed: it might be among it.
        """
        state = self._state
        max_age = state.recipe.learner.max_age
        dead = state.chain.prune(state.head_id, max_age + SETTLED)
        state.store.forget_manifests(dead)
        sizes = {name: len(data) for name, data in state.sealed_manifests.items()}
        kept = _newest(list(state.line()), sizes, max_age, pulled)
        for manifest_id in list(state.manifests):
            gone = manifest_id not in state.chain
            if gone or (manifest_id not in kept and state.chain.is_on_chain(state.head_id, manifest_id)):
                del state.manifests[manifest_id]
                state.sealed_manifests.pop(manifest_id, None)
        self._forget_least()

    def _forget_least(self) -> None:
        """Of side branches, as far as they are too much."""
        state = self._state
        beside: dict[bytes, _Beside] = {}
        for manifest_id, data in state.sealed_manifests.items():
            if manifest_id in state.chain and not state.chain.is_on_chain(state.head_id, manifest_id):
                link = state.chain.link(manifest_id)
                beside[manifest_id] = _Beside(link.parent_id, order_key(link.num_groups, link.version), len(data))
        spared: set[bytes] = set()
        for head in {self._followed, self._arriving} & beside.keys():
            branch = {name for name in state.chain.ancestors(head) if name in beside}
            if sum(beside[name].num_bytes for name in branch) <= MAX_MANIFEST_BYTES:
                spared |= branch
        gone = _surplus(beside, spared)
        state.chain.drop(gone)
        state.store.forget_manifests(gone)
        for manifest_id in gone:
            del state.manifests[manifest_id], state.sealed_manifests[manifest_id]

    async def _serve(self, peer: str, body: bytes) -> AsyncIterator[bytes]:
        request = codec.decode(body, ManifestsRequest)
        state = self._state
        head = request.head if request.version is None else state.chain.find(request.version)
        if head is None or head not in state.chain:
            raise Unreachable("this node does not know that head")
        known = set(request.known)
        for manifest_id in tuple(islice(state.chain.ancestors(head), MAX_MANIFESTS)):  # pruned meanwhile, perhaps
            if manifest_id in known or manifest_id == codec.ZERO_HASH:
                return
            sealed = state.sealed_manifest(manifest_id)
            if sealed is None:
                raise Unreachable("a manifest of that chain was lost here")
            yield sealed


class _Beside(msgspec.Struct, frozen=True):
    """A manifest that is not on the head's chain."""

    parent_id: bytes
    key: OrderKey
    num_bytes: int


def _surplus(beside: Mapping[bytes, _Beside], spared: AbstractSet[bytes]) -> list[bytes]:
    """What goes of them, leaf by leaf, so that what stays hangs together. With each of `spared` are its ancestors."""
    loose = {name: each for name, each in beside.items() if name not in spared}
    num_bytes = sum(each.num_bytes for each in loose.values())
    num_children = Counter(each.parent_id for each in beside.values())
    leaves = [(each.key, name) for name, each in loose.items() if not num_children[name]]
    heapq.heapify(leaves)
    gone: list[bytes] = []
    while leaves and (num_bytes > MOST_BESIDE_BYTES or len(loose) - len(gone) > MOST_BESIDE):
        _, name = heapq.heappop(leaves)
        parent_id = loose[name].parent_id
        gone.append(name)
        num_bytes -= loose[name].num_bytes
        num_children[parent_id] -= 1
        if parent_id in loose and not num_children[parent_id]:
            heapq.heappush(leaves, (loose[parent_id].key, parent_id))
    return gone


def _newest(
    line: Sequence[tuple[bytes, Manifest]], sizes: Mapping[bytes, int], max_age: int, pulled: frozenset[bytes]
) -> set[bytes]:
    """Back to the second newest anchor and to what peers take, and at least as far as ages and settling go.

    Of `sizes` in bytes no more than MOST_LINE_BYTES: who takes what is older than that begins with another anchor.
    """
    since_pulled = max(
        (n for n, (_, m) in enumerate(line) if any(c.content_hash in pulled for c in m.contents)), default=-1
    )
    kept: set[bytes] = set()
    num_anchors = num_bytes = 0
    for number, (manifest_id, manifest) in enumerate(line):
        num_bytes += sizes.get(manifest_id, 0)
        is_enough = number > max(since_pulled, max_age + SETTLED) and num_anchors >= chain.KEEP_ANCHORS
        if is_enough or (kept and num_bytes > MOST_LINE_BYTES):
            break
        kept.add(manifest_id)
        num_anchors += chain.has_anchor(manifest)
    return kept
