"""Topics over p2pd's gossipsub, which hivemind has no Python for.

In: messages of ours, handlers. Out: each message of others once, with the publisher that p2pd proved (it signs every
message and checks every signature: strict). Nothing a message or its handler does ends a subscription.
"""

# hivemind has no types: its attributes begin as None and its protobuf modules are made at import.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import (
    raise_if_failed,
    read_pbmsg_safe,
    write_pbmsg,
)
from hivemind.proto import p2pd_pb2

from p2prl.errors import PeerError, TooLarge, Unreachable
from p2prl.swarm.libp2p.ledger import Ledger
from p2prl.swarm.libp2p.session import NETWORK_ERRORS, Session
from p2prl.swarm.transport import MAX_TOPIC_BYTES, TopicHandler

PUBLISH_TIMEOUT_S = 5.0
RETRY_S = 0.2
_log = logging.getLogger(__name__)


class Topics:
    """Our subscriptions and what we publish."""

    def __init__(self, prefix: str, session: Callable[[], Session], ledger: Ledger) -> None:
        self._prefix, self._session, self._ledger = prefix, session, ledger
        self._handlers: dict[str, list[TopicHandler]] = {}
        self._readers: dict[str, asyncio.Task] = {}
        self.refused: Counter[str] = Counter()  # messages dropped, by reason

    def subscribe(self, topic: str, handler: TopicHandler) -> None:
        self._handlers.setdefault(topic, []).append(handler)
        self.follow_up()

    async def attach(self, session: Session) -> None:
        """Subscribe on a new p2pd; returns when every subscription stands."""
        await self.detach()
        for topic in self._handlers:
            standing = asyncio.Event()
            self._readers[topic] = asyncio.create_task(self._read(session, topic, standing))
            await asyncio.wait_for(standing.wait(), PUBLISH_TIMEOUT_S)

    async def detach(self) -> None:
        readers, self._readers = list(self._readers.values()), {}
        for reader in readers:
            reader.cancel()
        if readers:
            await asyncio.wait(readers, timeout=1.0)

    async def publish(self, topic: str, data: bytes) -> None:
        if len(data) > MAX_TOPIC_BYTES:
            raise TooLarge(f"a message of {len(data)} bytes is over the limit of {MAX_TOPIC_BYTES}")
        request = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.PUBLISH, topic=self._name(topic), data=data)
        try:
            _, writer = await asyncio.wait_for(_request(self._session(), request), PUBLISH_TIMEOUT_S)
        except NETWORK_ERRORS as error:
            raise Unreachable(f"can't publish on {topic}: {str(error)[:200]}") from None
        writer.close()
        self._ledger.sent(topic, len(data))

    def _name(self, topic: str) -> str:
        return f"{self._prefix}/{topic}"

    def follow_up(self) -> None:
        """Start readers of topics that were subscribed while the network was up."""
        try:
            session = self._session()
        except Unreachable:
            return  # `attach` will
        for topic in self._handlers.keys() - self._readers.keys():
            self._readers[topic] = asyncio.create_task(self._read(session, topic, asyncio.Event()))

    async def _read(self, session: Session, topic: str, standing: asyncio.Event) -> None:
        """Until cancelled: `attach` starts new readers after a restart of p2pd."""
        request = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.SUBSCRIBE, topic=self._name(topic))
        while True:
            try:
                reader, writer = await asyncio.wait_for(_request(session, request), PUBLISH_TIMEOUT_S)
                try:
                    standing.set()
                    while True:
                        message = p2pd_pb2.PSMessage()
                        await read_pbmsg_safe(reader, message)  # `writer` stays referenced: its end would close this
                        self._deliver(topic, message, str(session.p2p.peer_id))
                finally:
                    writer.close()
            except NETWORK_ERRORS as error:
                _log.debug("the subscription to %s was cut: %r", topic, error)
            await asyncio.sleep(RETRY_S)

    def _deliver(self, topic: str, message: p2pd_pb2.PSMessage, own: str) -> None:
        publisher = str(PeerID(getattr(message, "from")))
        if publisher == own:
            return
        self._ledger.received(topic, len(message.data))
        if len(message.data) > MAX_TOPIC_BYTES:
            self.refused[TooLarge.code] += 1
            size = f"a message of {len(message.data)} bytes is over the limit of {MAX_TOPIC_BYTES}"
            self._ledger.on_fault(publisher, TooLarge(size, peer=publisher))
            return
        for handler in self._handlers[topic]:
            try:
                handler(publisher, message.data)
            except PeerError as error:
                self.refused[error.code] += 1
            except Exception:  # noqa: BLE001  a fault of ours must not end the subscription
                self.refused["handler_failed"] += 1
                _log.exception("the handler of topic %s failed", topic)


async def _request(session: Session, request: p2pd_pb2.PSRequest) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await session.connection()
    try:
        await write_pbmsg(writer, p2pd_pb2.Request(type=p2pd_pb2.Request.PUBSUB, pubsub=request))
        response = p2pd_pb2.Response()
        await read_pbmsg_safe(reader, response)
        raise_if_failed(response)
    except BaseException:  # goes on, a cancellation too: the connection must not leak
        writer.close()
        raise
    return reader, writer
