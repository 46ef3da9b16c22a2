"""From announcements to admitted groups: who pulls bodies, checks them and tells their makers.

In: announcements by gossip, headers by digest exchange, bodies by stream. Out: rows in the store, verdicts to makers.

Invariants: nothing is used before admission checked it and recomputed its rewards; what a peer sends can cost it its
standing, never us our loop; a group is admitted once.
"""

import asyncio
import random
from collections.abc import AsyncIterator

import msgspec

from p2prl import codec
from p2prl.buffer import admission
from p2prl.errors import BadRecord, P2prlError, PeerError
from p2prl.node.environment_client import EnvironmentClient
from p2prl.node.state import NodeState
from p2prl.records import Announcement, Group, GroupHeader, Hash, PeerId, Verdict, Wire
from p2prl.rollout import worker
from p2prl.rollout.lottery import prompt_index
from p2prl.swarm import gossip

TOPIC = "announce"
PULL_LIMIT = 256
DIGEST_S = 3.0
VERDICT_BATCH = 256


class GroupsRequest(Wire, frozen=True):
    ids: tuple[Hash, ...]


class DigestRequest(Wire, frozen=True):
    prefixes: tuple[bytes, ...]


class Offer(Wire, frozen=True):
    maker: PeerId
    header: GroupHeader


class DigestReply(Wire, frozen=True):
    offers: tuple[Offer, ...]


class VerdictBatch(Wire, frozen=True):
    verdicts: tuple[Verdict, ...]


class ReceiveLoop:
    def __init__(self, state: NodeState, environment: EnvironmentClient, rules: admission.AdmissionRules) -> None:
        self._state, self._environment, self._rules = state, environment, rules
        num_prompts = rules.num_prompts
        self._known = admission.Knowledge(
            age_of=state.age_of,
            seen=self._seen,
            group_at=state.store.group_at,
            lottery=lambda maker, version, counter: prompt_index(maker, version, counter, num_prompts),
        )
        self._wake = asyncio.Event()
        self._verdicts: dict[str, list[Verdict]] = {}
        self._pulls: set[asyncio.Task] = set()
        self._random = random.Random(state.boot_id)
        self.admitted = asyncio.Event()
        self.arrived: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue(1024)
        transport = state.transport
        transport.subscribe(TOPIC, self._on_announcement)
        transport.serve_stream("group", self._serve_groups)
        transport.serve("digest", self._on_digest)
        transport.serve("verdicts", self._on_verdicts)

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
            if now >= next_digest:
                next_digest = now + DIGEST_S
                self._offer_unjudged()
                await self._exchange_digests()
            await self._send_verdicts()

    async def run_admission(self) -> None:
        """Examine what arrived, in batches that the environment process judges together."""
        while True:
            batch = [await self.arrived.get()]
            while not self.arrived.empty() and len(batch) < 64:
                batch.append(self.arrived.get_nowait())
            await self._admit(batch)

    def offer_own(self, sealed: bytes) -> None:
        """A group of ours: admitted by the same rules, without a pull."""
        if not self.arrived.full():
            self.arrived.put_nowait((self._state.me, sealed))

    # -- bodies -----------------------------------------------------------------------------------------------------

    def _on_announcement(self, publisher: str, data: bytes) -> None:
        state = self._state
        sealed = codec.unseal(data, Announcement, state.swarm, owner=lambda record: record.maker)
        state.membership.heard(sealed.signer, state.now())
        state.wanted.heard(sealed.record, state.now())
        self._wake.set()

    def _pull_some(self) -> None:
        state = self._state
        for pull in state.wanted.to_pull(state.now(), state.stands_by(), PULL_LIMIT):
            task = asyncio.create_task(self._pull(pull), name=f"pull from {pull.peer}")
            self._pulls.add(task)
            task.add_done_callback(self._pulls.discard)
        horizon = state.head.step - state.recipe.learner.max_age
        state.wanted.expire(state.now(), 3600.0, max(0, horizon))

    async def _pull(self, pull: gossip.Pull) -> None:
        state = self._state
        wanted = {header.id: header for header in pull.headers}
        body = codec.encode(GroupsRequest(tuple(wanted)))
        most = sum(header.content_bytes for header in pull.headers) + 1024
        try:
            parts = bytearray()
            async for item in state.transport.stream(pull.peer, "group", body, max_bytes=most):
                parts += item[1:]
                if item[:1] == b"\x01":  # the last part of a body
                    await self.arrived.put((pull.peer, bytes(parts)))
                    parts.clear()
        except PeerError as error:
            state.blame(error.code)
        for group_id in wanted:
            state.wanted.failed(group_id, pull.peer, state.now())  # no effect on those that came
        self._wake.set()

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
        for _, data in batch:
            try:
                sealed = codec.unseal(data, Group, state.swarm, owner=lambda group: group.maker)
            except PeerError as error:
                state.blame(error.code)
                state.counts.refused_here[error.code] = state.counts.refused_here.get(error.code, 0) + 1
                continue
            state.wanted.have(sealed.id)
            reason = admission.examine(sealed.record, sealed.id, sealed.signer, self._rules, self._known)
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
            return
        for (sealed, data), judgement in zip(examined, judgements, strict=True):
            verdict = admission.conclude(sealed.record, sealed.id, judgement)
            if verdict.admitted:
                state.store.save_group(
                    sealed.record, sealed.id, data, own=sealed.signer == state.me, now=state.clock.unix()
                )
                state.store.save_verdict(verdict, state.clock.unix())
                state.wanted.own(sealed.signer, worker.header(sealed.record, sealed.id, len(data)), state.now())
                self._tell(sealed.signer, verdict)
            else:
                self._refuse(sealed, verdict)
        self.admitted.set()

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
        self._tell(sealed.signer, verdict)

    # -- digests and verdicts ---------------------------------------------------------------------------------------

    async def _exchange_digests(self) -> None:
        """Ask two random peers (a new leader: all) what we missed."""
        state = self._state
        others = sorted(state.live() - {state.me})
        chosen = self._random.sample(others, min(2, len(others)))
        known = [header.id for _, header in state.wanted.known()]
        body = codec.encode(DigestRequest(gossip.digest(known)[:4096]))
        for peer in chosen:
            try:
                reply = codec.decode(await state.transport.call(peer, "digest", body, timeout_s=3.0), DigestReply)
            except PeerError as error:
                state.blame(error.code)
                continue
            state.membership.heard(peer, state.now())
            for offer in reply.offers:
                state.wanted.told(peer, offer.maker, (offer.header,), state.now())
        self._pull_some()

    async def _on_digest(self, peer: str, body: bytes) -> bytes:
        request = codec.decode(body, DigestRequest)
        state = self._state
        state.membership.heard(peer, state.now())
        held = state.wanted.held()
        makers = {header.id: maker for maker, header in held}
        lacking = gossip.missing([header for _, header in held], request.prefixes)
        offers = tuple(Offer(makers[header.id], header) for header in lacking[:256])
        return codec.encode(DigestReply(offers))

    def _tell(self, maker: str, verdict: Verdict) -> None:
        if maker == self._state.me:
            self._count_verdict(verdict)
        elif self._state.leads:
            batch = self._verdicts.setdefault(maker, [])
            if len(batch) < VERDICT_BATCH:
                batch.append(verdict)

    async def _send_verdicts(self) -> None:
        state = self._state
        batches, self._verdicts = self._verdicts, {}
        for maker, verdicts in batches.items():
            try:
                await state.transport.call(maker, "verdicts", codec.encode(VerdictBatch(tuple(verdicts))))
            except PeerError as error:
                state.blame(error.code)

    async def _on_verdicts(self, peer: str, body: bytes) -> bytes:
        for verdict in codec.decode(body, VerdictBatch).verdicts:
            self._count_verdict(verdict)
        return b""

    def _count_verdict(self, verdict: Verdict) -> None:
        counts = self._state.counts
        if verdict.admitted:
            counts.admitted += 1
        elif verdict.reason != "duplicate":
            if len(counts.refused) >= 64 and verdict.reason not in counts.refused:
                raise BadRecord("too many kinds of refusal")
            counts.refused[verdict.reason] = counts.refused.get(verdict.reason, 0) + 1
