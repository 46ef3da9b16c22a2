"""Follows the best head: manifests back to what we know, pieces from any holder, the engine and the standby's learner.

In: leases (they name a head), manifests and pieces of peers. Out: `NodeState.head_id`; new versions in the engine.

Invariants: a head is adopted only when its whole chain was checked and its weights verified; the old one stays in use
until then. Groups of a losing branch go back to the buffer.
"""

import asyncio
from collections.abc import AsyncIterator

import msgspec

from p2prl import codec
from p2prl.errors import BadRecord, PeerError, StoreError, Unreachable
from p2prl.node.state import NodeState
from p2prl.records import Lease, Manifest, Wire
from p2prl.status import StepRow
from p2prl.swarm.head import MissingParent
from p2prl.swarm.mandate import check_mandate
from p2prl.weights import pieces

MAX_MANIFESTS = 4096
RETRY_S = 1.0


class ManifestsRequest(Wire, frozen=True):
    """Newest first from `head` down to any of `known`."""

    head: bytes
    known: tuple[bytes, ...]


class WeightsLoop:
    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._target: Lease | None = None
        self._wake = asyncio.Event()
        self.adopted = asyncio.Event()  # set with each new head
        state.transport.subscribe("lease", self._on_lease)
        state.transport.serve_stream("manifests", self._serve_manifests)
        state.transport.serve_stream(pieces.METHOD, self._serve_piece)

    def _on_lease(self, publisher: str, data: bytes) -> None:
        lease = codec.unseal(data, Lease, self._state.swarm, owner=lambda lease: lease.leader).record
        if lease.manifest_id != codec.ZERO_HASH and lease.manifest_id != self._state.head_id:
            self._target = lease
            self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            target = self._target
            if target is None or target.leader == self._state.me or target.manifest_id == self._state.head_id:
                continue
            try:
                await self._follow(target)
            except PeerError as error:
                self._state.blame(error.code)
                self._state.emit("log", level="debug", event="head not followed", why=str(error)[:200])
                await asyncio.sleep(RETRY_S)
                self._wake.set()

    async def _follow(self, lease: Lease) -> None:
        state = self._state
        if lease.manifest_id not in state.chain:
            await self._fetch_manifests(lease.manifest_id, (lease.leader, *sorted(state.live() - {state.me})))
        if state.chain.best((lease.manifest_id, state.head_id)) != lease.manifest_id:
            return
        manifest = state.manifests[lease.manifest_id]
        await pieces.fetch(state.transport, manifest, lambda: self._holders(lease.leader), state.home.blobs)
        if state.chain.best((lease.manifest_id, state.head_id)) == lease.manifest_id:
            self.adopt(lease.manifest_id)

    def _holders(self, leader: str) -> tuple[str, ...]:
        others = sorted(self._state.live() - {self._state.me, leader})
        return (leader, *others)

    async def _fetch_manifests(self, head: bytes, peers: tuple[str, ...]) -> None:
        """Manifests from `head` back to one that we know, checked and added oldest first."""
        state = self._state
        known = tuple(dict.fromkeys([state.head_id, *list(state.manifests)[-64:]]))
        body = codec.encode(ManifestsRequest(head, known))
        failure: PeerError = Unreachable("nobody gives the manifests of the head")
        for peer in dict.fromkeys(peers):
            try:
                found = []
                async for item in state.transport.stream(peer, "manifests", body, max_bytes=256 * 2**20):
                    found.append((item, codec.unseal(item, Manifest, state.swarm, owner=lambda m: m.learner)))
                    if len(found) > MAX_MANIFESTS:
                        raise BadRecord("more manifests than the limit", peer=peer)
                for data, sealed in reversed(found):
                    self.keep(sealed.id, sealed.record, data)
                if head in state.chain:
                    return
            except MissingParent as error:
                failure = error
            except PeerError as error:
                failure = error
        raise failure

    def keep(self, manifest_id: bytes, manifest: Manifest, data: bytes) -> None:
        """Add a verified manifest to the chain and the store."""
        state = self._state
        pieces.check_sizes(manifest)
        allowed = state.recipe.learner.learners
        if allowed and manifest.learner not in allowed:
            raise BadRecord("the recipe does not let this peer publish", peer=manifest.learner)
        parent = state.manifests.get(manifest.parent_id)
        if parent is None or (parent.version.term, parent.learner) != (manifest.version.term, manifest.learner):
            check_mandate(manifest, state.swarm)
        if state.chain.add(manifest_id, manifest):
            state.manifests[manifest_id] = manifest
            state.sealed_manifests[manifest_id] = data
            term = manifest.version.term
            if term > max((known for known, _ in state.term_changes), default=0):
                state.term_changes = [*state.term_changes[-99:], (term, state.clock.unix())]
            state.store.save_manifest(manifest_id, data, manifest.version.term, manifest.version.step)

    def adopt(self, manifest_id: bytes) -> None:
        """Make a version whose weights we hold the head."""
        state = self._state
        before = state.head_id
        state.head_id = manifest_id
        ancestor = state.chain.common_ancestor(before, manifest_id)
        returned = state.chain.rollback(before, manifest_id)
        if returned:
            state.store.unmark_trained(returned)
            state.wanted.reopen(returned)
        for link in state.chain.branch(ancestor, manifest_id):
            group_ids = state.manifests[link].group_ids
            state.store.mark_trained(group_ids)
            state.wanted.forget(group_ids)
        metrics = state.manifests[manifest_id].metrics
        if "eval_reward" in metrics:
            state.eval_reward, state.eval_step = metrics["eval_reward"], int(metrics.get("eval_step", 0))
        state.store.save_head(manifest_id)
        for link in state.chain.branch(ancestor, manifest_id)[-16:]:
            state.events.publish("step", step_row(state.manifests[link]))
        self._collect()
        self.adopted.set()

    def _collect(self) -> None:
        """Drop the files of versions beyond the newest `keep_versions`."""
        state = self._state
        floor = state.head.step - state.config.storage.keep_versions
        for manifest_id, manifest in list(state.manifests.items()):
            if manifest.version.step == floor or (manifest.version.step < floor and manifest_id not in state.chain):
                try:
                    pieces.blob_path(state.home.blobs, manifest.content_hash).unlink(missing_ok=True)
                except OSError as error:
                    raise StoreError(f"can't drop the weights of {manifest.version}: {error}") from None

    async def _serve_manifests(self, peer: str, body: bytes) -> AsyncIterator[bytes]:
        request = codec.decode(body, ManifestsRequest)
        state = self._state
        if request.head not in state.chain:
            raise Unreachable("this node does not know that head")
        known = set(request.known)
        for count, manifest_id in enumerate(state.chain.ancestors(request.head)):
            if manifest_id in known or manifest_id == codec.ZERO_HASH or count >= MAX_MANIFESTS:
                return
            yield state.sealed_manifests[manifest_id]

    async def _serve_piece(self, peer: str, body: bytes) -> AsyncIterator[bytes]:
        try:
            request = msgspec.msgpack.decode(body, type=pieces.PieceRequest)
        except msgspec.DecodeError:
            raise BadRecord("not a piece request", peer=peer) from None
        path = pieces.blob_path(self._state.home.blobs, request.content_hash)
        async for item in pieces.serve_piece(path, request.index):
            yield item


def step_row(manifest: Manifest) -> StepRow:
    """A version for the page's table of steps."""
    answers = sum(manifest.group_answers)
    total = sum(r * n for r, n in zip(manifest.group_rewards, manifest.group_answers, strict=True))
    return StepRow(
        step=manifest.version.step,
        version=str(manifest.version),
        term=manifest.version.term,
        learner=manifest.learner,
        reward_mean=total / answers if answers else None,
        num_groups=len(manifest.group_ids),
        at=manifest.published_at,
        wall_s=manifest.metrics.get("wall_s", 0.0),
        metrics=manifest.metrics,
    )
