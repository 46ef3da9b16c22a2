"""Golden bytes: what an older peer sends must decode, what we send must not change by accident.

tests/vectors/wire.json holds one record of each kind as it was first sent in this wire schema. It is never rewritten
within one: a record that gets a field has it at the end, with a default, and its old bytes stay.
"""

import json
from pathlib import Path

import msgspec
import pytest

from p2prl import codec
from p2prl.records import Announcement, GroupHeader, Lease, PeerInfo, Vote, VoteRequest
from tests import factories
from tests.architecture.surface import wire_records
from tests.factories import SWARM, identity, version

GOLDEN = json.loads((Path(__file__).parents[1] / "vectors" / "wire.json").read_text())
KINDS = {kind.__name__: kind for kind in wire_records()}


def sealed() -> dict[str, msgspec.Struct]:
    """One of each record that is signed; ours, so that Ed25519 makes the same bytes for ever."""
    me, other = identity(0).peer_id, identity(1).peer_id
    header = GroupHeader(bytes(32), 1234, version(5), 8, 0.75)
    return {
        "Announcement": Announcement(me, (header,)),
        "Group": factories.group(0, 7),
        "Lease": Lease(3, me, 17, version(5), bytes(range(32)), 900, 160),
        "Manifest": factories.manifest(),
        "PeerInfo": PeerInfo(
            me, bytes(8), 1, "otter", "full", ("/ip4/10.0.0.1/tcp/1",), version(5), True, 0, "p2prl 0", (2,)
        ),
        "Vote": Vote(3, me, other, (me, other)),
        "VoteRequest": VoteRequest(3, me, (me, other), version(5), 160),
    }


@pytest.mark.parametrize("name", sorted(GOLDEN["sealed"]))
def test_sealed_records_are_made_as_ever(name: str) -> None:
    assert codec.seal(sealed()[name], identity(0), SWARM).hex() == GOLDEN["sealed"][name]


@pytest.mark.parametrize("name", sorted(GOLDEN["sealed"]))
def test_sealed_records_of_older_peers_are_read(name: str) -> None:
    found = codec.unseal(bytes.fromhex(GOLDEN["sealed"][name]), KINDS[name], SWARM)
    assert found.record == sealed()[name] and found.signer == identity(0).peer_id


@pytest.mark.parametrize("name", sorted(GOLDEN["plain"]))
def test_plain_records_of_older_peers_are_read(name: str) -> None:
    golden = bytes.fromhex(GOLDEN["plain"][name])
    values = msgspec.msgpack.decode(golden)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(msgspec.msgpack.decode(golden, type=KINDS[name])))
    assert again[: len(values)] == values, "only the end may grow"


def test_every_record_that_travels_has_its_bytes_here() -> None:
    inside = {"DeltaBase", "StepInput", "StepReport"}  # between our own processes only
    assert set(GOLDEN["sealed"]) | set(GOLDEN["plain"]) == set(KINDS) - inside
