"""What the rest of the package knows of the network: one Protocol, two implementations.

`swarm/libp2p/` speaks hivemind's p2pd and DHT; `swarm/memory_transport.py` joins nodes of one process under virtual
time. Both authenticate the caller: `peer` in a handler is whom the connection proves, never what a record claims.

Rules both keep: every call and every stream item has a deadline; sizes are capped before decoding; a stream ends with
an explicit mark that carries its length, so that a cut one is told from a whole one; failures are `PeerError`s
(`Unreachable`, `Truncated`, `TooLarge`, `BadRecord`); a handler's own exception reaches the caller as `PeerError` and
never ends anything here. Handlers and subscriptions outlive a restart of the network below.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

MAX_CALL_BYTES = 64 * 2**10  # of a request or a reply; more goes by stream
MAX_ITEM_BYTES = 2**20  # of one stream item
MAX_TOPIC_BYTES = 2**10  # of a gossiped message

CallHandler = Callable[[str, bytes], Awaitable[bytes]]
StreamHandler = Callable[[str, bytes], AsyncIterator[bytes]]
TopicHandler = Callable[[str, bytes], None]
StateHandler = Callable[[bool], None]


class JoinReport(msgspec.Struct, frozen=True):
    """What became of one bootstrap address: `peer` when it answered, else `error` (a sentence)."""

    address: str
    peer: str = ""
    error: str = ""


class Traffic(msgspec.Struct, frozen=True):
    """Bytes moved since the start by kind of method or topic, e.g. {"announce": 1200}."""

    sent: dict[str, int]
    received: dict[str, int]


class Transport(Protocol):
    """Start it, register handlers (before or after), join, talk, stop."""

    @property
    def peer_id(self) -> str: ...

    async def start(self) -> None:
        """Listen. Raises PreflightFailed when the port is taken, the identity unusable."""
        ...

    async def stop(self) -> None:
        """Leave; idempotent; ends within seconds whatever the state below."""
        ...

    def addresses(self) -> Sequence[str]:
        """Announced multiaddrs of this node, each ending in /p2p/PEER_ID."""
        ...

    async def join(self, addresses: Sequence[str]) -> list[JoinReport]:
        """Dial each address and enter its routing tables. Never raises for dead ones; may be called again."""
        ...

    async def peers(self) -> frozenset[str]:
        """Peers with a live connection."""
        ...

    def on_state(self, handler: StateHandler) -> None:
        """Called with False when the network below died, with True when it is back."""
        ...

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip to every subscriber, at most MAX_TOPIC_BYTES. Best effort."""
        ...

    def subscribe(self, topic: str, handler: TopicHandler) -> None:
        """`handler(publisher, data)` for each message once, never for our own."""
        ...

    def serve(self, method: str, handler: CallHandler) -> None:
        """Answer unary calls of `method`."""
        ...

    async def call(self, peer: str, method: str, body: bytes, *, timeout_s: float = 5.0) -> bytes:
        """One request, one reply."""
        ...

    def serve_stream(self, method: str, handler: StreamHandler) -> None:
        """Answer `method` with a stream of items, each at most MAX_ITEM_BYTES."""
        ...

    def stream(
        self, peer: str, method: str, body: bytes, *, item_timeout_s: float = 10.0, max_bytes: int
    ) -> AsyncIterator[bytes]:
        """Items until the end mark. Raises Truncated without it, TooLarge beyond `max_bytes` in total."""
        ...

    async def put(self, key: str, value: bytes, *, ttl_s: float) -> bool:
        """Store our own record under `key` in the directory (one a peer and key). False when nobody took it."""
        ...

    async def get(self, key: str) -> dict[str, bytes]:
        """The live records under `key` by peer, newest copies; {} when there are none or nobody answers."""
        ...

    def traffic(self) -> Traffic: ...
