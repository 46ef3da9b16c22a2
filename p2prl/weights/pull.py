"""Carries out one transfer: calls, streams, pieces to the disk. The decisions are `rarest.py`'s.

In: a partial file, peers that may hold the content, a transport. Out: the pieces that were missing; how far it is.

A piece goes from the wire to the disk in a thread, while the next one comes in.

Invariants: every item has a deadline, every piece too; at most a piece a stream and MAX_CHECKED more are in memory;
nothing is written that is not verified.
"""

import asyncio
import contextlib
import random
from collections.abc import Callable, Coroutine, Sequence

import msgspec

from p2prl import codec
from p2prl.clock import Clock, SystemClock
from p2prl.errors import BadRecord, P2prlError, PeerError, Truncated, Unreachable
from p2prl.records import PIECE_BYTES
from p2prl.swarm.metered_transport import MeteredTransport, closing
from p2prl.weights.holders import Holders, Remembered
from p2prl.weights.messages import (
    HAVE,
    PIECES,
    HaveReply,
    HaveRequest,
    PieceHead,
    PieceRequest,
    from_bits,
    piece_bytes,
)
from p2prl.weights.partial import Disk, Partial
from p2prl.weights.rarest import Ask, Board, Rules, Start, Stop

MAX_CONTENT_BYTES = 2**40
HEAD_BYTES = 2048  # the most that a PieceHead takes
PIECE_S = 300.0  # for one piece from one holder, where no other stream shares our line
CAP_SLACK = 3.0  # times what a piece takes under our own cap
ASK_S = 5.0
TICK_S = 0.2  # between two looks at who is slow
OFFER_S = 1.0  # between two looks at who there is
MAX_CHECKED = 8  # pieces of one transfer that wait for the disk
SMALL_BYTES = 256 * 2**10  # of a content for which few are asked
RATE_S = 2.0  # of the rate that is told


class Progress(msgspec.Struct):
    """How far a transfer is, for the node's owner. `num_bytes` are verified; `bytes_per_s` come in, `num_peers` send.

    `reads_disk`: before the first byte comes, what came earlier is hashed again; after the last, the whole is.
    """

    num_bytes: int
    of_bytes: int
    num_peers: int = 0
    bytes_per_s: float = 0.0
    reads_disk: bool = False


class Options(msgspec.Struct, frozen=True):
    """What callers may choose; all have defaults."""

    rules: Rules = Rules()
    item_timeout_s: float = 10.0
    most_bytes: int = MAX_CONTENT_BYTES
    seed: int | None = None  # of the order among equals; None: a new one


class Surroundings(msgspec.Struct):
    """What a node shares between its transfers."""

    clock: Clock = msgspec.field(default_factory=SystemClock)
    blame: Callable[[PeerError], None] = lambda error: None  # a peer that served a wrong piece
    partials: dict[bytes, Partial] = msgspec.field(default_factory=dict)  # `PieceServer.partials`: served meanwhile
    running: dict[bytes, Progress] = msgspec.field(default_factory=dict)  # by content; one transfer each
    remembered: Remembered = msgspec.field(default_factory=Remembered)
    item_bytes: Callable[[], int] | None = (
        None  # the longest that keeps our download under its cap: the transport's word
    )
    progress: Callable[[int, int], None] = lambda num_bytes, of_bytes: None
    disk: Disk = msgspec.field(default_factory=Disk)


class Pull:
    def __init__(
        self,
        transport: MeteredTransport,
        partial: Partial,
        holders: Callable[[], Sequence[str]],
        options: Options,
        node: Surroundings,
        progress: Progress,
    ) -> None:
        self._transport, self._partial, self._options, self._node = transport, partial, options, node
        self._content = content = partial.content
        self._candidates = holders
        self._random = random.Random(options.seed)
        known = node.remembered.of(content.content_hash)
        is_small = content.content_bytes <= SMALL_BYTES
        rules = options.rules
        self._holders = Holders(transport.peer_id, len(content.pieces), known, rules.holders, is_small=is_small)
        self._board = Board(content, partial.have, self._holders, rules, self._now())
        self._news = asyncio.Event()
        self._slots = asyncio.Semaphore(MAX_CHECKED)
        self._buffers: list[bytearray] = []  # free ones
        self._tasks: dict[asyncio.Task, None] = {}  # cancelled in a fixed order
        self._streams: dict[int, asyncio.Task] = {}
        self._failure: P2prlError | None = None  # of ours: the disk
        self._last: PeerError = Unreachable("nobody serves this content")
        self._offer_at = self._measured_at = self._now()
        self._progress, self._received = progress, 0  # bytes since they were measured

    async def run(self) -> None:
        try:
            while not self._board.is_done:
                self._offer()
                for action in self._board.decide(self._now()):
                    self._do(action)
                if self._board.hopeless(self._now()):
                    raise self._last
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):  # wait_for may swallow our cancellation when there are news
                        await self._news.wait()
                self._news.clear()
                self._measure()
                if self._failure is not None:
                    raise self._failure
        finally:
            tasks = tuple(self._tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def _now(self) -> float:
        return self._node.clock.monotonic()

    def _measure(self) -> None:
        progress, now = self._progress, self._now()
        progress.num_bytes, progress.num_peers = self._partial.num_bytes, self._board.num_senders
        span_s = now - self._measured_at
        if span_s >= RATE_S:
            rate, before = self._received / span_s, progress.bytes_per_s
            progress.bytes_per_s = 0.5 * (before + rate) if before else rate
            self._measured_at, self._received = now, 0

    def _offer(self) -> None:
        now = self._now()
        if now >= self._offer_at:
            self._offer_at = now + OFFER_S
            first, others = self._candidates()[:1], list(self._candidates()[1:])
            self._random.shuffle(others)
            self._holders.offer([*first, *others], now)

    def _do(self, action: Ask | Start | Stop) -> None:
        match action:
            case Ask(peer):
                self._spawn(self._ask(peer))
            case Start(stream):
                self._streams[stream] = self._spawn(self._read(action))
            case Stop(stream):
                if stream in self._streams:
                    self._streams[stream].cancel()

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.pop(task, None)
        self._news.set()
        error = None if task.cancelled() else task.exception()
        if isinstance(error, P2prlError):
            self._failure = error
        elif error is not None:
            raise error

    async def _ask(self, peer: str) -> None:
        body = codec.encode(HaveRequest(self._content.content_hash))
        try:
            reply = codec.decode(await self._transport.call(peer, HAVE, body, timeout_s=ASK_S), HaveReply)
            have = from_bits(reply.bits, len(self._content.pieces))
            self._board.answered(peer, have, self._now())
        except PeerError as error:
            self._last = error
            self._holders.failed(peer, self._now())

    async def _read(self, start: Start) -> None:
        """The pieces of one stream; closed when what comes is not wanted any more."""
        failed = True
        try:
            await self._pieces(start)
            failed = False
        except PeerError as error:
            self._last = error
        except asyncio.CancelledError:
            failed = False
            raise
        finally:
            self._streams.pop(start.stream, None)
            self._board.ended(start.stream, self._now(), failed=failed)

    async def _pieces(self, start: Start) -> None:
        content, board, stream = self._content, self._board, start.stream
        item_bytes = (self._node.item_bytes or self._transport.down_item_bytes)()
        request = PieceRequest(content.content_hash, start.indexes, item_bytes, start.without)
        most = sum(piece_bytes(content.content_bytes, index) + HEAD_BYTES for index in start.indexes)
        index, at, left, began = 0, 0, 0, 0.0
        buffer = bytearray()
        items = self._transport.stream(
            start.peer, PIECES, codec.encode(request), item_timeout_s=self._options.item_timeout_s, max_bytes=most
        )
        async with closing(items):
            async for item in items:
                now = self._now()
                if left == 0:
                    head = self._head(start, item)
                    if head.num_bytes == 0:
                        board.busy(stream, head.index, head.ask, now)
                    elif not board.heads(stream, head.index, now):
                        return
                    index, at, left, began = head.index, 0, head.num_bytes, now
                    buffer = buffer or self._buffer()
                    continue
                if len(item) > left:
                    raise self._broken(start.peer, f"more than piece {index} came")
                if now - began > self._piece_s():
                    raise Unreachable(f"piece {index} took over {self._piece_s():.0f} s", peer=start.peer)
                buffer[at : at + len(item)] = item
                at, left = at + len(item), left - len(item)
                board.moved(stream, len(item), now)
                self._received += len(item)
                if left == 0:
                    await self._slots.acquire()
                    board.checking(stream, self._now())
                    self._spawn(self._check(start.peer, index, buffer, at))
                    buffer = bytearray()
        if left or board.expects(stream):
            raise Truncated("a stream ended without all of its pieces", peer=start.peer)

    def _piece_s(self) -> float:
        """What a piece may take: all of our streams share the line, and our own cap is no holder's fault."""
        num_streams = max(1, len(self._streams)) * max(1, len(self._node.partials))
        rate = self._transport.rates[1]
        return num_streams * max(PIECE_S, CAP_SLACK * PIECE_BYTES / rate if rate else 0.0)

    def _head(self, start: Start, item: bytes) -> PieceHead:
        try:
            head = codec.decode(item, PieceHead, limit=HEAD_BYTES)
        except PeerError as error:
            raise self._broken(start.peer, str(error)) from None
        if head.index not in start.indexes:
            raise self._broken(start.peer, f"piece {head.index} was not asked for")
        if head.num_bytes not in (0, piece_bytes(self._content.content_bytes, head.index)):
            raise self._broken(start.peer, f"piece {head.index} does not have {head.num_bytes} bytes")
        return head

    def _broken(self, peer: str, why: str) -> PeerError:
        error = BadRecord(f"a stream of pieces breaks its rules: {why}", peer=peer)
        self._node.blame(error)
        return error

    def _buffer(self) -> bytearray:
        """For one piece; used again and again: fresh memory for each would cost more than its hash."""
        return self._buffers.pop() if self._buffers else bytearray(PIECE_BYTES)

    async def _check(self, peer: str, index: int, buffer: bytearray, num_bytes: int) -> None:
        try:
            is_right = await asyncio.to_thread(self._partial.put, index, memoryview(buffer)[:num_bytes])
            self._buffers.append(buffer)
        finally:
            self._slots.release()
        if is_right:
            self._board.verified(peer, index, self._now())
            self._node.progress(self._partial.num_bytes, self._content.content_bytes)
        else:
            self._board.corrupt(peer, index)
            self._last = BadRecord(f"{peer} served a wrong piece {index} of {self._content_name}", peer=peer)
            self._node.blame(self._last)

    @property
    def _content_name(self) -> str:
        return self._content.content_hash.hex()[:16]
