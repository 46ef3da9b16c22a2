"""Work-rounds for faults of hivemind 1.1.12, installed when a transport starts.

In: hivemind's classes. Out: the same classes with three repaired methods.

1. `TimedStorage.store`: a refused, older record cut the life of the stored one, so anybody could evict any record.
2. `ControlClient`: when its daemon died, pending and new calls waited for ever; a reply that raced a cancelled call
   ended the reading loop, and with it every later call.
3. An over-long or unregistered reply crashed the callee's task: the caller waited for ever.
"""

# hivemind has no types: its attributes begin as None and its protobuf modules are made at import.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import asyncio
from importlib.metadata import version
from uuid import UUID

from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient, TUnaryHandler
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.proto import p2pd_pb2
from hivemind.utils.timed_storage import TimedStorage

from p2prl.errors import PreflightFailed

HIVEMIND = "1.1.12"
MAX_SUBKEYS = 900  # of one key: a dictionary over 4 MiB can't be read by anybody
_MARK = "p2prl_work_round"


def install() -> None:
    """Repair hivemind's classes, once. Raises PreflightFailed for another release, whose insides may differ."""
    found = version("hivemind")
    if found != HIVEMIND:
        raise PreflightFailed(
            f"hivemind {found} is installed, {HIVEMIND} is needed. Run: pip install hivemind=={HIVEMIND}"
        )
    if hasattr(TimedStorage, _MARK):
        return
    setattr(TimedStorage, _MARK, True)
    _repair_storage()
    _repair_control()


def _repair_storage() -> None:
    original = TimedStorage.store

    def store(self: TimedStorage, key: object, value: object, expiration_time: float) -> bool:
        held = self.data.get(key)
        if held is not None and held.expiration_time >= expiration_time:
            return False
        if held is None and isinstance(self, DictionaryDHTValue) and len(self.data) >= MAX_SUBKEYS:
            return False
        return original(self, key, value, expiration_time)

    TimedStorage.store = store


def _repair_control() -> None:
    read, write = (
        ControlClient._read_from_persistent_conn,
        ControlClient._write_to_persistent_conn,
    )
    call, add = ControlClient.call_unary_handler, ControlClient.add_unary_handler

    async def _read(self: ControlClient, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                try:
                    await read(self, reader)
                    return
                except asyncio.InvalidStateError:  # the reply to a call that was cancelled a moment ago
                    continue
        except (OSError, EOFError):
            return
        finally:
            _end(self)

    async def _write(self: ControlClient, writer: asyncio.StreamWriter) -> None:
        try:
            await write(self, writer)
        except OSError:
            _end(self)

    async def call_unary_handler(self: ControlClient, peer_id: PeerID, proto: str, data: bytes) -> bytes:
        _check(self)
        return await call(self, peer_id, proto, data)

    async def add_unary_handler(
        self: ControlClient, proto: str, handler: TUnaryHandler, balanced: bool = False
    ) -> None:
        _check(self)
        await add(self, proto, handler, balanced)

    ControlClient._read_from_persistent_conn = _read
    ControlClient._write_to_persistent_conn = _write
    ControlClient.call_unary_handler = call_unary_handler
    ControlClient.add_unary_handler = add_unary_handler
    ControlClient._handle_persistent_request = _handle_persistent_request


async def _handle_persistent_request(self: ControlClient, call_id: UUID, request: p2pd_pb2.CallUnaryRequest) -> None:
    """hivemind's own, with the error in the field that the daemon reads, and its task forgotten in any case."""
    try:
        handler = self.unary_handlers.get(request.proto)
        if handler is None:
            response = p2pd_pb2.CallUnaryResponse(error=b"protocol not supported")
        else:
            try:
                response = p2pd_pb2.CallUnaryResponse(response=await handler(request.data, PeerID(request.peer)))
            except Exception as error:  # noqa: BLE001  whatever a handler raises is an answer
                response = p2pd_pb2.CallUnaryResponse(error=repr(error)[:1000].encode())
        reply = p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, unaryResponse=response)
        if reply.ByteSize() > self.persistent_conn_max_msg_size:
            response = p2pd_pb2.CallUnaryResponse(error=b"response size exceeds message size limit")
            reply = p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, unaryResponse=response)
        await self._pending_messages.put(reply)
    finally:
        self._handler_tasks.pop(call_id, None)


def _check(control: ControlClient) -> None:
    if getattr(control, "ended", False):
        raise P2PDaemonError("the connection to the local p2pd is closed")


def _end(control: ControlClient) -> None:
    control.ended = True
    for future in list(control._pending_calls.values()):
        if not future.done():
            future.set_exception(P2PDaemonError("the local p2pd died"))
            future.exception()  # read: nobody may be left to await it
