"""Unary calls: one request and one reply over p2pd's persistent connection.

In: methods, handlers, bodies. Out: replies, or PeerErrors. Two protocols carry all methods: one of this swarm, one that
every swarm speaks (methods that begin with p2prl/), so a restarted p2pd knows all methods at once.
"""

# hivemind has no types: its attributes begin as None and its protobuf modules are made at import.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import asyncio
import contextlib
import logging
from collections.abc import Callable

from hivemind.p2p import PeerID

from p2prl.errors import PeerError, Unreachable
from p2prl.swarm.libp2p import wire
from p2prl.swarm.libp2p.ledger import Ledger
from p2prl.swarm.libp2p.limits import Slots
from p2prl.swarm.libp2p.session import NETWORK_ERRORS, Session, peer_bytes
from p2prl.swarm.transport import CallHandler

_log = logging.getLogger(__name__)


class Calls:
    """Our handlers and our calls."""

    def __init__(self, prefix: str, session: Callable[[], Session], ledger: Ledger) -> None:
        self._own, self._shared = f"/p2prl/1/{prefix}/call", "/p2prl/1/call"
        self._session, self._ledger = session, ledger
        self._handlers: dict[str, CallHandler] = {}
        self._slots = Slots(per_peer=32, total=256, waiting=96)

    def serve(self, method: str, handler: CallHandler) -> None:
        self._handlers[method] = handler

    async def attach(self, session: Session) -> None:
        for protocol in (self._own, self._shared):
            await session.p2p._client.add_unary_handler(protocol, self._answerer(protocol))

    async def call(self, peer: str, method: str, body: bytes, timeout_s: float) -> bytes:
        request = wire.encode_request(method, body)
        target = peer_bytes(peer)
        protocol = self._shared if method.startswith(wire.SHARED) else self._own
        client = self._session().p2p._client
        try:
            data = await asyncio.wait_for(client.call_unary_handler(target, protocol, request), timeout_s)
        except TimeoutError:
            raise Unreachable(f"no answer to {method} within {timeout_s:g} s", peer=peer) from None
        except NETWORK_ERRORS as error:
            raise Unreachable(f"can't call {method}: {str(error)[:200]}", peer=peer) from None
        self._ledger.sent(method, len(request))
        self._ledger.received(method, len(data))
        return wire.decode_reply(data, peer)

    def _answerer(self, protocol: str) -> Callable:
        async def answer(data: bytes, remote: PeerID) -> bytes:
            try:
                return await self._answer(protocol, str(remote), data)
            except PeerError as error:
                return wire.encode_failure(error)

        return answer

    async def _answer(self, protocol: str, peer: str, data: bytes) -> bytes:
        async with contextlib.AsyncExitStack() as slot:
            try:
                method, body = wire.decode_request(data)
                handler = self._handlers.get(method)
                # A method is served on its own protocol only, else another swarm could reach this one's.
                if handler is None or method.startswith(wire.SHARED) != (protocol == self._shared):
                    raise wire.unknown_method(method)
                self._ledger.received(method, len(data))
                await slot.enter_async_context(self._slots.slot(peer))
            except PeerError as error:
                self._ledger.on_fault(peer, error)
                raise
            try:
                reply = await handler(peer, body)
            except PeerError:
                raise
            except Exception as error:  # noqa: BLE001  a fault of ours is an answer
                _log.exception("the handler of %s failed", method)
                raise wire.handler_failure(error) from None
        reply = wire.encode_reply(reply)
        self._ledger.sent(method, len(reply))
        return reply
