"""Nodes that serve and fetch contents, over the in-process network under virtual time."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import async_solipsism

from p2prl import codec
from p2prl.clock import LoopClock
from p2prl.errors import PeerError
from p2prl.records import PIECE_BYTES, Content
from p2prl.swarm.memory_transport import Conditions, MemoryNetwork
from p2prl.swarm.metered_transport import MeteredTransport
from p2prl.weights.contents import content_name
from p2prl.weights.partial import Partial, content_path
from p2prl.weights.serve import PieceServer
from p2prl.weights.transfer import Options, Surroundings, fetch
from tests.factories import identity

MIB = 2**20
NAMES = [identity(number).peer_id for number in range(16)]


def virtual(program: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        return runner.run(program())


def now() -> float:
    return asyncio.get_running_loop().time()


def data_of(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def content_of(data: bytes) -> Content:
    pieces = tuple(codec.content_hash(data[at : at + PIECE_BYTES]) for at in range(0, len(data), PIECE_BYTES))
    return Content("anchor", None, content_name(len(data), pieces), len(data), pieces)


class Node:
    """A transport, a folder of contents, a piece server."""

    def __init__(self, swarm: "Swarm", number: int, **rates: float | None) -> None:
        self.swarm, self.peer = swarm, NAMES[number]
        self.folder = swarm.root / f"node{number}"
        self.inner = swarm.network.transport(self.peer)
        self.transport = MeteredTransport(self.inner, swarm.clock, **rates)
        self.is_learner = False
        self.known: dict[bytes, tuple[bytes, ...]] = {}  # lists of pieces, as manifests have them
        self.found_rotted: list[bytes] = []
        self.given: list[tuple[str, int]] = []  # bytes of pieces, by peer
        self.served = Recorder(self)
        self.server = PieceServer(
            self.served,  # type: ignore[arg-type]
            swarm.clock,
            self.find,
            lambda content_hash: self.known.get(content_hash, ()),
            rotted=self.rotted,
            spares=lambda: self.is_learner,
            item_bytes=self.transport.up_item_bytes,
        )
        self.blamed: list[PeerError] = []
        self.surroundings = Surroundings(
            clock=swarm.clock,
            blame=self.blamed.append,
            partials=self.server.partials,
        )

    def find(self, content_hash: bytes) -> Path | None:
        path = content_path(self.folder, content_hash)
        return path if path.is_file() else None

    async def rotted(self, content_hash: bytes) -> None:
        self.found_rotted.append(content_hash)
        content_path(self.folder, content_hash).unlink()

    def hold(self, data: bytes) -> Content:
        content = content_of(data)
        self.known[content.content_hash] = content.pieces
        path = content_path(self.folder, content.content_hash)
        path.parent.mkdir(parents=True)
        path.write_bytes(data)
        return content

    def holds_part(self, data: bytes, indexes: Sequence[int]) -> None:
        """Some pieces, as after a part of a transfer; served from now on."""
        content = content_of(data)
        partial = Partial.open(self.folder, content)
        for index in indexes:
            assert partial.put(index, data[index * PIECE_BYTES : (index + 1) * PIECE_BYTES])
        self.server.partials[content.content_hash] = partial

    async def fetch(self, content: Content, holders: Sequence[str] = (), **options: Any) -> Path:
        self.known[content.content_hash] = content.pieces
        peers = tuple(holders) or tuple(node.peer for node in self.swarm.nodes if node is not self)
        chosen = Options(seed=NAMES.index(self.peer), **options)
        return await fetch(self.transport, content, lambda: peers, self.folder, options=chosen, node=self.surroundings)

    @property
    def given_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.given)

    def given_to(self, peer: str) -> int:
        return sum(num_bytes for other, num_bytes in self.given if other == peer)


class Recorder:
    """The transport as the piece server sees it: counts what it gives, and spoils it where a test says so."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.spoil: Callable[[bytes], bytes] = lambda item: item
        self.pause: Callable[[], Coroutine[Any, Any, None]] | None = None

    def serve(self, method: str, handler: Any) -> None:
        self._node.transport.serve(method, handler)

    def serve_stream(self, method: str, handler: Any) -> None:
        async def recorded(peer: str, body: bytes) -> AsyncIterator[bytes]:
            items = handler(peer, body)
            try:
                async for item in items:
                    if self.pause is not None:
                        await self.pause()
                    self._node.given.append((peer, len(item)))
                    yield self.spoil(item)
            finally:
                await items.aclose()

        self._node.transport.serve_stream(method, recorded)


class Swarm:
    """Nodes that all know each other."""

    def __init__(self, root: Path, num_nodes: int, *, conditions: Conditions | None = None, **rates: Any) -> None:
        self.root = root
        self.network, self.clock = MemoryNetwork(1, conditions or Conditions(0.005, 0.0)), LoopClock()
        self.nodes = [Node(self, number, **rates) for number in range(num_nodes)]

    async def start(self) -> "Swarm":
        for node in self.nodes:
            await node.transport.start()
            await node.transport.join(self.nodes[0].transport.addresses())
        return self
