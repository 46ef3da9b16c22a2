"""Which directory records we keep, forward and believe: those their own publisher signed, small and short-lived.

In: a record's key, subkey, value and expiration. Out: a verdict; our own values signed.

A record's subkey is its publisher's peer id (as bytes) and its value an Ed25519 signature over key, subkey, payload and
expiration, then the payload: msgpack of bytes. So nobody can write in another's name, replace a dictionary by a plain
value, move a record to another key or prolong it. `validate` never raises: hivemind would blame the messenger.
"""

import math
import time
from collections.abc import Callable

import base58
import msgspec
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

from p2prl.identity import Identity, is_peer_id, verify

MAX_TTL_S = 600.0
MAX_VALUE_BYTES = 4096
_SIGNATURE_BYTES = 64
_HEADER_BYTES = 8  # msgpack's own around the value


class PublisherValidator(RecordValidatorBase):
    """Signs our records, checks everybody's."""

    def __init__(self, identity: Identity, unix: Callable[[], float] = time.time) -> None:
        self._identity = identity
        self._unix = unix

    def sign_value(self, record: DHTRecord) -> bytes:
        return self._identity.sign(_signed_bytes(record, record.value)) + record.value

    def strip_value(self, record: DHTRecord) -> bytes:
        return record.value[_SIGNATURE_BYTES:]

    def validate(self, record: DHTRecord) -> bool:
        expiration = record.expiration_time
        if type(expiration) is not float or not math.isfinite(expiration):
            return False
        if expiration > self._unix() + MAX_TTL_S:
            return False
        if not isinstance(record.value, bytes) or not isinstance(record.subkey, bytes):
            return False
        payload = record.value[_SIGNATURE_BYTES:]
        if len(payload) > MAX_VALUE_BYTES + _HEADER_BYTES or len(record.subkey) > 64:
            return False
        publisher = _bytes_of(record.subkey)
        if publisher is None or _bytes_of(payload) is None:
            return False
        peer = base58.b58encode(publisher).decode()
        return is_peer_id(peer) and verify(peer, record.value[:_SIGNATURE_BYTES], _signed_bytes(record, payload))


def _signed_bytes(record: DHTRecord, payload: bytes) -> bytes:
    return b"p2prl/directory\0" + msgspec.msgpack.encode(
        [record.key, record.subkey, payload, float(record.expiration_time)]
    )


def _bytes_of(data: bytes) -> bytes | None:
    """The bytes that msgpack data holds; None when it holds anything else."""
    try:
        return msgspec.msgpack.decode(data, type=bytes)
    except (msgspec.DecodeError, ValueError):
        return None
