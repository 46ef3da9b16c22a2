"""Serving the pieces of contents that we hold, whole or on their way.

In: requests of peers. Out: bitmaps of pieces, streams of pieces; or for a learner that spares its upload, whom to ask.

Invariants: only pieces that were verified are served, and each is hashed again while it is read, the first time and then
every RECHECK_S: of one that rotted on our disk the last chunk is never sent, so nobody takes it for ours. A request costs
memory for one chunk of a stream, whatever it asks for; no file is touched on the loop.
"""

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

from p2prl import codec
from p2prl.clock import Clock
from p2prl.errors import BadRecord, Unreachable
from p2prl.records import PIECE_BYTES, Hash
from p2prl.swarm.metered_transport import MeteredTransport
from p2prl.swarm.transport import MAX_ITEM_BYTES
from p2prl.weights.messages import (
    HAVE,
    MAX_NAMED,
    MAX_PIECES,
    PIECES,
    HaveReply,
    HaveRequest,
    PieceHead,
    PieceRequest,
    piece_bytes,
    to_bits,
)
from p2prl.weights.partial import Partial
from p2prl.weights.pulled import Pulled
from p2prl.weights.spare import HOLDER, LEARNER, Spare

LEAST_ITEM_BYTES = 4 * 2**10
CHUNK_BYTES = 2**20  # read at once, in a thread
RECHECK_S = 600.0
MAX_CHECKED = 2**16  # pieces that are remembered as whole: 256 GiB of contents
Find = Callable[[bytes], Path | None]
Expect = Callable[[bytes], tuple[Hash, ...]]


async def _keep(content_hash: bytes) -> None:
    """Whoever serves a file that nobody makes again leaves it there."""


class PieceServer:
    """Registers `weights` and `have`. `find` gives the whole file of a content hash, and may not block for long.

    `expect` gives the list of pieces that a manifest has for a content, checked against its name, () where none has one;
    it may not block for long either. Where a piece is not as listed, `rotted` is awaited.

    `partials` are the contents on their way: `fetch` puts its own there. While `spares()` each piece goes to few peers.
    `item_bytes()` is the longest item that keeps the upload even under its cap; the transport's own word by default.
    """

    def __init__(
        self,
        transport: MeteredTransport,
        clock: Clock,
        find: Find,
        expect: Expect,
        *,
        rotted: Callable[[bytes], Awaitable[None]] = _keep,
        spares: Callable[[], bool] = lambda: False,
        item_bytes: Callable[[], int] | None = None,
        pulled: Pulled | None = None,
    ) -> None:
        self._clock, self._find, self._expect, self._rotted = clock, find, expect, rotted
        self._pulled = pulled or Pulled()
        self._spares, self._item_bytes = spares, item_bytes or transport.up_item_bytes
        self._spare = Spare()
        self.partials: dict[bytes, Partial] = {}
        self._checked: dict[tuple[bytes, int], float] = {}  # a piece -> when it was last found whole
        transport.serve(HAVE, self._have)
        transport.serve_stream(PIECES, self._pieces)

    async def _have(self, peer: str, body: bytes) -> bytes:
        request = codec.decode(body, HaveRequest)
        held = await asyncio.to_thread(self._look, request.content_hash)
        return codec.encode(HaveReply(to_bits(held.indexes(), held.num_pieces)))

    async def _pieces(self, peer: str, body: bytes) -> AsyncIterator[bytes]:
        request = codec.decode(body, PieceRequest)
        item_bytes = max(LEAST_ITEM_BYTES, min(request.item_bytes, self._item_bytes(), MAX_ITEM_BYTES))
        left = list(dict.fromkeys(request.indexes))
        held = await asyncio.to_thread(self._look, request.content_hash)
        if not held.num_bytes:
            raise Unreachable("this node does not have that content")
        if max(left) >= held.num_pieces:
            raise BadRecord(f"the content has {held.num_pieces} pieces, and piece {max(left)} is asked for")
        while left:
            index = self._spare.order(request.content_hash, left)[0]  # different peers get different pieces first
            left.remove(index)
            async with contextlib.aclosing(self._piece(held, request, index, peer, item_bytes)) as items:
                async for item in items:
                    yield item

    async def _piece(
        self, held: "_Held", request: PieceRequest, index: int, peer: str, item_bytes: int
    ) -> AsyncGenerator[bytes, None]:
        content, spare = request.content_hash, self._spare
        rules = LEARNER if self._spares() else HOLDER
        answer = spare.ask(rules, content, index, peer, request.without, self._clock.monotonic())
        if not answer.serve or not held.has(index):
            yield codec.encode(PieceHead(index, 0, answer.ask[-MAX_NAMED:]))
            return
        num_bytes = piece_bytes(held.num_bytes, index)
        whole = False
        spare.begin(content, index, peer, self._clock.monotonic())
        try:
            yield codec.encode(PieceHead(index, num_bytes))
            async with contextlib.aclosing(self._chunks(held, content, index, num_bytes)) as chunks:
                async for chunk in chunks:
                    for at in range(0, len(chunk), item_bytes):
                        yield chunk[at : at + item_bytes]
                        now = self._clock.monotonic()
                        spare.moved(content, index, peer, now)
                        self._pulled.took(content, now)
            whole = True
        finally:
            spare.end(content, index, peer, self._clock.monotonic(), whole=whole)

    async def _chunks(
        self, held: "_Held", content_hash: bytes, index: int, num_bytes: int
    ) -> AsyncGenerator[bytes, None]:
        """One is read and hashed ahead while the last one is being sent."""
        digest, offset, now = blake3(), index * PIECE_BYTES, self._clock.monotonic()
        hashes = now - self._checked.get((content_hash, index), -math.inf) >= RECHECK_S

        def take(at: int) -> bytes:
            data = self._read(content_hash, offset + at, min(CHUNK_BYTES, num_bytes - at))
            if hashes:
                digest.update(data)
            return data

        def read(at: int) -> asyncio.Future[bytes]:
            reading = asyncio.ensure_future(asyncio.to_thread(take, at))
            reading.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait for it
            return reading

        ahead = read(0)
        try:
            for at in range(CHUNK_BYTES, num_bytes + CHUNK_BYTES, CHUNK_BYTES):
                chunk = await ahead
                if at < num_bytes:
                    ahead = read(at)
                elif hashes and not held.fits(index, digest.digest()):
                    await self._rotted(content_hash)
                    raise Unreachable(f"piece {index} is not whole on this disk any more")
                elif hashes:
                    self._found_whole(content_hash, index, now)
                yield chunk
        finally:
            ahead.cancel()

    def _found_whole(self, content_hash: bytes, index: int, now: float) -> None:
        if len(self._checked) >= MAX_CHECKED:
            self._checked.clear()  # each is hashed once more
        self._checked[content_hash, index] = now

    # -- blocking ---------------------------------------------------------------------------------------------------

    def _paths(self, content_hash: bytes) -> Iterator[tuple[Path, Partial | None]]:
        """Where the content may be: whole; on its way; whole, if it just now got its name."""
        whole, partial = self._find(content_hash), self.partials.get(content_hash)
        if whole is not None:
            yield whole, None
        if partial is not None:
            yield partial.path, partial
            yield partial.target, None

    def _look(self, content_hash: bytes) -> "_Held":
        for path, partial in self._paths(content_hash):
            with contextlib.suppress(OSError):  # what can't be read is not here for others
                num_bytes = path.stat().st_size
                pieces = self._expect(content_hash) if partial is None else partial.content.pieces
                return _Held(num_bytes if pieces else 0, partial, pieces)
        return _Held(0, None, ())

    def _read(self, content_hash: bytes, offset: int, num_bytes: int) -> bytes:
        """Opened for each chunk: a caller that leaves in mid read leaves nothing open."""
        why = "it was dropped"
        for path, _ in self._paths(content_hash):
            try:
                with path.open("rb", buffering=0) as file:
                    data = os.pread(file.fileno(), num_bytes, offset)
            except OSError as error:
                why = error.strerror or str(error)
                continue
            if len(data) == num_bytes:
                return data
        raise Unreachable(f"the content can't be read any more: {why}")


class _Held(msgspec.Struct, frozen=True):
    """What we have of a content: its whole length, the partial file where not all of it is here, its pieces' hashes."""

    num_bytes: int
    partial: Partial | None
    pieces: tuple[Hash, ...]

    @property
    def num_pieces(self) -> int:
        return min(MAX_PIECES, -(-self.num_bytes // PIECE_BYTES))

    def indexes(self) -> Collection[int]:
        """The pieces that can be served, now; threads add to them meanwhile."""
        return range(self.num_pieces) if self.partial is None else frozenset(self.partial.have)

    def has(self, index: int) -> bool:
        return self.partial is None or index in self.partial.have

    def fits(self, index: int, digest: Hash) -> bool:
        return index < len(self.pieces) and self.pieces[index] == digest
