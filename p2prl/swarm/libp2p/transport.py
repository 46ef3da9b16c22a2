"""The Transport over hivemind 1.1.12: p2pd's connections, gossip and streams, and the DHT as directory.

In: an identity, a port, a swarm id. Out: `swarm/transport.py`'s Protocol. Handlers and subscriptions live here, not in
p2pd: a new p2pd gets them all again, so they outlive its death.
"""

# hivemind has no types: its attributes begin as None and its protobuf modules are made at import.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from hivemind.dht.storage import DHTLocalStorage

from p2prl.errors import PeerError, PreflightFailed, Unreachable
from p2prl.identity import Identity
from p2prl.swarm import addresses as address_text
from p2prl.swarm.libp2p import bootstrap, faults, watch
from p2prl.swarm.libp2p.calls import Calls
from p2prl.swarm.libp2p.directory import Directory
from p2prl.swarm.libp2p.ledger import Ledger
from p2prl.swarm.libp2p.pubsub import Topics
from p2prl.swarm.libp2p.session import (
    NETWORK_ERRORS,
    Session,
    Settings,
    launch,
    visible,
)
from p2prl.swarm.libp2p.streams import Streams
from p2prl.swarm.transport import (
    CallHandler,
    JoinReport,
    StateHandler,
    StreamHandler,
    TopicHandler,
    Traffic,
)

MAX_KEPT_ADDRESSES = 32
LIST_PEERS_S = 5.0


class Libp2pTransport:
    """One node's network. `prefix` is the swarm id in hex: other swarms' calls, topics and records never meet ours."""

    def __init__(
        self,
        identity: Identity,
        identity_file: Path,
        *,
        host: str = "0.0.0.0",
        port: int = 0,
        prefix: str,
        announce: Sequence[str] = (),
        relay: bool = True,
    ) -> None:
        self._settings = Settings(
            identity,
            identity_file,
            host,
            port,
            _announced(announce, identity.peer_id),
            relay,
        )
        self._port_is_free_choice = port == 0
        self._session: Session | None = None
        self._announced: tuple[str, ...] = ()
        self._is_stopping: Callable[[], bool] = lambda: False
        self._stored: DHTLocalStorage | None = None
        self._good: dict[str, str] = {}  # address by peer, of those that answered; the last is the newest
        self._state_handlers: list[StateHandler] = []
        self._tasks: list[asyncio.Task] = []
        self._ledger = Ledger()
        self._calls = Calls(prefix, self._up, self._ledger)
        self._streams = Streams(prefix, self._up, self._ledger)
        self._topics = Topics(prefix, self._up, self._ledger)
        self._directory = Directory(prefix, self._up, self._ledger, time.time)

    @property
    def peer_id(self) -> str:
        return self._settings.identity.peer_id

    def on_fault(self, handler: Callable[[str, PeerError], None]) -> None:
        """`handler(peer, error)` hears of every request and message that is refused before it reaches its handler."""
        self._ledger.on_fault = handler

    def stops_while(self, is_stopping: Callable[[], bool]) -> None:
        """While it says so the node stops: p2pd's end is no fault then, and p2pd is not started again."""
        self._is_stopping = is_stopping

    async def start(self) -> None:
        if self._tasks:
            raise RuntimeError("the transport is started already")
        faults.install()
        session = await self._launch()
        self._tasks = [
            asyncio.create_task(watch.supervise(session, self._down, self._restart, lambda: self._is_stopping())),
            asyncio.create_task(watch.keep_fresh(lambda: self._session, self._refresh)),
        ]

    async def stop(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=2.5)
        await self._close()

    def addresses(self) -> Sequence[str]:
        return self._announced

    async def join(self, addresses: Sequence[str]) -> list[JoinReport]:
        session = self._session
        if session is None:
            return [JoinReport(text, error="our own network is down; it is being restarted") for text in addresses]
        reports = await bootstrap.join(session, addresses)
        for report in reports:
            if report.peer:
                self._good.pop(report.peer, None)
                self._good[report.peer] = report.address
        while len(self._good) > MAX_KEPT_ADDRESSES:
            del self._good[next(iter(self._good))]
        return reports

    async def peers(self) -> frozenset[str]:
        if self._session is None:
            return frozenset()
        try:
            found = await asyncio.wait_for(self._session.p2p.list_peers(), LIST_PEERS_S)
        except NETWORK_ERRORS:
            return frozenset()
        return frozenset(str(info.peer_id) for info in found)

    def on_state(self, handler: StateHandler) -> None:
        self._state_handlers.append(handler)

    async def publish(self, topic: str, data: bytes) -> None:
        await self._topics.publish(topic, data)

    def subscribe(self, topic: str, handler: TopicHandler) -> None:
        self._topics.subscribe(topic, handler)

    def serve(self, method: str, handler: CallHandler) -> None:
        self._calls.serve(method, handler)

    async def call(self, peer: str, method: str, body: bytes, *, timeout_s: float = 5.0) -> bytes:
        return await self._calls.call(peer, method, body, timeout_s)

    def serve_stream(self, method: str, handler: StreamHandler) -> None:
        self._streams.serve(method, handler)

    def stream(
        self,
        peer: str,
        method: str,
        body: bytes,
        *,
        item_timeout_s: float = 10.0,
        max_bytes: int,
    ) -> AsyncIterator[bytes]:
        return self._streams.stream(peer, method, body, item_timeout_s, max_bytes)

    async def put(self, key: str, value: bytes, *, ttl_s: float) -> bool:
        return await self._directory.put(key, value, ttl_s)

    async def get(self, key: str) -> dict[str, bytes]:
        return await self._directory.get(key)

    def traffic(self) -> Traffic:
        return self._ledger.totals()

    def _up(self) -> Session:
        if self._session is None:
            raise Unreachable("our own network is down; it is being restarted")
        return self._session

    async def _launch(self) -> Session:
        session = await launch(self._settings)
        try:
            await self._calls.attach(session)
            await self._streams.attach(session)
            await self._topics.attach(session)
        except NETWORK_ERRORS as error:
            await session.close()
            raise PreflightFailed(f"p2pd ended while it started: {error}. See the log, then start again") from None
        except asyncio.CancelledError:
            await asyncio.shield(session.close())
            raise
        if self._stored is not None:
            session.node.protocol.storage = self._stored  # what we held for others outlives p2pd
        self._stored = session.node.protocol.storage
        self._session, self._announced = session, session.announced
        self._topics.follow_up()
        return session

    async def _restart(self) -> Session:
        try:
            session = await self._launch()
        except PreflightFailed:
            if self._port_is_free_choice:
                self._settings = self._settings.at_port(0)  # somebody took it meanwhile: the next attempt takes another
            raise
        await bootstrap.join(session, list(self._good.values()))
        self._tell(True)
        return session

    async def _down(self) -> None:
        """p2pd is dead: whoever waits for it learns now; records that we held for others stay."""
        self._keep_port()
        self._tell(False)
        await self._close()

    def _keep_port(self) -> None:
        """The next p2pd listens where others know us."""
        for text in self._announced if self._port_is_free_choice and not self._settings.announce else ():
            endpoint = address_text.tcp_endpoint(text)
            if endpoint is not None and not address_text.is_relayed(text):
                self._settings = self._settings.at_port(endpoint[1])
                return

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await self._topics.detach()
            await self._streams.detach()
            await session.close()

    async def _refresh(self) -> None:
        session = self._session
        if session is None:
            return
        self._announced = await visible(session.p2p, self._settings, latest=True)
        await self._directory.refresh()

    def _tell(self, is_up: bool) -> None:
        for handler in self._state_handlers:
            handler(is_up)


def _announced(texts: Sequence[str], peer: str) -> tuple[str, ...]:
    """The user's addresses, each ending in our peer id."""
    return tuple(address_text.check(t if t.endswith(f"/p2p/{peer}") else f"{t.rstrip('/')}/p2p/{peer}") for t in texts)
