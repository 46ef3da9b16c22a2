"""Finds peers and stays findable: joins, publishes our directory record, says hello, keeps addresses.

In: bootstrap addresses, the directory, hellos. Out: `NodeState.membership`, health notices on clock and network.

Invariants: dead bootstraps never end anything: the node goes on and dials again for ever, each time with the peers of
its last runs too. What ends it is told to `on_fatal`, and only in its first minute: an identity that lives elsewhere, a
clock that is off by what three peers tell. What a stranger says in a call of his own changes no notice of ours.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable

from p2prl import __version__, codec
from p2prl.errors import BadRecord, P2prlError, PeerError, PreflightFailed, StoreError, Unreachable
from p2prl.node.state import NodeState
from p2prl.records import WIRE_SCHEMA, Hello, PeerInfo
from p2prl.swarm import skew
from p2prl.swarm.membership import Recorded
from p2prl.swarm.strangers import Answer, wrong_network
from p2prl.swarm.transport import JoinReport

DIRECTORY = "members"
TTL_S = 45.0
ROUND_S = 2.0
NEWS_S = 5.0  # our record is renewed so soon where it names an older version than we hold
LEAST_PAUSE_S = 0.25
REDIAL_S = 5.0
HELLO = "p2prl/hello"
CHECK = "check that a node runs there, that the address is right, and the firewalls between"
NEWCOMER_S = 60.0  # of two nodes with one identity the newcomer gives way; a wrong clock stops a newcomer alone
MAX_GREETED = 64
MAX_STRANGERS = 1024


class MembershipLoop:
    def __init__(
        self,
        state: NodeState,
        bootstraps: tuple[str, ...],
        probe: Callable[[str], Awaitable[Hello | None]],
        on_fatal: Callable[[P2prlError], None],
    ) -> None:
        self._probe, self._on_fatal = probe, on_fatal
        self._stale_boots: set[bytes] = set()
        self._state = state
        self._bootstraps = bootstraps
        self._sequence = self._round = 0
        self._published_at, self._published = -math.inf, state.head  # of our newest record that was taken
        self._read: dict[str, bytes] = {}  # records as they were last read from the directory
        self._began = state.now()
        self._offsets: dict[str, float] = {}  # of our clock to those of the peers that answered in this round
        self._strangers: set[str] = set()  # connected, but of another swarm
        self.reports: list[JoinReport] = []
        state.transport.serve(HELLO, self.on_hello)

    async def run(self) -> None:
        next_dial = 0.0
        while True:
            now = self._state.now()
            if now >= next_dial and not await self._connected():
                await self.dial()
                next_dial = self._state.now() + REDIAL_S
            await self._read_directory()  # before our first record covers that of another boot of us
            if is_due(self._state.now(), self._published_at, self._state.head != self._published):
                await self.publish()
            await self._greet_all()
            if len(self._state.live()) > 1:  # whoever dialled whom
                self._joined()
            self._state.membership.expire(self._state.now())
            # A silent peer costs its deadline: waited for on top of it, the others would fall out of the live set.
            await asyncio.sleep(max(ROUND_S - (self._state.now() - now), LEAST_PAUSE_S))

    async def dial(self) -> None:
        """Try every address we know; the reports say what became of each."""
        known = (*self._bootstraps, *self._state.store.good_addresses(), *self._state.membership.good_addresses())
        mine = set(self._state.transport.addresses())
        addresses = [address for address in dict.fromkeys(known) if address not in mine]
        if not addresses:
            self._state.joined = True  # the first node of its swarm
            return
        self.reports = await self._state.transport.join(addresses)
        dead = [report for report in self.reports if not report.peer]
        self._state.joined = any(report.peer for report in self.reports)
        if not self._state.joined:
            first, others = dead[0], f", nor at {len(dead) - 1} more addresses" if len(dead) > 1 else ""
            text = f"no peer answers at {first.address} ({first.error}){others}"
            self._state.note("no_peers", text, f"p2prl keeps dialling; {CHECK}")
        else:
            self._joined()

    def _joined(self) -> None:
        self._state.joined = True
        self._state.health.pop("no_peers", None)

    async def check_network(self) -> None:
        """After the first `dial`: raises PreflightFailed when every bootstrap answered, and none of this swarm."""
        hellos = await asyncio.gather(*(self._greet(report.peer) for report in self.reports if report.peer))
        heard = iter(hellos)
        answers = []
        for report in self.reports:
            hello = next(heard) if report.peer else None
            answers.append(Answer(report.address, hello.swarm, hello.recipe) if hello else Answer(report.address))
        text = wrong_network(answers, self._bootstraps, self._state.swarm, self._state.recipe.name)
        if text:
            raise PreflightFailed(text)

    async def publish(self) -> None:
        """Renew our record in the directory; what nobody took is put there again in the next round."""
        self._sequence += 1
        info = self._state.info(self._sequence)
        record = codec.seal(info, self._state.identity, self._state.swarm)
        try:
            if await self._state.transport.put(DIRECTORY, record, ttl_s=TTL_S):
                self._published_at, self._published = self._state.now(), info.held
        except PeerError as error:
            self._state.blame(error)

    async def on_hello(self, peer: str, body: bytes) -> bytes:
        hello = codec.decode(body, Hello)
        if hello.peer_id != peer:
            raise BadRecord("the hello names another peer", peer=peer)
        if hello.swarm == self._state.swarm:
            self._state.membership.heard(peer, self._state.now())
        return codec.encode(self._hello())

    async def _connected(self) -> bool:
        return bool(await self._state.transport.peers())

    async def _read_directory(self) -> None:
        state = self._state
        try:
            records = await state.transport.get(DIRECTORY)
        except PeerError as error:
            state.blame(error)
            return
        read, self._read = self._read, records
        for peer, data in records.items():
            if read.get(peer) == data:
                continue  # verified before
            try:
                info = codec.unseal(data, PeerInfo, state.swarm, owner=lambda info: info.peer_id).record
                if info.peer_id != peer:
                    raise BadRecord("the record lies under another peer's key", peer=peer)
            except PeerError as error:
                state.blame(error, peer)
                continue
            if state.membership.record(info, state.now()) is Recorded.CLASH:
                await self._check_clash(info)

    async def _greet_all(self) -> None:
        state = self._state
        self._offsets = {}
        known = {member.peer_id for member in state.membership.members()}
        unknown = sorted(await state.transport.peers() - self._strangers - {state.me} - known)
        due = state.membership.to_greet(state.now(), self._round)
        self._round += 1
        await asyncio.gather(*(self._greet(peer) for peer in [*unknown, *due][:MAX_GREETED]))
        self._judge_clock()
        good = state.membership.good_addresses()
        if good:
            try:
                state.store.save_good_addresses(good)
            except StoreError as error:  # a full disk must not end the loop that keeps us findable
                state.emit("log", level="debug", event="addresses not saved", why=str(error)[:200])

    async def _greet(self, peer: str) -> Hello | None:
        """What `peer` answers to our hello, also when it is of another swarm."""
        state = self._state
        started, sent_at = state.now(), state.clock.unix()
        try:
            body = await state.transport.call(peer, HELLO, codec.encode(self._hello()), timeout_s=3.0)
            hello = codec.decode(body, Hello)
            if hello.peer_id != peer:
                raise BadRecord("the hello names another peer", peer=peer)
            self._meet(peer, hello, state.now() - started)
            found = skew.offset(sent_at, state.clock.unix(), hello.clock)
            if found is None:
                raise BadRecord(f"{hello.clock} is no time", peer=peer)
        except PeerError as error:
            if isinstance(error, Unreachable):
                state.membership.unanswered(peer)
            state.blame(error, peer)
            return None
        if hello.swarm == state.swarm:
            self._offsets[peer] = found
        return hello

    def _meet(self, peer: str, hello: Hello, rtt_s: float) -> None:
        state = self._state
        if hello.swarm == state.swarm:
            state.membership.measured(peer, rtt_s, state.now())
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._strangers.clear()
        self._strangers.add(peer)
        if any(report.peer == peer for report in self.reports):  # we dialled it; who dials us is no fault of ours
            self._state.note(
                "wrong_network",
                f"{peer} is in another swarm ({hello.swarm.hex()[:8]})",
                "check the invite or the bootstrap address",
            )

    def _judge_clock(self) -> None:
        """At the start a wrong clock ends the node; later it is told of, and the node counts as degraded."""
        state, found = self._state, skew.judge(self._offsets)
        state.skew_s = found.offset_s
        if found.kind is skew.Judged.FINE:
            if self._offsets:
                state.health.pop("clock_skew", None)
            return
        if found.kind is skew.Judged.OFF and state.now() - self._began < NEWCOMER_S:
            text = f"{found.message}. {skew.FIX[0].upper()}{skew.FIX[1:]}, then start again"
            self._on_fatal(PreflightFailed(text))
        level = "error" if found.kind is skew.Judged.OFF else "warning"
        self._state.note("clock_skew", found.message, skew.FIX, level)

    async def _check_clash(self, info: PeerInfo) -> None:
        """Another boot of our identity counts only if its address answers with it: a stale record stops nobody."""
        if info.boot_id in self._stale_boots:
            return
        mine = set(self._state.transport.addresses())
        for address in info.addresses:
            hello = None if address in mine else await self._probe(address)
            if hello is not None and hello.peer_id == self._state.me and hello.boot_id == info.boot_id:
                if self._state.now() - self._began < NEWCOMER_S:
                    self._on_fatal(
                        PreflightFailed(
                            f"this identity runs elsewhere too, at {address}. Two nodes with one identity disturb each "
                            "other: stop that one, or give this one a home and identity of its own (--home)"
                        )
                    )
                else:
                    self._state.note(
                        "same_identity", f"this identity runs elsewhere too, at {address}", "stop that node"
                    )
                return
        self._stale_boots.add(info.boot_id)

    def _hello(self) -> Hello:
        state = self._state
        return Hello(
            state.me,
            state.boot_id,
            state.swarm,
            state.recipe.name,
            (WIRE_SCHEMA,),
            f"p2prl {__version__}",
            state.clock.unix(),
        )


def is_due(now: float, published_at: float, is_news: bool) -> bool:
    """Whether our record is to be renewed: in time before it ends, and soon when our version has changed."""
    return now - published_at >= (NEWS_S if is_news else TTL_S / 3)
