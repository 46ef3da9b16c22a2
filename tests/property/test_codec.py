"""Bytes from anybody: records survive the trip, anything else is refused by a PeerError."""

import hypothesis
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2prl import codec, records
from p2prl.errors import BadRecord, BadSignature, PeerError, WrongSwarm
from tests import factories
from tests.strategies import WIRE_RECORDS, any_record, wire

SWARM = factories.SWARM
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_every_wire_record_has_a_strategy() -> None:
    """Also those that a room keeps to itself; what a benchmark tells its own processes is no business of peers."""
    import p2prl.node.build  # noqa: F401  all that travels is defined below it

    def below(kind: type) -> set[type]:
        return {one for child in kind.__subclasses__() for one in (child, *below(child))}

    own = {kind for kind in below(records.Wire) if kind.__module__.startswith("p2prl.")}
    assert {kind for kind in own if not kind.__module__.startswith("p2prl.bench.")} == set(WIRE_RECORDS)


@QUICK
@given(any_record())
def test_a_record_survives_the_trip(record: records.Wire) -> None:
    assert codec.decode(codec.encode(record), type(record), limit=2**20) == record


@QUICK
@given(wire(records.Group))
def test_a_sealed_record_survives_the_trip_with_its_signer(group: records.Group) -> None:
    data = codec.seal(group, factories.identity(1), SWARM)
    sealed = codec.unseal(data, records.Group, SWARM)
    assert (sealed.record, sealed.signer, sealed.id) == (group, factories.identity(1).peer_id, codec.sealed_id(data))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.sampled_from(WIRE_RECORDS))
def test_any_bytes_are_refused_or_decoded(data: bytes, kind: type) -> None:
    try:
        assert isinstance(codec.decode(data, kind), kind)
    except PeerError:
        hypothesis.event("refused")
    with pytest.raises(PeerError):
        codec.unseal(data, kind, SWARM)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=50) | st.binary(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=30,
)


@settings(max_examples=200, deadline=None)
@given(json_like, st.sampled_from(WIRE_RECORDS))
def test_any_message_is_refused_or_decoded(tree: object, kind: type) -> None:
    data = msgspec.msgpack.encode(tree)
    try:
        assert isinstance(codec.decode(data, kind), kind)
    except PeerError:
        hypothesis.event("refused")


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(BadRecord):
        codec.decode(b"\x91" * 60_000, records.Verdict, limit=2**20)


@QUICK
@given(st.data())
def test_one_changed_byte_is_refused(data: st.DataObject) -> None:
    sent = bytearray(codec.seal(factories.group(), factories.identity(0), SWARM))
    position = data.draw(st.integers(0, len(sent) - 1))
    sent[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PeerError):
        codec.unseal(bytes(sent), records.Group, SWARM)


def test_a_record_of_another_swarm_kind_or_owner_is_refused() -> None:
    data = codec.seal(factories.group(maker=1), factories.identity(0), SWARM)
    with pytest.raises(WrongSwarm):
        codec.unseal(data, records.Group, bytes(32))
    with pytest.raises(BadRecord):
        codec.unseal(data, records.Manifest, SWARM)
    with pytest.raises(BadSignature):
        codec.unseal(data, records.Group, SWARM, owner=lambda group: group.maker)
