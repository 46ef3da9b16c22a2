"""Finds peers and stays findable: joins, publishes our directory record, says hello, keeps addresses.

In: bootstrap addresses, the directory, hellos. Out: `NodeState.membership`, health notices on clock and network.

Invariants: dead bootstraps never end anything: the node goes on and dials again for ever, each time with the peers of
its last runs too.
"""

import asyncio
from collections.abc import Awaitable, Callable

from p2prl import __version__, codec
from p2prl.errors import BadRecord, PeerError
from p2prl.node.state import NodeState
from p2prl.records import WIRE_SCHEMA, Hello, PeerInfo
from p2prl.swarm.membership import Recorded
from p2prl.swarm.transport import JoinReport

DIRECTORY = "members"
TTL_S = 45.0
ROUND_S = 2.0
REDIAL_S = 5.0
HELLO = "p2prl/hello"
MAX_SKEW_S = 3.0
NEWCOMER_S = 60.0  # of two nodes with one identity the newcomer gives way


class MembershipLoop:
    def __init__(
        self,
        state: NodeState,
        bootstraps: tuple[str, ...],
        probe: Callable[[str], Awaitable[Hello | None]],
        on_clash: Callable[[str], None],
    ) -> None:
        self._probe, self._on_clash = probe, on_clash
        self._stale_boots: set[bytes] = set()
        self._state = state
        self._bootstraps = bootstraps
        self._sequence = 0
        self._skews: dict[str, float] = {}
        self.reports: list[JoinReport] = []
        state.transport.serve(HELLO, self.on_hello)

    async def run(self) -> None:
        next_record = next_dial = 0.0
        while True:
            now = self._state.now()
            if now >= next_dial and not await self._connected():
                await self.dial()
                next_dial = self._state.now() + REDIAL_S
            await self._read_directory()  # before our first record covers that of another boot of us
            if now >= next_record:
                await self.publish()
                next_record = self._state.now() + TTL_S / 3
            await self._greet_all()
            self._state.membership.expire(self._state.now())
            await asyncio.sleep(ROUND_S)

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
            first = dead[0]
            self._note("no_peers", f"no bootstrap answers ({first.address}: {first.error})", "p2prl keeps dialling")
        else:
            self._state.health.pop("no_peers", None)

    async def publish(self) -> None:
        """Renew our record in the directory."""
        self._sequence += 1
        record = codec.seal(self._state.info(self._sequence), self._state.identity, self._state.swarm)
        try:
            await self._state.transport.put(DIRECTORY, record, ttl_s=TTL_S)
        except PeerError as error:
            self._state.blame(error.code)

    async def on_hello(self, peer: str, body: bytes) -> bytes:
        hello = codec.decode(body, Hello)
        self._meet(peer, hello, rtt_s=0.0)
        return codec.encode(self._hello())

    async def _connected(self) -> bool:
        return bool(await self._state.transport.peers())

    async def _read_directory(self) -> None:
        state = self._state
        try:
            records = await state.transport.get(DIRECTORY)
        except PeerError as error:
            state.blame(error.code)
            return
        for peer, data in records.items():
            try:
                info = codec.unseal(data, PeerInfo, state.swarm, owner=lambda info: info.peer_id).record
                if info.peer_id != peer:
                    raise BadRecord("the record lies under another peer's key", peer=peer)
            except PeerError as error:
                state.blame(error.code)
                continue
            if state.membership.record(info, state.now()) is Recorded.CLASH:
                await self._check_clash(info)

    async def _greet_all(self) -> None:
        peers = [member.peer_id for member in self._state.membership.members()]
        await asyncio.gather(*(self._greet(peer) for peer in peers[:64]))
        good = self._state.membership.good_addresses()
        if good:
            self._state.store.save_good_addresses(good)

    async def _greet(self, peer: str) -> None:
        state = self._state
        started = state.now()
        try:
            body = await state.transport.call(peer, HELLO, codec.encode(self._hello()), timeout_s=3.0)
            self._meet(peer, codec.decode(body, Hello), rtt_s=state.now() - started)
        except PeerError as error:
            state.blame(error.code)

    def _meet(self, peer: str, hello: Hello, rtt_s: float) -> None:
        state = self._state
        if hello.peer_id != peer:
            raise BadRecord("the hello names another peer", peer=peer)
        if hello.swarm != state.swarm:
            self._note(
                "wrong_network",
                f"{peer} is in another swarm ({hello.swarm.hex()[:8]})",
                "check the invite or the bootstrap address",
            )
            return
        state.membership.measured(peer, rtt_s, state.now())
        self._skews[peer] = state.clock.unix() - hello.clock - rtt_s / 2
        skews = sorted(self._skews.values())
        skew = skews[len(skews) // 2]
        if abs(skew) > MAX_SKEW_S:
            way = "ahead of" if skew > 0 else "behind"
            self._note("clock_skew", f"this clock is {abs(skew):.1f} s {way} the swarm's", "set it by NTP (limit 3 s)")
        else:
            state.health.pop("clock_skew", None)

    async def _check_clash(self, info: PeerInfo) -> None:
        """Another boot of our identity counts only if its address answers with it: a stale record stops nobody."""
        if info.boot_id in self._stale_boots:
            return
        mine = set(self._state.transport.addresses())
        for address in info.addresses:
            hello = None if address in mine else await self._probe(address)
            if hello is not None and hello.peer_id == self._state.me and hello.boot_id == info.boot_id:
                if self._state.clock.unix() - self._state.started_at < NEWCOMER_S:
                    self._on_clash(address)
                else:
                    self._note("same_identity", f"this identity runs elsewhere too, at {address}", "stop that node")
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

    def _note(self, code: str, message: str, fix: str) -> None:
        if code not in self._state.health:
            self._state.emit("health", code=code, message=message, fix=fix)
        known = self._state.health.get(code)
        since = known[3] if known else self._state.clock.unix()
        self._state.health[code] = ("warning", message, fix, since)
