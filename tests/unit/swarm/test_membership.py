"""The table of peers."""

from hypothesis import given
from hypothesis import strategies as st

from p2prl.records import PeerInfo, Version
from p2prl.swarm.membership import Liveness, Membership, MembershipRules, Recorded

ME = "12D3KooW" + "m" * 38
BOOT = b"bootboot"


def peer(i: int) -> str:
    return f"12D3KooW{'abcdefghijkmnopqrstuvwxyz'[i] * 38}"


def info(peer_id: str, sequence: int = 0, boot_id: bytes = BOOT, addresses: tuple[str, ...] = ()) -> PeerInfo:
    held = Version(0, 0, bytes(32))
    return PeerInfo(peer_id, boot_id, sequence, "", "full", addresses, held, True, 0, "p2prl", (1,))


def table(**rules) -> Membership:
    return Membership(ME, BOOT, MembershipRules(**rules))


def test_liveness_follows_what_was_heard():
    members = table()
    assert members.heard(peer(0), 10.0)
    assert not members.heard(peer(0), 11.0)
    seen = [members.liveness(peer(0), at) for at in (16.0, 16.1, 41.0, 41.1)]
    assert seen == [Liveness.ALIVE, Liveness.SUSPECT, Liveness.SUSPECT, Liveness.GONE]
    assert members.heard(peer(0), 50.0)


def test_a_record_makes_nobody_alive():
    members = table()
    members.record(info(peer(0)), 1.0)
    assert members.live(1.0) == {ME}
    members.heard(peer(0), 2.0)
    assert members.live(7.0) == {ME, peer(0)}
    assert members.live(7.1) == {ME}
    assert members.live(7.1, within_s=10) == {ME, peer(0)}


def test_older_sequences_and_superseded_boots_are_ignored():
    members = table()
    results = [
        members.record(info(peer(0), sequence, boot), 1.0)
        for sequence, boot in [(5, b"boot_one"), (5, b"boot_one"), (4, b"boot_one"), (6, b"boot_one"), (0, b"boot_two")]
    ]
    assert results == [Recorded.NEW, Recorded.OLD, Recorded.OLD, Recorded.UPDATED, Recorded.UPDATED]
    assert members.record(info(peer(0), 99, b"boot_one"), 2.0) is Recorded.OLD
    assert members.infos()[peer(0)].boot_id == b"boot_two"


def test_our_own_id_elsewhere_is_a_clash():
    members = table()
    assert members.record(info(ME), 1.0) is Recorded.OWN
    assert members.record(info(ME, boot_id=b"otherbox"), 1.0) is Recorded.CLASH
    assert members.members() == ()


def test_round_trips_are_smoothed_and_count_as_heard():
    members = table()
    members.measured(peer(0), 0.1, 1.0)
    members.measured(peer(0), 0.2, 2.0)
    member = members.get(peer(0))
    assert member is not None and abs(member.rtt_s - 0.12) < 1e-9 and member.heard_at == 2.0


def test_the_silent_are_forgotten():
    members = table(forget_s=100.0)
    members.heard(peer(0), 0.0)
    members.record(info(peer(1)), 50.0)
    assert members.expire(100.0) == ()
    assert members.expire(100.1) == (peer(0),)
    assert members.expire(151.0) == (peer(1),)


def test_a_full_table_drops_who_was_never_heard_and_keeps_the_living():
    members = table(max_peers=2)
    members.heard(peer(0), 1.0)
    members.record(info(peer(1)), 1.0)
    assert members.record(info(peer(2)), 2.0) is Recorded.NEW
    members.heard(peer(3), 2.0)
    assert [m.peer_id for m in members.members()] == [peer(0), peer(3)]
    assert members.record(info(peer(4)), 2.0) is Recorded.FULL
    members.heard(peer(4), 60.0)
    assert [m.peer_id for m in members.members()] == [peer(3), peer(4)]


def test_good_addresses_come_from_peers_we_heard_direct_and_recent_first():
    members = table()
    for i, addresses in enumerate([("a0", "a1"), ("b0",), ("c0",), ("d0",)]):
        members.record(info(peer(i), addresses=addresses), 0.0)
    for i in (0, 1, 2):
        members.heard(peer(i), float(i))
    members.path(peer(2), "relayed")
    members.path(peer(20), "direct")
    assert members.good_addresses() == ("b0", "a0", "c0", "a1")
    assert members.good_addresses(limit=2) == ("b0", "a0")


events = st.lists(st.tuples(st.sampled_from(["heard", "record"]), st.integers(0, 9), st.integers(0, 5)), max_size=60)


@given(events)
def test_bounded_and_sequences_never_go_back(plan):
    members = table(max_peers=4)
    for now, (kind, i, sequence) in enumerate(plan):
        before = members.get(peer(i))
        if kind == "heard":
            members.heard(peer(i), float(now))
        else:
            members.record(info(peer(i), sequence), float(now))
            after = members.get(peer(i))
            if before is not None and before.info is not None and after is not None:
                assert after.info is not None and after.info.sequence >= before.info.sequence
        assert len(members.members()) <= 4


def test_who_gossips_but_answers_no_call_is_not_live():
    members = table()
    members.heard(peer(0), 1.0)
    members.unanswered(peer(0))
    assert members.live(1.0) == {ME, peer(0)}  # one lost call is no sign of anything
    members.unanswered(peer(0))
    members.heard(peer(0), 2.0)
    assert members.live(2.0) == {ME}
    members.answered(peer(0), 3.0)
    assert members.live(3.0) == {ME, peer(0)}
    for _ in range(2):
        members.unanswered(peer(0))
    members.measured(peer(0), 0.1, 4.0)
    assert members.live(4.0) == {ME, peer(0)}
    members.unanswered(peer(1))  # nobody knows it
    assert members.get(peer(1)) is None


def other(i: int) -> str:
    """A peer that is not ME."""
    return peer(i if i < 11 else i + 1)


def test_in_a_small_swarm_everybody_is_greeted_in_each_round():
    members = table()
    for i in range(8):
        members.heard(peer(i), 10.0)
    assert set(members.to_greet(10.0, 0)) == {peer(i) for i in range(8)}


def test_in_a_large_one_only_the_silent_are_the_longest_silent_first():
    members = table()
    for i in range(20):
        members.heard(other(i), 10.0 + i / 10)
    assert members.to_greet(12.0, 0)[:3] == (other(0), other(1), other(2))
    assert len(members.to_greet(12.0, 0)) == 8
    assert len(members.to_greet(13.0, 0)) == 15  # heard more than 1.5 s ago
    assert len(members.to_greet(14.0, 0)) == 20


def test_the_gone_are_tried_in_turn_and_take_no_place_of_the_living():
    members = table()
    for i in range(10):
        members.heard(peer(i), 0.0)
    for i in range(10, 13):
        members.heard(other(i), 100.0)
    rounds = [members.to_greet(100.0, number) for number in range(3)]
    assert all(set(greeted) >= {other(10), other(11), other(12)} and len(greeted) == 7 for greeted in rounds)
    assert set().union(*rounds) == {other(i) for i in range(13)}


def test_a_newcomer_from_the_directory_is_greeted_first():
    members = table()
    for i in range(10):
        members.heard(peer(i), 50.0)
    members.record(info(peer(15)), 50.5)
    assert members.to_greet(51.0, 0)[0] == peer(15)
