"""The swarm's network inside one process: what `swarm/libp2p/` is over sockets, here over the running event loop.

In: a seed and `Conditions` (latency, loss, duplicates, cut streams), faults called at any time: partition, heal, crash,
outage. Out: one `Transport` per node.

Invariants: no thread, no socket, no clock but the loop's, so that it runs under virtual time; every draw comes from one
seeded generator and nothing is iterated in the order of a hash, so the same seed and program give the same trace. Who
did not join, directly or through others, reaches nobody. A crashed peer fails calls after one latency, as a closed
connection does; a partition swallows them until their deadline, as a black hole does.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from p2prl.errors import PeerError, TooLarge, Truncated, Unreachable
from p2prl.swarm.transport import (
    MAX_CALL_BYTES,
    MAX_ITEM_BYTES,
    MAX_TOPIC_BYTES,
    CallHandler,
    JoinReport,
    StateHandler,
    StreamHandler,
    TopicHandler,
    Traffic,
)

T = TypeVar("T")
Observer = Callable[[float, str, str, str, str], None]


class Conditions(msgspec.Struct, frozen=True):
    """What every message meets. Chances in 0-1, drawn per message."""

    latency_s: float = 0.02  # the least, one way
    jitter_s: float = 0.02  # mean of the exponential part on top: gossip overtakes itself
    loss: float = 0.0  # a gossiped message doesn't reach one subscriber; a call's connection breaks
    duplicate: float = 0.0  # a gossiped message comes twice (p2pd forgets what it saw after two minutes)
    cut: float = 0.0  # an item is the last of its stream
    bytes_per_s: float | None = None  # adds its time to calls and stream items


class MemoryNetwork:
    """The wires between all nodes, and their faults. `observer(time, event, source, target, kind)` sees all."""

    def __init__(self, seed: int, conditions: Conditions | None = None, observer: Observer | None = None) -> None:
        self.conditions = conditions or Conditions()
        self.random = random.Random(seed)
        self._observer = observer
        self._nodes: dict[str, MemoryTransport] = {}
        self._walls: list[tuple[frozenset[str], frozenset[str]]] = []
        self._next_island = 0

    def transport(self, peer_id: str) -> "MemoryTransport":
        """A new node, or after `crash` (or `stop`) the next life of one, without handlers. It is not started."""
        old = self._nodes.get(peer_id)
        if old is not None and old.is_up:
            raise ValueError(f"{peer_id} is still up: crash or stop it first")
        node = self._nodes[peer_id] = MemoryTransport(self, peer_id)
        return node

    def partition(self, one: Iterable[str], other: Iterable[str]) -> None:
        """Nothing passes between the two sets until `heal`; partitions add up."""
        self._walls.append((frozenset(one), frozenset(other)))

    def heal(self) -> None:
        """End every partition."""
        self._walls.clear()

    def crash(self, peer_id: str) -> None:
        """kill -9: its handlers end, its directory copies and registrations are gone. `transport` gives a new life."""
        self.note("crash", peer_id, "", "")
        self._nodes[peer_id].go_down()

    def outage(self, peer_id: str) -> None:
        """Its p2pd died: nothing in or out, state handlers hear False; registrations stay. Ended by `recover`."""
        node = self._nodes[peer_id]
        if node.is_up:
            node.go_down()
            node.tell_state(False)

    def recover(self, peer_id: str) -> None:
        """Its p2pd is back and has rejoined whom it knew."""
        node = self._nodes[peer_id]
        if not node.is_up:
            node.come_up(rejoin=True)
            node.tell_state(True)

    # -- for transports ---------------------------------------------------------------------------------------------

    def node(self, peer_id: str) -> "MemoryTransport | None":
        """The node when it is up."""
        node = self._nodes.get(peer_id)
        return node if node is not None and node.is_up else None

    def up(self) -> list["MemoryTransport"]:
        """Nodes that are up, by peer id."""
        return [self._nodes[peer] for peer in sorted(self._nodes) if self._nodes[peer].is_up]

    def walled(self, one: str, other: str) -> bool:
        return any((one in a and other in b) or (one in b and other in a) for a, b in self._walls)

    def reaches(self, one: "MemoryTransport", other: "MemoryTransport") -> bool:
        return one.is_up and other.is_up and one.island == other.island and not self.walled(one.peer_id, other.peer_id)

    def new_island(self) -> int:
        self._next_island += 1
        return self._next_island

    def merge(self, one: int, other: int) -> None:
        for node in self._nodes.values():
            if node.island == other:
                node.island = one

    def latency(self, num_bytes: int = 0) -> float:
        wire = self.conditions
        jitter_s = self.random.expovariate(1 / wire.jitter_s) if wire.jitter_s > 0 else 0.0
        return wire.latency_s + jitter_s + (num_bytes / wire.bytes_per_s if wire.bytes_per_s else 0.0)

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability

    def note(self, event: str, source: str, target: str, kind: str) -> None:
        if self._observer is not None:
            self._observer(asyncio.get_running_loop().time(), event, source, target, kind)


class MemoryTransport:
    """One node's `Transport`. Made by `MemoryNetwork.transport`."""

    def __init__(self, network: MemoryNetwork, peer_id: str) -> None:
        self._network, self._peer_id = network, peer_id
        self.is_up = False
        self.island = 0  # nodes that joined each other share one
        self._rejoin_island = 0
        self._calls: dict[str, CallHandler] = {}
        self._streams: dict[str, StreamHandler] = {}
        self._topics: dict[str, list[TopicHandler]] = {}
        self._state_handlers: list[StateHandler] = []
        self._tasks: dict[asyncio.Future[Any], None] = {}  # handlers at work; a dict: cancelled in a fixed order
        self._directory: dict[str, dict[str, tuple[bytes, float, float]]] = {}  # key, peer -> value, stored, expires
        self._sent, self._received = dict[str, int](), dict[str, int]()

    @property
    def peer_id(self) -> str:
        return self._peer_id

    async def start(self) -> None:
        if not self.is_up:
            self.come_up()

    async def stop(self) -> None:
        if self.is_up:
            self.go_down()

    def addresses(self) -> Sequence[str]:
        return (f"/memory/{self._peer_id}/p2p/{self._peer_id}",)

    async def join(self, addresses: Sequence[str]) -> list[JoinReport]:
        reports = []
        for address in addresses:
            peer = address.rsplit("/", 1)[-1]
            await asyncio.sleep(self._network.latency())
            other = self._network.node(peer)
            if self.is_up and other is not None and not self._network.walled(self._peer_id, peer):
                self._network.merge(other.island, self.island)
                reports.append(JoinReport(address, peer=peer))
            else:
                reports.append(JoinReport(address, error="no answer from this address"))
        return reports

    async def peers(self) -> frozenset[str]:
        return frozenset(node.peer_id for node in self._others())

    def on_state(self, handler: StateHandler) -> None:
        self._state_handlers.append(handler)

    # -- gossip -----------------------------------------------------------------------------------------------------

    async def publish(self, topic: str, data: bytes) -> None:
        if len(data) > MAX_TOPIC_BYTES:
            raise TooLarge(f"a message of {len(data)} bytes on {topic} is over the limit of {MAX_TOPIC_BYTES}")
        network = self._network
        loop = asyncio.get_running_loop()
        for node in self._others():
            if topic not in node._topics:
                continue
            _count(self._sent, topic, len(data))
            if network.chance(network.conditions.loss):
                network.note("lost", self._peer_id, node.peer_id, topic)
                continue
            for _ in range(2 if network.chance(network.conditions.duplicate) else 1):
                loop.call_later(network.latency(len(data)), node._hear, self, topic, data)

    def subscribe(self, topic: str, handler: TopicHandler) -> None:
        self._topics.setdefault(topic, []).append(handler)

    def _hear(self, source: "MemoryTransport", topic: str, data: bytes) -> None:
        # A message already on its way survives its sender, not a wall or its receiver.
        if not self.is_up or self._network.walled(source.peer_id, self._peer_id):
            return
        _count(self._received, topic, len(data))
        self._network.note("gossip", source.peer_id, self._peer_id, topic)
        for handler in self._topics.get(topic, ()):
            try:
                handler(source.peer_id, data)
            except PeerError as error:  # the publisher's fault: it must not reach the loop
                self._network.note(f"refused {error.code}", source.peer_id, self._peer_id, topic)

    # -- calls ------------------------------------------------------------------------------------------------------

    def serve(self, method: str, handler: CallHandler) -> None:
        self._calls[method] = handler

    async def call(self, peer: str, method: str, body: bytes, *, timeout_s: float = 5.0) -> bytes:
        if len(body) > MAX_CALL_BYTES:
            raise TooLarge(f"a call of {method} with {len(body)} bytes is over the limit of {MAX_CALL_BYTES}")
        deadline = asyncio.get_running_loop().time() + timeout_s
        target = await self._reach(peer, method, len(body), deadline)
        handler = target._calls.get(method)
        if handler is None:
            raise PeerError(f"{peer} does not know the method {method}", peer=peer)
        _count(target._received, method, len(body))
        reply = await self._result(target, handler(self._peer_id, body), method, deadline)
        if len(reply) > MAX_CALL_BYTES:
            raise TooLarge(f"the reply of {method}, {len(reply)} bytes, is over the limit", peer=peer)
        _count(target._sent, method, len(reply))
        await self._travel(target, len(reply), method, deadline)
        _count(self._received, method, len(reply))
        return reply

    # -- streams ----------------------------------------------------------------------------------------------------

    def serve_stream(self, method: str, handler: StreamHandler) -> None:
        self._streams[method] = handler

    async def stream(
        self, peer: str, method: str, body: bytes, *, item_timeout_s: float = 10.0, max_bytes: int
    ) -> AsyncIterator[bytes]:
        loop = asyncio.get_running_loop()
        if len(body) > MAX_CALL_BYTES:
            raise TooLarge(f"a stream of {method} asked with {len(body)} bytes is over the limit of {MAX_CALL_BYTES}")
        target = await self._reach(peer, method, len(body), loop.time() + item_timeout_s)
        handler = target._streams.get(method)
        if handler is None:
            raise PeerError(f"{peer} does not know the stream {method}", peer=peer)
        _count(target._received, method, len(body))
        items = handler(self._peer_id, body)
        total, started = 0, False
        try:
            while True:
                deadline = loop.time() + item_timeout_s
                item = await self._result(target, _next(items), method, deadline, started=started)
                if item is None:
                    return
                total += len(item)
                if len(item) > MAX_ITEM_BYTES or total > max_bytes:
                    raise TooLarge(f"{method} sends more than asked for: {total} bytes so far", peer=peer)
                _count(target._sent, method, len(item))
                await self._travel(target, len(item), method, deadline, started=True)
                if self._network.chance(self._network.conditions.cut):
                    raise Truncated(f"the stream {method} ended without its end mark", peer=peer)
                _count(self._received, method, len(item))
                started = True
                yield item
        finally:
            close = getattr(items, "aclose", None)
            if close is not None:
                await close()

    async def put(self, key: str, value: bytes, *, ttl_s: float) -> bool:
        await asyncio.sleep(self._network.latency(len(value)))
        if not self.is_up:
            return False
        now = asyncio.get_running_loop().time()
        others = self._others()
        for node in (self, *others):
            node._directory.setdefault(key, {})[self._peer_id] = (value, now, now + ttl_s)
            _count(node._received if node is not self else self._sent, "directory", len(value))
        return bool(others)

    async def get(self, key: str) -> dict[str, bytes]:
        await asyncio.sleep(2 * self._network.latency())
        if not self.is_up:
            return {}
        now = asyncio.get_running_loop().time()
        newest: dict[str, tuple[bytes, float]] = {}
        for node in (self, *self._others()):
            records = node._directory.get(key, {})
            for peer in [peer for peer, (_, _, expires) in records.items() if expires <= now]:
                del records[peer]
            for peer, (value, stored, _) in records.items():
                if peer not in newest or stored > newest[peer][1]:
                    newest[peer] = (value, stored)
        return {peer: newest[peer][0] for peer in sorted(newest)}

    def traffic(self) -> Traffic:
        return Traffic(dict(self._sent), dict(self._received))

    # -- for the network --------------------------------------------------------------------------------------------

    def come_up(self, *, rejoin: bool = False) -> None:
        self.is_up = True
        self.island = self._rejoin_island if rejoin else self._network.new_island()

    def go_down(self) -> None:
        self.is_up = False
        self._rejoin_island, self.island = self.island, 0
        self._directory.clear()
        for task in tuple(self._tasks):
            task.cancel()

    def tell_state(self, is_up: bool) -> None:
        for handler in self._state_handlers:
            handler(is_up)

    def _others(self) -> list["MemoryTransport"]:
        return [node for node in self._network.up() if node is not self and self._network.reaches(self, node)]

    async def _reach(self, peer: str, method: str, num_bytes: int, deadline: float) -> "MemoryTransport":
        """The request travels. Raises Unreachable."""
        if not self.is_up:
            raise Unreachable("our own network is down", peer=peer)
        _count(self._sent, method, num_bytes)
        target = self._network.node(peer)
        if target is None or target is self:
            await asyncio.sleep(self._network.latency())
            raise Unreachable(f"{peer} is not there", peer=peer)
        await self._travel(target, num_bytes, method, deadline)
        self._network.note("ask", self._peer_id, peer, method)
        return target

    async def _travel(
        self, target: "MemoryTransport", num_bytes: int, method: str, deadline: float, *, started: bool = False
    ) -> None:
        """One way over the wire, as long as it stands; not beyond the deadline."""
        loop = asyncio.get_running_loop()
        network = self._network
        lost = network.chance(network.conditions.loss)
        latency_s = network.latency(num_bytes)
        left_s = max(0.0, deadline - loop.time())
        await asyncio.sleep(min(latency_s, left_s))
        broken = Truncated if started else Unreachable
        if not (self.is_up and target.is_up) or lost or self.island != target.island:
            raise broken(f"the connection to {target.peer_id} broke during {method}", peer=target.peer_id)
        walled = network.walled(self._peer_id, target.peer_id)
        if walled:
            await asyncio.sleep(max(0.0, deadline - loop.time()))
        if walled or latency_s > left_s:
            raise Unreachable(f"no answer from {target.peer_id} to {method} in time", peer=target.peer_id)

    async def _result(
        self,
        target: "MemoryTransport",
        work: Awaitable[T],
        method: str,
        deadline: float,
        *,
        started: bool = False,
    ) -> T:
        """`work` run as the target's task: it ends with the target, with us, or at the deadline."""
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(work)
        target._tasks[task] = None
        try:
            await asyncio.wait((task,), timeout=max(0.0, deadline - loop.time()))
        finally:
            target._tasks.pop(task, None)
            is_late = not task.done()
            if is_late:
                task.cancel()
                await asyncio.wait((task,))
        peer = target.peer_id
        if is_late:
            raise Unreachable(f"no answer from {peer} to {method} in time", peer=peer)
        if task.cancelled():
            broken = Truncated if started else Unreachable
            raise broken(f"the connection to {peer} broke during {method}", peer=peer)
        error = task.exception()
        if error is not None:
            # As over the wire: the caller learns the text, not the type.
            raise PeerError(f"{peer} failed at {method}: {error}", peer=peer) from None
        return task.result()


async def _next(items: AsyncIterator[bytes]) -> bytes | None:
    return await anext(items, None)


def _count(table: dict[str, int], name: str, num_bytes: int) -> None:
    kind = name.rsplit("/", 1)[-1]
    table[kind] = table.get(kind, 0) + num_bytes
