"""From announcements to admitted groups: who pulls bodies, checks them and tells their makers.

In: announcements by gossip, headers by digest exchange, bodies by stream. Out: rows in the store, verdicts to makers.

Invariants: nothing is used before admission checked it and recomputed its rewards; what a peer sends can cost it its
standing, never us our loop; a group is admitted once.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Coroutine, Sequence

import msgspec

from p2prl import codec
from p2prl.buffer import admission
from p2prl.environments.messages import Judgement
from p2prl.errors import P2prlError, PeerError, StoreError, TooLarge, Unreachable
from p2prl.node.announcements import AGAIN_S, TOPIC, announce_again
from p2prl.node.ports import EnvironmentPort
from p2prl.node.state import NodeState
from p2prl.node.supervisor import end_tasks
from p2prl.node.unplaced import Unplaced
from p2prl.node.verdicts import Verdicts
from p2prl.node.weights_loop import WeightsLoop
from p2prl.records import Announcement, Count, Group, GroupHeader, Hash, PeerId, Verdict, Version, Wire
from p2prl.rollout import worker
from p2prl.rollout.lottery import prompt_index
from p2prl.swarm import gossip
from p2prl.swarm.head import is_better

PULL_LIMIT = 256
DIGEST_S = 3.0
PULL_S = 60.0  # for one request of bodies; whoever serves slower is asked for fewer the next time round
MAX_ASKED = 64  # by a new leader, at once


class GroupsRequest(Wire, frozen=True):
    ids: tuple[Hash, ...]


class DigestRequest(Wire, frozen=True):
    prefixes: tuple[bytes, ...]


class Offer(Wire, frozen=True):
    maker: PeerId
    header: GroupHeader


class DigestReply(Wire, frozen=True):
    """What the asker lacks; and the head held here: a leader that was cut off may not have heard of a better one."""

    offers: tuple[Offer, ...]
    head: Version | None = None
    manifest_id: Hash = codec.ZERO_HASH
    num_groups: Count = 0


class ReceiveLoop:
    def __init__(
        self, state: NodeState, environment: EnvironmentPort, rules: admission.AdmissionRules, weights: WeightsLoop
    ) -> None:
        self._state, self._environment, self._rules, self._weights = state, environment, rules, weights
        num_prompts = rules.num_prompts
        self._known = admission.Knowledge(
            age_of=state.age_of,
            seen=self._seen,
            group_at=state.store.group_at,
            lottery=lambda maker, version, counter: prompt_index(maker, version, counter, num_prompts),
        )
        self._wake = asyncio.Event()
        self.verdicts = Verdicts(state)
        self._pulls: dict[asyncio.Task, None] = {}
        self._talks: dict[asyncio.Task, None] = {}  # digests on their way
        self._random = random.Random(state.boot_id)
        self.admitted = asyncio.Event()
        self.arrived: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(1024)
        self._unplaced = Unplaced(state, weights.manifests.learn, self.arrived)
        self._asked_term = 0  # the term of ours in which all were asked for what we missed
        transport = state.transport
        transport.subscribe(TOPIC, self._on_announcement)
        transport.serve_stream("group", self._serve_groups)
        transport.serve("digest", self._on_digest)

    def set_vocab_size(self, vocab_size: int | None) -> None:
        """Known once an engine is up; the learner's embedding must not see ids beyond it."""
        self._rules = msgspec.structs.replace(self._rules, vocab_size=vocab_size)

    async def run(self) -> None:
        """Start pulls, exchange digests, send verdicts."""
        next_digest = self._state.now() + self._random.uniform(0, DIGEST_S)
        while True:
            try:
                await asyncio.wait_for(self._wake.wait(), 0.25)
            except TimeoutError:
                pass
            self._wake.clear()
            self._pull_some()
            now = self._state.now()
            if now >= self._state.announce_at:
                self._state.announce_at = now + AGAIN_S * self._random.uniform(0.75, 1.25)
                await announce_again(self._state)
            if now >= next_digest or self._is_new_leader():
                next_digest = now + DIGEST_S
                self._expire()
                self._offer_unjudged()
                self._exchange_digests()
            self.verdicts.send()

    async def run_admission(self) -> None:
        """Examine what arrived, in batches that the environment process judges together."""
        while True:
            batch = [await self.arrived.get()]
            while not self.arrived.empty() and len(batch) < 64:
                batch.append(self.arrived.get_nowait())
            await self._admit(batch)

    async def stop(self) -> None:
        """End the pulls and the talks that are under way."""
        await end_tasks([*self._pulls, *self._talks])
        await self._unplaced.stop()
        await self.verdicts.stop()

    def offer_own(self, sealed: bytes) -> None:
        """A group of ours: admitted by the same rules, without a pull."""
        if not self.arrived.full():
            self.arrived.put_nowait((self._state.me, sealed))

    # -- bodies -----------------------------------------------------------------------------------------------------

    def _on_announcement(self, publisher: str, data: bytes) -> None:
        state = self._state
        sealed = codec.unseal(data, Announcement, state.swarm, owner=lambda record: record.maker)
        state.membership.heard(sealed.signer, state.now())
        if state.standings.quarantined(sealed.signer, state.clock.unix()):
            return
        new = state.wanted.heard(sealed.record, state.now())
        state.measures.metrics.gossip_duplicates.inc(len(sealed.record.headers) - len(new))
        self._wake.set()

    def _pull_some(self) -> None:
        state = self._state
        for pull in state.wanted.to_pull(state.now(), state.stands_by() and not state.disk_full, PULL_LIMIT):
            task = asyncio.create_task(self._pull(pull), name=f"pull from {pull.peer}")
            self._pulls[task] = None
            task.add_done_callback(lambda done: self._pulls.pop(done, None))

    def _expire(self) -> None:
        state = self._state
        horizon = state.head.step - state.recipe.learner.max_age
        state.wanted.expire(state.now(), 3600.0, max(0, horizon))

    async def _pull(self, pull: gossip.Pull) -> None:
        state = self._state
        most = admission.most_bytes(self._rules)
        wanted = {header.id: header for header in pull.headers if header.content_bytes <= most}
        if too_large := [header.id for header in pull.headers if header.id not in wanted]:
            state.blame(TooLarge(f"groups of more than {most} bytes were announced"), pull.peer)
            state.wanted.forget(too_large)
        try:
            if wanted:
                await asyncio.wait_for(self._take_bodies(pull.peer, tuple(wanted), most), PULL_S)
        except TimeoutError:
            state.blame(Unreachable(f"the groups asked for did not come within {PULL_S:.0f} s"), pull.peer)
        except PeerError as error:
            state.blame(error, pull.peer)
        for group_id in wanted:
            state.wanted.failed(group_id, pull.peer, state.now())  # no effect on those that came
        self._wake.set()

    async def _take_bodies(self, peer: str, ids: tuple[bytes, ...], most: int) -> None:
        body, parts = codec.encode(GroupsRequest(ids)), bytearray()
        async for item in self._state.transport.stream(peer, "group", body, max_bytes=most * len(ids) + 1024):
            parts += item[1:]
            if len(parts) > most:
                raise TooLarge(f"a group of more than {most} bytes", peer=peer)
            if item[:1] == b"\x01":  # the last part of a body
                await self.arrived.put((peer, bytes(parts)))
                parts.clear()

    async def _serve_groups(self, peer: str, body: bytes) -> AsyncIterator[bytes]:
        request = codec.decode(body, GroupsRequest)
        for group_id in request.ids[:64]:
            data = self._state.store.body(group_id) or b""
            for start in range(0, len(data), 2**20 - 1):
                part = data[start : start + 2**20 - 1]
                last = start + len(part) >= len(data)
                yield (b"\x01" if last else b"\x00") + part

    # -- admission --------------------------------------------------------------------------------------------------

    async def _admit(self, batch: list[tuple[str, bytes]]) -> None:
        state = self._state
        examined: list[tuple[codec.Sealed[Group], bytes]] = []
        for peer, data in batch:
            await asyncio.sleep(0)  # to check a large one takes a moment: others' turn between two
            try:
                sealed = codec.unseal(data, Group, state.swarm, owner=lambda group: group.maker)
            except PeerError as error:
                state.blame(error, peer)
                state.counts.refused_here[error.code] = state.counts.refused_here.get(error.code, 0) + 1
                continue
            state.wanted.have(sealed.id)
            reason = ""
            if sealed.signer != state.me and state.standings.quarantined(sealed.signer, state.clock.unix()):
                reason = "quarantined"
            reason = reason or admission.examine(sealed.record, sealed.id, sealed.signer, self._rules, self._known)
            if reason == "unknown_version":
                version = self._unknown(sealed.record)
                if version is not None and self._unplaced.hold(sealed.id, peer, sealed.signer, data, version):
                    continue
            if reason:
                self._refuse(sealed, admission.refusal(sealed.id, reason))
            else:
                examined.append((sealed, data))
        if not examined:
            return
        try:
            judgements = await self._environment.judge([sealed.record for sealed, _ in examined])
        except P2prlError as error:
            state.emit("log", level="warning", event="groups not judged", why=str(error)[:200])
            self._let_come_again(examined)
            return
        try:
            self._conclude(examined, judgements)
        except StoreError:
            self._let_come_again(examined)
            raise
        state.standings.flush(state.store)
        self.admitted.set()

    def _let_come_again(self, examined: list[tuple[codec.Sealed[Group], bytes]]) -> None:
        """Those of others: the next digest exchange finds them. Ours are in the store, unjudged."""
        lost = [sealed.id for sealed, _ in examined if sealed.signer != self._state.me]
        self._state.wanted.forget(lost)
        self._state.wanted.reopen(lost)

    def _conclude(self, examined: list[tuple[codec.Sealed[Group], bytes]], judgements: Sequence[Judgement]) -> None:
        state = self._state
        for (sealed, data), judgement in zip(examined, judgements, strict=True):
            verdict = admission.conclude(sealed.record, sealed.id, judgement)
            if verdict.admitted:
                state.store.save_group(
                    sealed.record, sealed.id, data, own=sealed.signer == state.me, now=state.clock.unix()
                )
                state.store.save_verdict(verdict, state.clock.unix())
                state.wanted.own(sealed.signer, worker.header(sealed.record, sealed.id, len(data)), state.now())
                self._judged(sealed, verdict)
            else:
                self._refuse(sealed, verdict)

    def _unknown(self, group: Group) -> Version | None:
        """The newest: what leads to it most often leads to the others."""
        return max((version for version in group.versions if self._state.age_of(version) is None), default=None)

    def _judged(self, sealed: codec.Sealed[Group], verdict: Verdict) -> None:
        lag_s = self._state.clock.unix() - sealed.record.made_at
        self._state.measures.judged(verdict.admitted, verdict.reason, lag_s)
        self.verdicts.judged(sealed.signer, verdict)

    def _seen(self, group_id: bytes) -> bool:
        """Judged here before (ours wait unjudged until we stand by), or trained on."""
        row = self._state.store.group(group_id)
        return self._state.store.has_group(group_id) if row is None else row.state not in ("own", "held")

    def _offer_unjudged(self) -> None:
        """Standing by: our own groups of before come to the buffer too."""
        if not self._state.stands_by() or not self.arrived.empty():
            return
        for row in self._state.store.unjudged():
            body = self._state.store.body(row.id)
            if body is not None:
                self.offer_own(body)

    def _refuse(self, sealed: codec.Sealed[Group], verdict: Verdict) -> None:
        state = self._state
        if verdict.reason == "duplicate":
            return
        state.counts.refused_here[verdict.reason] = state.counts.refused_here.get(verdict.reason, 0) + 1
        state.store.save_verdict(verdict, state.clock.unix())
        state.wanted.forget((sealed.id,))
        self._judged(sealed, verdict)

    # -- digests ----------------------------------------------------------------------------------------------------

    def _exchange_digests(self) -> None:
        """Ask two random peers (a new leader: all) what we missed."""
        state = self._state
        others = sorted(state.live() - {state.me})
        chosen = others[:MAX_ASKED] if self._is_new_leader() else self._random.sample(others, min(2, len(others)))
        if state.leads:
            self._asked_term = state.election.term
        known = [header.id for _, header in state.wanted.known()]
        body = codec.encode(DigestRequest(gossip.digest(known)[:4096]))
        for peer in chosen:  # nobody waits for one that does not answer
            self._talk(self._ask_digest(peer, body), f"digest of {peer}")

    def _talk(self, call: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(call, name=name)
        self._talks[task] = None
        task.add_done_callback(lambda done: self._talks.pop(done, None))

    async def _ask_digest(self, peer: str, body: bytes) -> None:
        state = self._state
        try:
            reply = codec.decode(await state.transport.call(peer, "digest", body, timeout_s=3.0), DigestReply)
        except PeerError as error:
            state.blame(error, peer)
            return
        state.membership.heard(peer, state.now())
        most = admission.most_bytes(self._rules)
        for offer in reply.offers:
            if offer.header.content_bytes <= most:
                state.wanted.told(peer, offer.maker, (offer.header,), state.now())
        if reply.head is not None and is_better(reply.num_groups, reply.head, state.num_groups, state.head):
            self._weights.heard_of(reply.manifest_id, peer)
        self._wake.set()

    def _is_new_leader(self) -> bool:
        return self._state.leads and self._state.election.term != self._asked_term

    async def _on_digest(self, peer: str, body: bytes) -> bytes:
        request = codec.decode(body, DigestRequest)
        state = self._state
        state.membership.heard(peer, state.now())
        held = state.wanted.held()
        makers = {header.id: maker for maker, header in held}
        lacking = gossip.missing([header for _, header in held], request.prefixes)
        offers = tuple(Offer(makers[header.id], header) for header in lacking[:256])
        return codec.encode(DigestReply(offers, state.head, state.head_id, state.num_groups))
