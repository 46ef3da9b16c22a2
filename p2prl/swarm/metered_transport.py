"""A transport that keeps every peer to its share and our line to its caps, and knows what went to and came from whom.

In: another transport, quota rules, upload and download rates. Out: the same Protocol; bytes by peer; every fault that a
peer's request or message showed, to `on_fault`.

Invariants: a peer that asks too often is slowed, then answered OverQuota, and nobody else waits for it; who pulls gets
the same share of the upload whatever the number of its streams; the caps bound what streams and calls move, are kept
within 5 % over any 5 s, and may be changed at any time; liveness (gossip, small calls) never waits for a cap, streams
make room for it; the table of peers is bounded.
"""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from p2prl.clock import Clock
from p2prl.errors import OverQuota, PeerError
from p2prl.swarm.bandwidth import Bandwidth
from p2prl.swarm.fair import BURST_S, FairLine
from p2prl.swarm.lines import DownLine, UpLine
from p2prl.swarm.quota import Quota, QuotaRules, Ruled
from p2prl.swarm.transport import (
    MAX_ITEM_BYTES,
    CallHandler,
    JoinReport,
    StateHandler,
    StreamHandler,
    TopicHandler,
    Traffic,
    Transport,
)

REQUESTS = QuotaRules(requests_per_s=50.0, bytes_per_s=64.0 * 2**20)
MESSAGES = QuotaRules(requests_per_s=50.0, bytes_per_s=64.0 * 2**10)
MAX_PEERS = 1024
SMALL_BYTES = 4 * 2**10  # replies that go at once: heartbeats, votes
LEAST_ITEM_BYTES, MOST_ITEM_BYTES = 4 * 2**10, MAX_ITEM_BYTES
UP_ITEM_S, DOWN_ITEM_S = 0.05, 0.02  # of a cap in one item; several streams of a download each have one on its way


class PeerTraffic(msgspec.Struct):
    """Bytes of calls, streams and gossip between one peer and us since the start."""

    sent_bytes: int = 0
    received_bytes: int = 0


class MeteredTransport:
    """See the module. `up` and `down` are bytes a second, None for no cap."""

    def __init__(self, inner: Transport, clock: Clock, *, up: float | None = None, down: float | None = None) -> None:
        self._inner, self._clock = inner, clock
        now = clock.monotonic()
        self._up = UpLine(FairLine(up, now), clock)
        self._down = DownLine(Bandwidth(down, now, burst_s=BURST_S), clock)
        self._requests, self._messages = Quota(REQUESTS), Quota(MESSAGES)
        self.on_fault: Callable[[str, PeerError], None] = lambda peer, error: None
        self._peers: OrderedDict[str, PeerTraffic] = OrderedDict()  # the longest quiet first

    @property
    def peer_id(self) -> str:
        return self._inner.peer_id

    @property
    def rates(self) -> tuple[float | None, float | None]:
        """The caps up and down."""
        return self._up.rate, self._down.rate

    def set_rates(self, up: float | None, down: float | None) -> None:
        """New caps, from now on."""
        self._up.set_rate(up)
        self._down.set_rate(down)

    def up_item_bytes(self) -> int:
        """The longest item to send that keeps the upload even under its cap."""
        return _item_bytes(self._up.rate, UP_ITEM_S)

    def down_item_bytes(self) -> int:
        """The longest item to ask for that keeps the download even under its cap."""
        return _item_bytes(self._down.rate, DOWN_ITEM_S)

    def with_peer(self, peer: str) -> PeerTraffic:
        """What moved between `peer` and us."""
        traffic = self._peers.get(peer)
        if traffic is None:
            traffic = self._peers[peer] = PeerTraffic()
            if len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)
        self._peers.move_to_end(peer)
        return traffic

    # -- what peers ask of us ---------------------------------------------------------------------------------------

    def serve(self, method: str, handler: CallHandler) -> None:
        async def within_share(peer: str, body: bytes) -> bytes:
            try:
                await self._let_in(peer, len(body))
                reply = await handler(peer, body)
            except PeerError as error:
                self.on_fault(peer, error)
                raise
            self.with_peer(peer).sent_bytes += len(reply)
            if len(reply) <= SMALL_BYTES:
                self._up.charge(len(reply))
            else:
                self._up.sent(await self._up.turn(peer, len(reply)))
            return reply

        self._inner.serve(method, within_share)

    def serve_stream(self, method: str, handler: StreamHandler) -> None:
        async def within_share(peer: str, body: bytes) -> AsyncIterator[bytes]:
            try:
                await self._let_in(peer, len(body))
                items = handler(peer, body)
                async with closing(items):
                    async for item in items:
                        ticket = await self._up.turn(peer, len(item))
                        self.with_peer(peer).sent_bytes += len(item)
                        try:
                            yield item  # we are back when the network took it
                        finally:
                            self._up.sent(ticket)
            except PeerError as error:
                self.on_fault(peer, error)
                raise

        self._inner.serve_stream(method, within_share)

    def subscribe(self, topic: str, handler: TopicHandler) -> None:
        def within_share(publisher: str, data: bytes) -> None:
            self.with_peer(publisher).received_bytes += len(data)
            ruling = self._messages.ask(publisher, len(data), self._clock.monotonic())
            try:
                if ruling.kind is Ruled.IGNORE:
                    raise OverQuota(f"gossip of {topic}: {ruling.reason}", peer=publisher)
                handler(publisher, data)
            except PeerError as error:
                self.on_fault(publisher, error)
                raise

        self._inner.subscribe(topic, within_share)

    async def _let_in(self, peer: str, num_bytes: int) -> None:
        self.with_peer(peer).received_bytes += num_bytes
        ruling = self._requests.ask(peer, num_bytes, self._clock.monotonic())
        if ruling.kind is Ruled.IGNORE:
            raise OverQuota(ruling.reason, peer=peer)
        if ruling.wait_s > 0:
            await asyncio.sleep(ruling.wait_s)

    # -- what we ask of peers ---------------------------------------------------------------------------------------

    async def call(self, peer: str, method: str, body: bytes, *, timeout_s: float = 5.0) -> bytes:
        reply = await self._inner.call(peer, method, body, timeout_s=timeout_s)
        traffic = self.with_peer(peer)
        traffic.sent_bytes += len(body)
        traffic.received_bytes += len(reply)
        self._up.charge(len(body))
        self._down.correct(len(reply))
        return reply

    async def stream(
        self, peer: str, method: str, body: bytes, *, item_timeout_s: float = 10.0, max_bytes: int
    ) -> AsyncIterator[bytes]:
        self.with_peer(peer).sent_bytes += len(body)
        self._up.charge(len(body))
        expected = made = 0  # the next item is about as long as the last one
        items = self._inner.stream(peer, method, body, item_timeout_s=item_timeout_s, max_bytes=max_bytes)
        try:
            async with closing(items):
                while True:
                    await self._down.make_room(expected)
                    made = expected
                    item = await anext(items, None)
                    if item is None:
                        return
                    self.with_peer(peer).received_bytes += len(item)
                    self._down.correct(len(item) - made)
                    expected, made = len(item), 0
                    yield item
        finally:
            self._down.correct(-made)

    # -- passed on as they are --------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._inner.start()

    async def stop(self) -> None:
        await self._inner.stop()

    def addresses(self) -> Sequence[str]:
        return self._inner.addresses()

    async def join(self, addresses: Sequence[str]) -> list[JoinReport]:
        return await self._inner.join(addresses)

    async def peers(self) -> frozenset[str]:
        return await self._inner.peers()

    def on_state(self, handler: StateHandler) -> None:
        self._inner.on_state(handler)

    async def publish(self, topic: str, data: bytes) -> None:
        await self._inner.publish(topic, data)

    async def put(self, key: str, value: bytes, *, ttl_s: float) -> bool:
        return await self._inner.put(key, value, ttl_s=ttl_s)

    async def get(self, key: str) -> dict[str, bytes]:
        return await self._inner.get(key)

    def traffic(self) -> Traffic:
        return self._inner.traffic()


@contextlib.asynccontextmanager
async def closing(items: AsyncIterator[bytes]) -> AsyncIterator[None]:
    """A stream that is left early is closed now, not when it is collected."""
    try:
        yield
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()


def _item_bytes(rate: float | None, seconds: float) -> int:
    return MOST_ITEM_BYTES if rate is None else max(LEAST_ITEM_BYTES, min(int(rate * seconds), MOST_ITEM_BYTES))
