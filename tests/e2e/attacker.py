"""A peer with a real p2pd that keeps to none of the swarm's rules, and records in every way they must not be taken."""

# hivemind's protobuf modules are made at import.
# pyright: reportAttributeAccessIssue=false

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from p2prl import codec
from p2prl.errors import PeerError
from p2prl.identity import Identity
from p2prl.node.receive_loop import GroupsRequest
from p2prl.recipe import find
from p2prl.records import Version
from p2prl.swarm.libp2p import pubsub
from p2prl.swarm.libp2p.session import peer_bytes
from p2prl.swarm.libp2p.transport import Libp2pTransport

SWARM = find("addition")[0].swarm_id
OTHER_SWARM = bytes(32)
BASE = Version(0, 0, bytes(32))


class Attacker:
    """A peer with a real p2pd, joined to the victim's swarm, that keeps to none of its rules."""

    def __init__(self, folder: Path, name: str) -> None:
        file = folder / f"{name}.key"
        self.key = Identity.create(file)
        self.transport = Libp2pTransport(self.key, file, host="127.0.0.1", prefix=SWARM.hex())
        self.heard: dict[str, list[bytes]] = {"announce": [], "lease": []}
        self.bodies: dict[bytes, bytes] = {}  # what it serves under which group id
        self.asked = 0
        self.codes: Counter[str] = Counter()

    async def join(self, address: str) -> str:
        for topic, messages in self.heard.items():
            self.transport.subscribe(topic, lambda _, data, kept=messages: kept.append(data))
        self.transport.serve_stream("group", self._serve)
        await self.transport.start()
        (report,) = await self.transport.join([address])
        assert report.peer, report
        return report.peer

    async def _serve(self, peer: str, body: bytes) -> AsyncIterator[bytes]:
        self.asked += 1
        for group_id in codec.decode(body, GroupsRequest).ids:
            data = self.bodies.get(group_id)
            if data is not None:
                yield b"\x01" + data

    async def publish(self, topic: str, data: bytes) -> None:
        """Past our own size check."""
        session = self.transport._session
        assert session is not None
        name = f"{SWARM.hex()}/{topic}"
        request = pubsub.p2pd_pb2.PSRequest(type=pubsub.p2pd_pb2.PSRequest.PUBLISH, topic=name, data=data)
        _, writer = await pubsub._request(session, request)
        writer.close()

    async def call(self, peer: str, method: str, body: bytes) -> None:
        try:
            await self.transport.call(peer, method, body, timeout_s=20.0)
            self.codes["answered"] += 1
        except PeerError as error:
            self.codes[error.code] += 1

    async def stream(self, peer: str, method: str, body: bytes) -> None:
        try:
            async for _ in self.transport.stream(peer, method, body, item_timeout_s=20.0, max_bytes=2**24):
                pass
            self.codes["answered"] += 1
        except PeerError as error:
            self.codes[error.code] += 1

    async def raw_stream(self, peer: str, data: bytes) -> None:
        """Bytes that are no frames, then silence, then gone."""
        session = self.transport._session
        assert session is not None
        protocol = f"/p2prl/1/{SWARM.hex()}/stream"
        _, _, writer = await session.p2p.call_binary_stream_handler(peer_bytes(peer), protocol)
        writer.write(data)
        await asyncio.sleep(0.2)
        writer.close()

    def seal(self, record, swarm: bytes = SWARM) -> bytes:
        return codec.seal(record, self.key, swarm)


def variants(attacker: Attacker, record, victim: str) -> dict[str, bytes]:
    """One record in every way in which it must not be taken."""
    whole = attacker.seal(record)
    envelope = codec.decode(whole, codec.Envelope)
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    replace = msgspec.structs.replace
    return {
        "truncated": whole[: len(whole) // 2],
        "with a tail": whole + b"\0",
        "a bit flipped": bytes(flipped),
        "unsigned": codec.encode(replace(envelope, signature=b"")),
        "signature of zeros": codec.encode(replace(envelope, signature=bytes(64))),
        "in another's name": codec.encode(replace(envelope, signer=victim)),
        "of another kind": codec.encode(replace(envelope, kind="Manifest")),
        "of an unknown kind": codec.encode(replace(envelope, kind="Zebra")),
        "of another swarm": attacker.seal(record, OTHER_SWARM),
        "moved to this swarm": codec.encode(
            replace(codec.decode(attacker.seal(record, OTHER_SWARM), codec.Envelope), swarm=SWARM)
        ),
        "signer is no peer": codec.encode(replace(envelope, signer="1" * 46)),
    }
