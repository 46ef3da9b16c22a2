"""Records to bytes and back: signed envelopes, size caps before decoding, content hashes.

In: records of `records.py`, bytes from peers. Out: sealed bytes; records with their signer and id.

Invariants: whatever the bytes, `decode` and `unseal` raise a `PeerError` or return a valid record; nothing is
decoded before its size was checked; a signature covers the record's kind, the swarm and the payload, so a record can't
be passed off as another kind or carried into another swarm.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
from blake3 import blake3

from p2prl import identity as identities
from p2prl import records
from p2prl.errors import BadRecord, BadSignature, TooLarge, WrongSwarm

T = TypeVar("T")
ZERO_HASH = bytes(32)

# The most a sealed or plain record of each kind may weigh, in bytes.
LIMITS: dict[type, int] = {
    records.Announcement: 1024,
    records.Lease: 1024,
    records.VoteRequest: 2048,
    records.Vote: 1024,
    records.VoteReply: 4096,
    records.PeerInfo: 4096,
    records.Hello: 1024,
    records.Verdict: 1024,
    records.Manifest: 1 * 2**20,
    records.Group: 8 * 2**20,
}
DEFAULT_LIMIT = 64 * 2**10

_encoder = msgspec.msgpack.Encoder()
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}


class Envelope(records.Wire, frozen=True):
    """What a signed record travels in: kind (the record's class name), swarm id, signer, payload, signature."""

    kind: records.Name
    swarm: records.Hash
    signer: records.PeerId
    payload: bytes
    signature: bytes


class Sealed(msgspec.Struct, Generic[T], frozen=True):
    """A record whose signature was verified. `id` is the blake3 of its payload."""

    record: T
    signer: str
    id: bytes


def content_hash(data: bytes | memoryview) -> bytes:
    """blake3, 32 bytes."""
    return blake3(data).digest()


def encode(record: object) -> bytes:
    return _encoder.encode(record)


def limit_of(kind: type) -> int:
    return LIMITS.get(kind, DEFAULT_LIMIT)


def decode(data: bytes, kind: type[T], *, limit: int | None = None) -> T:
    """The record, or TooLarge (over `limit` bytes, the kind's own by default) or BadRecord."""
    cap = limit_of(kind) if limit is None else limit
    if len(data) > cap:
        raise TooLarge(f"a {kind.__name__} of {len(data)} bytes is over the limit of {cap}")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise BadRecord(f"not a {kind.__name__}: {str(error)[:200]}") from None


def seal(record: records.Wire, key: "identities.Identity", swarm: bytes) -> bytes:
    """The record in a signed envelope, ready for the wire."""
    payload = encode(record)
    kind = type(record).__name__
    signature = key.sign(_signed_bytes(kind, swarm, payload))
    return encode(Envelope(kind, swarm, key.peer_id, payload, signature))


def sealed_id(data: bytes) -> bytes:
    """The id of bytes that we sealed ourselves."""
    return content_hash(decode(data, Envelope, limit=2**26).payload)


def peek_kind(data: bytes, limit: int = DEFAULT_LIMIT) -> str:
    """The kind an envelope claims, unverified: to count and ignore kinds that this release does not know."""
    return decode(data, Envelope, limit=limit).kind


def unseal(data: bytes, kind: type[T], swarm: bytes, *, owner: Callable[[T], str] | None = None) -> Sealed[T]:
    """Verify, then decode. With `owner` the signer must be the peer that the record names.

    Raises TooLarge, BadRecord, WrongSwarm or BadSignature, attributed to the signer where it is proved.
    """
    envelope = decode(data, Envelope, limit=limit_of(kind))
    if envelope.kind != kind.__name__:
        raise BadRecord(f"expected a {kind.__name__}, got a record that calls itself {envelope.kind[:40]!r}")
    if envelope.swarm != swarm:
        raise WrongSwarm(f"a {kind.__name__} of swarm {envelope.swarm.hex()[:8]}, this is {swarm.hex()[:8]}")
    if not identities.verify(
        envelope.signer, envelope.signature, _signed_bytes(envelope.kind, swarm, envelope.payload)
    ):
        raise BadSignature(f"the {kind.__name__} is not signed by {envelope.signer}")
    try:
        record = decode(envelope.payload, kind)
    except BadRecord as error:
        error.peer = envelope.signer
        raise
    if owner is not None and owner(record) != envelope.signer:
        raise BadSignature(f"the {kind.__name__} names another peer than its signer", peer=envelope.signer)
    return Sealed(record, envelope.signer, content_hash(envelope.payload))


def _signed_bytes(kind: str, swarm: bytes, payload: bytes) -> bytes:
    return b"p2prl/" + kind.encode() + b"/%d\0" % records.WIRE_SCHEMA + swarm + payload
