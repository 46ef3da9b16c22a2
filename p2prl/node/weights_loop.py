"""Follows the best head: manifests back to what we know, pieces from any holder, the engine and the standby's learner.

In: leases (they name a head), manifests and pieces of peers. Out: `NodeState.head_id`; new versions in the engine.

Invariants: a head is adopted only when its whole chain was checked and its weights verified; the old one stays in use
until then. Groups of a losing branch go back to the buffer. Nobody who drips or fails keeps us from another's head: all
has a deadline, and the leader's news cuts short what somebody else makes us wait for.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from itertools import islice

from p2prl import codec
from p2prl.errors import BadRecord, PeerError, StoreError, Unreachable
from p2prl.node.state import NodeState
from p2prl.node.supervisor import end_tasks
from p2prl.node.targets import Target, Targets
from p2prl.records import Lease, Manifest, Version, Wire
from p2prl.status import StepRow
from p2prl.swarm.mandate import check_mandate
from p2prl.weights import pieces

MAX_MANIFESTS = 4096  # in one stream; a longer chain takes several
MAX_MANIFEST_BYTES = 256 * 2**20  # of one chain
MANIFESTS_S = 300.0  # for the manifests of one peer
GRACE_S = 10.0  # before the leader's news cuts short what another makes us wait for
LOOK_S = 1.0
YIELD_EVERY = 32
VERSION_SLACK_BYTES = 2**20
SETTLED = 64  # versions whose marks are written again after a failure


class ManifestsRequest(Wire, frozen=True):
    """Newest first from `head` down to any of `known`."""

    head: bytes
    known: tuple[bytes, ...]
    version: Version | None = None  # given where only the version of the head is known


class WeightsLoop:
    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._targets = Targets()
        self._wake = asyncio.Event()
        base = state.base_path
        # All versions are of one architecture; what claims to be much larger is not fetched.
        self._most_bytes = 2 * base.stat().st_size + VERSION_SLACK_BYTES if base.exists() else pieces.MAX_VERSION_BYTES
        self._files = {  # content hash -> step, of the versions whose files are here
            manifest.content_hash: manifest.version.step
            for manifest in state.manifests.values()
            if pieces.blob_path(state.home.blobs, manifest.content_hash).is_file()
        }
        self.adopted = asyncio.Event()  # set with each new head
        state.transport.subscribe("lease", self._on_lease)
        state.transport.serve_stream("manifests", self._serve_manifests)
        state.transport.serve_stream(pieces.METHOD, self._serve_piece)

    def _on_lease(self, publisher: str, data: bytes) -> None:
        lease = codec.unseal(data, Lease, self._state.swarm, owner=lambda lease: lease.leader).record
        allowed = self._state.recipe.learner.learners
        if publisher != lease.leader or (allowed and lease.leader not in allowed):
            return  # the election's handler of the same message tells whose fault it is
        if lease.manifest_id != codec.ZERO_HASH and lease.manifest_id != self._state.head_id:
            self.heard_of(lease.manifest_id, lease.leader)

    def heard_of(self, manifest_id: bytes, holder: str) -> None:
        """Somebody holds another head: followed when it is the better one."""
        if holder != self._state.me:
            self._targets.told(manifest_id, holder, self._state.election.leader)
            self._wake.set()

    async def run(self) -> None:
        self.settle()
        while True:
            with contextlib.suppress(TimeoutError):  # then one that failed may be tried again
                await asyncio.wait_for(self._wake.wait(), self._targets.wait_s(self._state.now()))
            self._wake.clear()
            if self._state.disk_full:
                await asyncio.sleep(LOOK_S)
                continue
            target = self._targets.next(self._state.election.leader, self._state.now())
            if target is None:
                continue
            self._wake.set()  # there may be more
            if target.manifest_id != self._state.head_id:
                await self._try(target)

    async def _try(self, target: Target) -> None:
        state = self._state
        following = asyncio.create_task(self._follow(target), name=f"follow a head of {target.holder}")
        try:
            await self._wait_for(following, target)
            await following
            self._targets.done(target)
        except PeerError as error:
            state.blame(error)
            state.emit("log", level="debug", event="head not followed", why=str(error)[:200])
            self._targets.failed(target, state.election.leader, state.now())
        finally:
            await end_tasks([following])

    async def _wait_for(self, following: asyncio.Task, target: Target) -> None:
        """Until it has ended; raises Unreachable when it takes long and the leader has news."""
        state, began = self._state, self._state.now()
        while not following.done():
            await asyncio.wait({following}, timeout=LOOK_S)
            leader = state.election.leader
            waits = leader != target.holder and self._targets.is_ready(leader, state.now())
            if waits and not following.done() and state.now() - began >= GRACE_S:
                raise Unreachable("the leader has news, and this head is slow to come", peer=target.holder)

    async def _follow(self, target: Target) -> None:
        state, manifest_id, holder = self._state, target.manifest_id, target.holder
        if manifest_id not in state.chain:
            await self._fetch_manifests(manifest_id, (holder, *sorted(state.live() - {state.me})))
        if state.chain.best((manifest_id, state.head_id)) != manifest_id:
            return
        manifest = state.manifests[manifest_id]
        await pieces.fetch(state.transport, manifest, lambda: self._holders(holder), state.home.blobs)
        self._files[manifest.content_hash] = manifest.version.step
        if state.chain.best((manifest_id, state.head_id)) == manifest_id:
            self.adopt(manifest_id)

    def _holders(self, leader: str) -> tuple[str, ...]:
        others = sorted(self._state.live() - {self._state.me, leader})
        return (leader, *others)

    async def _fetch_manifests(self, head: bytes, peers: tuple[str, ...]) -> None:
        """Manifests from `head` back to one that we know, checked and added oldest first."""
        state = self._state
        await self._fetch(ManifestsRequest(head, self._known()), peers, lambda: head in state.chain)

    async def learn(self, peers: tuple[str, ...], version: Version) -> None:
        """The manifests that lead to a version that somebody drew under, from whoever has them. Raises PeerError."""
        chain = self._state.chain
        if chain.find(version) is None:
            request = ManifestsRequest(codec.ZERO_HASH, self._known(), version)
            await self._fetch(request, peers, lambda: chain.find(version) is not None)

    def _known(self) -> tuple[bytes, ...]:
        return tuple(dict.fromkeys([self._state.head_id, *list(self._state.manifests)[-64:]]))

    async def _fetch(self, request: ManifestsRequest, peers: tuple[str, ...], done: Callable[[], bool]) -> None:
        failure: PeerError = Unreachable("nobody gives the manifests of the head")
        for peer in dict.fromkeys(peers):
            try:
                found = await asyncio.wait_for(self._take_manifests(peer, request), MANIFESTS_S)
                for number, (data, sealed) in enumerate(reversed(found)):
                    if number % YIELD_EVERY == 0:
                        await asyncio.sleep(0)  # thousands, where a node joins late
                    self.keep(sealed.id, sealed.record, data)
                if done():
                    return
            except TimeoutError:
                failure = Unreachable(f"the manifests did not come within {MANIFESTS_S:.0f} s", peer=peer)
            except PeerError as error:
                failure = error
        raise failure

    async def _take_manifests(self, peer: str, request: ManifestsRequest) -> list[tuple[bytes, codec.Sealed[Manifest]]]:
        """Newest first down to one whose parent we know, or to where `peer` has no more."""
        state, left = self._state, MAX_MANIFEST_BYTES
        found: list[tuple[bytes, codec.Sealed[Manifest]]] = []
        while True:
            num_before = len(found)
            async for item in state.transport.stream(peer, "manifests", codec.encode(request), max_bytes=left):
                sealed = codec.unseal(item, Manifest, state.swarm, owner=lambda manifest: manifest.learner)
                if found and found[-1][1].record.parent_id != sealed.id:
                    raise BadRecord("a manifest that is not the parent of the one before", peer=peer)
                found.append((item, sealed))
                left -= len(item)
                if len(found) - num_before > MAX_MANIFESTS:
                    raise BadRecord("more manifests than the limit", peer=peer)
            if len(found) - num_before < MAX_MANIFESTS or found[-1][1].record.parent_id in state.chain:
                return found
            request = ManifestsRequest(found[-1][1].record.parent_id, request.known)

    def keep(self, manifest_id: bytes, manifest: Manifest, data: bytes) -> None:
        """Add a verified manifest to the chain and the store."""
        state = self._state
        pieces.check_sizes(manifest, self._most_bytes)
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
            self._offer_again(returned)
        for link in state.chain.branch(ancestor, manifest_id):
            group_ids = state.manifests[link].group_ids
            state.store.mark_trained(group_ids, state.clock.unix())
            state.wanted.forget(group_ids)
        self._files[state.manifests[manifest_id].content_hash] = state.manifests[manifest_id].version.step
        metrics = state.manifests[manifest_id].metrics
        reward, error = metrics.get("eval_reward", math.nan), metrics.get("eval_error", 0.0)
        step = metrics.get("eval_step", 0.0)
        if all(map(math.isfinite, (reward, error, step))):  # a learner's word: it may be nonsense
            state.eval_reward, state.eval_error, state.eval_step = reward, error, int(step)
        state.store.save_head(manifest_id)
        for link in state.chain.branch(ancestor, manifest_id)[-16:]:
            state.events.publish("step", step_row(state.manifests[link]))
        self._collect()
        self.adopted.set()

    def _offer_again(self, group_ids: tuple[bytes, ...]) -> None:
        """Groups of a losing branch whose bodies we have: in digests again; our own are announced again at once."""
        state = self._state
        for group_id in group_ids:
            row = state.store.group(group_id)
            if row is not None and row.state in ("own", "held", "admitted"):
                state.wanted.own(row.maker, row.header, state.now())
        state.announce_at = state.now()

    def settle(self) -> None:
        """What the chain says goes into the store once more: a full disk or a kill may have come between the two."""
        state = self._state
        for manifest_id in islice(state.chain.ancestors(state.head_id), SETTLED):
            manifest = state.manifests.get(manifest_id)
            if manifest is not None:
                version, sealed = manifest.version, state.sealed_manifests[manifest_id]
                state.store.save_manifest(manifest_id, sealed, version.term, version.step)
                state.store.mark_trained(manifest.group_ids)
                state.wanted.forget(manifest.group_ids)
        state.store.save_head(state.head_id)

    def _collect(self) -> None:
        """Drop the files of versions beyond the newest `keep_versions`."""
        state = self._state
        floor = state.head.step - state.config.storage.keep_versions
        for content_hash in [content_hash for content_hash, step in self._files.items() if step <= floor]:
            self.drop_file(content_hash)

    def drop_file(self, content_hash: bytes) -> None:
        """A version that we don't need, or a step's result that came to nothing."""
        try:
            pieces.blob_path(self._state.home.blobs, content_hash).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"can't drop the weights {content_hash.hex()[:16]}: {error}") from None
        self._files.pop(content_hash, None)

    async def _serve_manifests(self, peer: str, body: bytes) -> AsyncIterator[bytes]:
        request = codec.decode(body, ManifestsRequest)
        state = self._state
        head = request.head if request.version is None else state.chain.find(request.version)
        if head is None or head not in state.chain:
            raise Unreachable("this node does not know that head")
        known = set(request.known)
        for count, manifest_id in enumerate(state.chain.ancestors(head)):
            if manifest_id in known or manifest_id == codec.ZERO_HASH or count >= MAX_MANIFESTS:
                return
            yield state.sealed_manifests[manifest_id]

    async def _serve_piece(self, peer: str, body: bytes) -> AsyncIterator[bytes]:
        request = codec.decode(body, pieces.PieceRequest)
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
