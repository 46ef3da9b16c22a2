"""Streams of items with explicit ends: over p2pd a stream that a dead peer cut looks like one that ended.

In: methods, handlers, bodies. Out: items until the end mark, or PeerErrors.

Frames: 4 bytes of length, then an item. Two lengths are marks: END is followed by the number of items and their total
length, ERROR by a length and an error. No hash: the connection is authenticated, and what matters is sealed or hashed.
Lengths are checked before anything is read; both sides have a deadline for every item; both ends close in any case.
"""

# hivemind has no types: its attributes begin as None and its protobuf modules are made at import.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import asyncio
import contextlib
import logging
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import (
    raise_if_failed,
    read_pbmsg_safe,
    write_pbmsg,
)
from hivemind.proto import p2pd_pb2

from p2prl.errors import BadRecord, PeerError, TooLarge, Truncated, Unreachable
from p2prl.swarm.libp2p import wire
from p2prl.swarm.libp2p.ledger import Ledger
from p2prl.swarm.libp2p.limits import Slots
from p2prl.swarm.libp2p.session import NETWORK_ERRORS, Session, peer_bytes
from p2prl.swarm.transport import MAX_CALL_BYTES, MAX_ITEM_BYTES, StreamHandler

END, ERROR = 0xFFFFFFFF, 0xFFFFFFFE
REQUEST_TIMEOUT_S = 10.0
MAKE_ITEM_TIMEOUT_S = 60.0  # a handler may have to read or compute
SEND_ITEM_TIMEOUT_S = 30.0  # a caller that reads slower than 1 MiB in that time is cut
_LENGTH = struct.Struct(">I")
_SUM = struct.Struct(">QQ")
_log = logging.getLogger(__name__)


class Streams:
    """Our stream handlers and the streams we read."""

    def __init__(self, prefix: str, session: Callable[[], Session], ledger: Ledger) -> None:
        self._own, self._shared = f"/p2prl/1/{prefix}/stream", "/p2prl/1/stream"
        self._session, self._ledger = session, ledger
        self._handlers: dict[str, StreamHandler] = {}
        self._slots = Slots(per_peer=8, total=64, waiting=24)
        self._serving: set[asyncio.Task] = set()

    def serve(self, method: str, handler: StreamHandler) -> None:
        self._handlers[method] = handler

    async def attach(self, session: Session) -> None:
        for protocol in (self._own, self._shared):
            await session.p2p.add_binary_stream_handler(protocol, self._server(protocol))

    async def detach(self) -> None:
        """End what we still serve."""
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving, timeout=1.0)

    async def stream(
        self, peer: str, method: str, body: bytes, item_timeout_s: float, max_bytes: int
    ) -> AsyncIterator[bytes]:
        request = wire.encode_request(method, body)
        target = peer_bytes(peer)
        protocol = self._shared if method.startswith(wire.SHARED) else self._own
        session = self._session()
        num_items = 0
        try:
            async with _opened(session, target, protocol, item_timeout_s) as (
                reader,
                writer,
            ):
                await asyncio.wait_for(_send(writer, request), item_timeout_s)
                self._ledger.sent(method, len(request))
                received = _Received(peer, max_bytes)
                while (item := await asyncio.wait_for(received.item(reader), item_timeout_s)) is not None:
                    num_items += 1
                    self._ledger.received(method, len(item))
                    yield item
        except TimeoutError:
            raise Unreachable(f"no item of {method} within {item_timeout_s:g} s", peer=peer) from None
        except EOFError:
            raise Truncated(f"{method} was cut after {num_items} items", peer=peer) from None
        except NETWORK_ERRORS as error:
            kind = Truncated if num_items else Unreachable
            raise kind(
                f"{method} failed after {num_items} items: {str(error)[:200]}",
                peer=peer,
            ) from None

    def _server(self, protocol: str) -> Callable:
        async def serve(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.ensure_future(self._reply(protocol, str(info.peer_id), reader, writer))
            self._serving.add(task)
            try:
                await asyncio.wait({task})
            finally:
                task.cancel()
                self._serving.discard(task)
                writer.close()

        return serve

    async def _reply(
        self,
        protocol: str,
        peer: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        try:
            try:
                request = await asyncio.wait_for(_read_request(reader), REQUEST_TIMEOUT_S)
            except PeerError as error:
                self._ledger.on_fault(peer, error)
                raise
            try:
                await self._items(protocol, peer, request, reader, writer)
            except PeerError as error:
                data = wire.encode_error(error)
                mark = _LENGTH.pack(ERROR) + _LENGTH.pack(len(data)) + data
                await asyncio.wait_for(_write(writer, mark), SEND_ITEM_TIMEOUT_S)
        except (*NETWORK_ERRORS, PeerError) as error:
            _log.debug("a stream to %s ended early: %r", peer, error)

    async def _items(
        self,
        protocol: str,
        peer: str,
        request: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        num_items = total = 0
        async with contextlib.AsyncExitStack() as stack:
            method, made = await self._accept(stack, protocol, peer, request)
            items = await stack.enter_async_context(contextlib.aclosing(_until_gone(made, reader)))
            async for item in items:
                if len(item) > MAX_ITEM_BYTES:
                    raise TooLarge(f"an item of {len(item)} bytes is over the limit of {MAX_ITEM_BYTES}")
                num_items, total = num_items + 1, total + len(item)
                await asyncio.wait_for(_send(writer, item), SEND_ITEM_TIMEOUT_S)
                self._ledger.sent(method, len(item))
            mark = _LENGTH.pack(END) + _SUM.pack(num_items, total)
            await asyncio.wait_for(_write(writer, mark), SEND_ITEM_TIMEOUT_S)

    async def _accept(
        self, stack: contextlib.AsyncExitStack, protocol: str, peer: str, request: bytes
    ) -> tuple[str, AsyncGenerator[bytes, None]]:
        """The method and its handler's items, in a slot of the peer's; what is refused here is told of."""
        try:
            method, body = wire.decode_request(request)
            handler = self._handlers.get(method)
            if handler is None or method.startswith(wire.SHARED) != (protocol == self._shared):
                raise wire.unknown_method(method)
            self._ledger.received(method, len(request))
            await stack.enter_async_context(self._slots.slot(peer))
        except PeerError as error:
            self._ledger.on_fault(peer, error)
            raise
        return method, await stack.enter_async_context(contextlib.aclosing(_guarded(handler, peer, body, method)))


class _Received:
    """What came of one stream so far, checked as it comes."""

    def __init__(self, peer: str, max_bytes: int) -> None:
        self._peer, self._max_bytes = peer, max_bytes
        self._num_items = self._total = 0

    async def item(self, reader: asyncio.StreamReader) -> bytes | None:
        """The next item; None at the end mark. Raises TooLarge, BadRecord, or the error the peer sent."""
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length == END:
            if _SUM.unpack(await reader.readexactly(_SUM.size)) != (self._num_items, self._total):
                raise BadRecord("a stream's end does not match its items", peer=self._peer)
            return None
        if length == ERROR:
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            if length > wire.MAX_ERROR_BYTES:
                raise TooLarge(f"an error of {length} bytes", peer=self._peer)
            raise wire.decode_error(await reader.readexactly(length), self._peer)
        if length == 0:
            # Nobody makes them, and an endless row of them would stay below every limit of bytes.
            raise BadRecord("an empty item", peer=self._peer)
        if length > MAX_ITEM_BYTES:
            raise TooLarge(
                f"an item of {length} bytes is over the limit of {MAX_ITEM_BYTES}",
                peer=self._peer,
            )
        if self._total + length > self._max_bytes:
            raise TooLarge(
                f"the stream is over the {self._max_bytes} bytes asked for",
                peer=self._peer,
            )
        item = await reader.readexactly(length)
        self._num_items, self._total = self._num_items + 1, self._total + length
        return item


@contextlib.asynccontextmanager
async def _opened(
    session: Session, target: PeerID, protocol: str, timeout_s: float
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """hivemind's `stream_open`, which leaks its connection when the peer can't be reached."""
    reader, writer = await session.connection()
    try:
        opening = p2pd_pb2.StreamOpenRequest(peer=target.to_bytes(), proto=[protocol])
        await write_pbmsg(
            writer,
            p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening),
        )
        response = p2pd_pb2.Response()
        try:
            await asyncio.wait_for(read_pbmsg_safe(reader, response), timeout_s)
        except EOFError:
            raise ConnectionResetError("the local p2pd closed the connection") from None
        raise_if_failed(response)
        yield reader, writer
    finally:
        writer.close()


async def _guarded(handler: StreamHandler, peer: str, body: bytes, method: str) -> AsyncGenerator[bytes, None]:
    """The handler's items; whatever it raises as a PeerError."""
    items = handler(peer, body)
    try:
        while True:
            try:
                item = await asyncio.wait_for(anext(items), MAKE_ITEM_TIMEOUT_S)
            except StopAsyncIteration:
                return
            except PeerError:
                raise
            except Exception as error:  # noqa: BLE001  a fault of ours is an answer
                _log.exception("the stream handler of %s failed", method)
                raise wire.handler_failure(error) from None
            yield item
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()


async def _until_gone(items: AsyncIterator[bytes], reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    """The items, until the caller closes its end: nobody computes for a caller that left."""
    gone = asyncio.ensure_future(reader.read(1))
    upcoming: asyncio.Future | None = None
    try:
        while True:
            upcoming = asyncio.ensure_future(_next(items))
            await asyncio.wait({upcoming, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not upcoming.done():
                raise ConnectionResetError("the caller left")
            item = upcoming.result()
            if item is None:
                return
            yield item
    finally:
        pending = {task for task in (gone, upcoming) if task is not None and not task.done()}
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending)
        if gone.done() and not gone.cancelled():
            gone.exception()


async def _next(items: AsyncIterator[bytes]) -> bytes | None:
    return await anext(items, None)


async def _read_request(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > 1 + wire.MAX_METHOD_BYTES + MAX_CALL_BYTES:
        raise TooLarge(f"a request of {length} bytes is over the limit of {MAX_CALL_BYTES}")
    return await reader.readexactly(length)


async def _send(writer: asyncio.StreamWriter, item: bytes) -> None:
    writer.write(_LENGTH.pack(len(item)))
    await _write(writer, item)


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
