"""Directory records: each way to cheat is refused, by the rule and over the wire."""

# hivemind has no types: its attributes begin as None and its protobuf modules are made at import.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import dataclasses
import time
from collections.abc import Awaitable, Callable

import base58
import msgspec
import pytest
from hivemind.dht.validation import DHTRecord
from hypothesis import given
from hypothesis import strategies as st

from p2prl.identity import Identity
from p2prl.swarm.libp2p.transport import Libp2pTransport
from p2prl.swarm.libp2p.validator import MAX_TTL_S, MAX_VALUE_BYTES, PublisherValidator

pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")  # hivemind, on Python 3.11
NOW = 1_790_000_000.0
OWNER, THIEF = Identity.from_seed(bytes(32)), Identity.from_seed(bytes(31) + b"\1")


def rule(identity: Identity) -> PublisherValidator:
    return PublisherValidator(identity, lambda: NOW)


def subkey(identity: Identity) -> bytes:
    return msgspec.msgpack.encode(base58.b58decode(identity.peer_id))


def signed(by: Identity = OWNER, **changes: object) -> DHTRecord:
    plain = DHTRecord(b"k" * 20, subkey(OWNER), msgspec.msgpack.encode(b"value"), NOW + 30.0)
    plain = dataclasses.replace(plain, **changes)
    return dataclasses.replace(plain, value=rule(by).sign_value(plain))


def test_an_owner_s_record_is_kept_and_stripped() -> None:
    record = signed()
    assert rule(THIEF).validate(record)
    assert rule(THIEF).strip_value(record) == msgspec.msgpack.encode(b"value")


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(signed(by=THIEF), id="signed by another"),
        pytest.param(signed(subkey=msgspec.msgpack.encode(None)), id="plain value"),
        pytest.param(signed(subkey=b""), id="whole dictionary"),
        pytest.param(signed(subkey=msgspec.msgpack.encode("x")), id="spam subkey"),
        pytest.param(signed(expiration_time=NOW + MAX_TTL_S + 1), id="lives too long"),
        pytest.param(signed(expiration_time=float("nan")), id="nan"),
        pytest.param(signed(expiration_time=float("inf")), id="inf"),
        pytest.param(signed(value=msgspec.msgpack.encode(bytes(MAX_VALUE_BYTES + 9))), id="oversize"),
        pytest.param(signed(value=b"\xc1"), id="not msgpack"),
        pytest.param(signed(value=msgspec.msgpack.encode({1: 2})), id="not bytes"),
        pytest.param(dataclasses.replace(signed(), key=b"j" * 20), id="moved to another key"),
        pytest.param(dataclasses.replace(signed(), expiration_time=NOW + 60.0), id="prolonged"),
    ],
)
def test_a_false_record_is_refused(record: DHTRecord) -> None:
    assert not rule(OWNER).validate(record)


@given(st.binary(max_size=40), st.binary(max_size=120), st.floats() | st.none() | st.text(max_size=3))
def test_no_record_makes_it_raise(key: bytes, value: bytes, expiration: object) -> None:
    assert not rule(OWNER).validate(DHTRecord(b"k" * 20, key, value, expiration))  # type: ignore[arg-type]


async def test_attacks_over_the_wire_leave_the_record(make: Callable[..., Awaitable[Libp2pTransport]]) -> None:
    victim = await make()
    attacker = await make(victim)
    assert await victim.put("members", b"mine", ttl_s=60)
    node = attacker._up().node
    name = attacker._directory._name("members")
    now, mine = time.time(), base58.b58decode(victim.peer_id)
    own = base58.b58decode(attacker.peer_id)
    assert not await node.store(name, b"forged", now + 90, subkey=mine)
    assert not await node.store(name, b"plain", now + 90)
    assert not await node.store(name, b"spam", now + 90, subkey="x")
    assert not await node.store(name, b"forever", now + 3e7, subkey=own)
    assert not await node.store(name, bytes(10_000), now + 90, subkey=own)
    assert not await node.store(name, {1: 2}, now + 90, subkey=own)
    assert await victim.get("members") == {victim.peer_id: b"mine"}
    assert await attacker.get("members") == {victim.peer_id: b"mine"}
