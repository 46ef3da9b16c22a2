"""Follows the best head: its manifests, then its weights the cheapest way; the engine and the standby's learner see it.

In: leases (they name a head), manifests and contents of peers. Out: `NodeState.head_id`.

Invariants: a head is adopted only when its whole chain was checked and its weights verified; the old one stays in use
until then. Groups of a losing branch go back to the buffer. Nobody who drips or fails keeps us from another's head: all
has a deadline, and the leader's news cuts short what somebody else makes us wait for.
"""

import asyncio
import contextlib
import math
from itertools import islice

from p2prl import codec
from p2prl.errors import PeerError, StoreError, Unreachable
from p2prl.node.manifests import SETTLED, ManifestExchange
from p2prl.node.state import NodeState
from p2prl.node.supervisor import end_tasks
from p2prl.node.targets import Target, Targets
from p2prl.node.versions import Versions
from p2prl.records import Lease, Manifest
from p2prl.status import StepRow, finite

GRACE_S = 10.0  # before the leader's news cuts short what another makes us wait for
STANDS_S = 5.0  # without a byte, before any news does
LOOK_S = 1.0
PRUNE_EVERY = 16  # versions


class WeightsLoop:
    def __init__(self, state: NodeState) -> None:
        self._state = state
        self.manifests = ManifestExchange(state)
        self.versions = Versions(state, self.manifests.most_bytes)
        self._targets = Targets()
        self._wake = asyncio.Event()
        self._is_tidy = False
        self._pruned_at = 0  # step of the head
        self.adopted = asyncio.Event()  # set with each new head
        self.versions.served.on_lost = self._wake.set
        state.transport.subscribe("lease", self._on_lease)

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
        await self._remake()
        while True:
            await self._tidy()
            with contextlib.suppress(TimeoutError):  # then one that failed may be tried again
                await asyncio.wait_for(self._wake.wait(), self._targets.wait_s(self._state.now()))
            self._wake.clear()
            if self._state.disk_full:
                await asyncio.sleep(LOOK_S)
                continue
            target = self._targets.next(self._state.election.leader, self._state.now())
            if target is None:
                await self._mend()
                continue
            self._wake.set()  # there may be more
            if target.manifest_id != self._state.head_id:
                await self._try(target)

    async def _try(self, target: Target) -> None:
        state = self._state
        following = asyncio.create_task(self._follow(target), name=f"follow a head of {target.holder}")
        try:
            await self._wait_for(following, target)
            if following.done():
                await following
                self._targets.done(target)
            else:  # the disk is full: the same again when there is room
                self._targets.failed(target, state.election.leader, state.now())
        except PeerError as error:
            state.blame(error)
            state.emit("log", level="debug", event="head not followed", why=str(error)[:200])
            self._targets.failed(target, state.election.leader, state.now())
        finally:
            await end_tasks([following])
            self._is_tidy = False

    async def _mend(self) -> None:
        """What rotted here is got again; news of a head go first."""
        if not self.versions.served.lost:
            return
        mending = asyncio.create_task(self.versions.mend(lambda: self._holders(self._state.election.leader)))
        news = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait({mending, news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks([mending, news])

    async def _wait_for(self, following: asyncio.Task, target: Target) -> None:
        """Until it has ended or fetches for a full disk; raises Unreachable when there is other news and it is slow."""
        state, began = self._state, self._state.now()
        moved, moved_at = self._num_moved(), began
        while not following.done() and (self.versions.is_applying or not state.disk_full):
            await asyncio.wait({following}, timeout=LOOK_S)
            before, moved, now = moved, self._num_moved(), state.now()
            if moved != before or self.versions.is_applying or any(t.reads_disk for t in state.transfers.values()):
                moved_at = now
            leader = state.election.leader
            leader_waits = leader != target.holder and self._targets.is_ready(leader, now)
            stands = now - moved_at >= STANDS_S and self._targets.any_ready(now)
            if not following.done() and (stands or (leader_waits and now - began >= GRACE_S)):
                raise Unreachable("there is other news, and this head is slow to come", peer=target.holder)

    def _num_moved(self) -> int:
        received = self._state.transport.traffic().received
        return received.get("weights", 0) + received.get("manifests", 0)

    async def _follow(self, target: Target) -> None:
        state, manifest_id, holder = self._state, target.manifest_id, target.holder
        await self.manifests.fetch(manifest_id, (holder, *sorted(state.live() - {state.me})))
        if state.chain.best((manifest_id, state.head_id)) != manifest_id:
            return
        await self.versions.obtain(state.chain.link(manifest_id).version, lambda: self._holders(holder))
        if state.chain.best((manifest_id, state.head_id)) == manifest_id:
            self.adopt(manifest_id)

    def _holders(self, leader: str) -> tuple[str, ...]:
        others = sorted(self._state.live() - {self._state.me, leader})
        return (leader, *others)

    async def _remake(self) -> None:
        """A better version than the head whose state was lost, while all that it is made of is here."""
        state = self._state
        best = state.chain.best((*state.manifests, state.head_id))
        path = self.versions.plan(state.chain.link(best).version)
        if best == state.head_id or path is None or path.num_bytes > 0:
            return
        try:
            await self.versions.obtain(state.chain.link(best).version, tuple)
            self.adopt(best)
        except PeerError as error:
            state.emit("log", level="warning", event="a version can't be made again", why=str(error)[:200])

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
            group_ids = state.chain.link(link).group_ids
            state.store.mark_trained(group_ids, state.clock.unix())
            state.wanted.forget(group_ids)
        metrics = state.manifests[manifest_id].metrics
        reward, error = metrics.get("eval_reward", math.nan), metrics.get("eval_error", 0.0)
        step = metrics.get("eval_step", 0.0)
        if all(map(math.isfinite, (reward, error, step))):  # a learner's word: it may be nonsense
            state.eval_reward, state.eval_error, state.eval_step = reward, error, int(step)
        state.store.save_head(manifest_id)
        for link in state.chain.branch(ancestor, manifest_id)[-16:]:
            state.events.publish("step", step_row(state.manifests[link]))
        self.adopted.set()
        self._is_tidy = False
        self._wake.set()

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

    async def _tidy(self) -> None:
        """Between two heads, never while one is followed."""
        if self._is_tidy:
            return
        self._is_tidy = True
        step = self._state.head.step
        if abs(step - self._pruned_at) >= PRUNE_EVERY:
            self.manifests.prune(self._state.pulled.now(self._state.now()))
            self._pruned_at = step
        try:
            await self.versions.collect()
            self._state.health.pop("weights_kept", None)
        except StoreError as error:  # what is too much on the disk keeps nobody from the next head
            fix = "see to it that this user may delete files there; the node tries again with each version"
            self._state.note("weights_kept", str(error), fix)


def step_row(manifest: Manifest) -> StepRow:
    """A version for the page's table of steps."""
    answers, metrics = sum(manifest.group_answers), finite(manifest.metrics)
    total = sum(r * n for r, n in zip(manifest.group_rewards, manifest.group_answers, strict=True))
    return StepRow(
        step=manifest.version.step,
        version=str(manifest.version),
        term=manifest.version.term,
        learner=manifest.learner,
        reward_mean=total / answers if answers else None,
        num_groups=len(manifest.group_ids),
        at=manifest.published_at,
        wall_s=metrics.get("wall_s", 0.0),
        metrics=metrics,
    )
