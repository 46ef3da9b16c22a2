"""Announced groups: new once, pulled from one source at a time, bounded."""

from hypothesis import given
from hypothesis import strategies as st

from p2prl.records import Announcement, GroupHeader, Version
from p2prl.swarm.gossip import GossipRules, Wanted, digest, missing


def header(i: int, step: int = 0) -> GroupHeader:
    return GroupHeader(i.to_bytes(8, "big") * 4, 1000, Version(1, step, bytes(32)), 8, 0.5)


def announce(wanted: Wanted, maker: str, *headers: GroupHeader, now: float = 0.0) -> tuple[GroupHeader, ...]:
    return wanted.heard(Announcement(maker, headers), now)


def pulled(pulls) -> list[tuple[str, list[int]]]:
    return [(pull.peer, [int.from_bytes(h.id[:8], "big") for h in pull.headers]) for pull in pulls]


def test_a_header_is_new_once():
    wanted = Wanted()
    assert announce(wanted, "a", header(1), header(2)) == (header(1), header(2))
    assert announce(wanted, "a", header(2), header(3)) == (header(3),)
    assert header(1).id in wanted and header(9).id not in wanted and len(wanted) == 3


def test_pulls_are_grouped_by_maker_newest_versions_first():
    wanted = Wanted()
    announce(wanted, "a", header(1, step=3), header(2, step=5))
    announce(wanted, "b", header(3, step=4))
    assert wanted.to_pull(0.0, False, 10) == ()
    assert pulled(wanted.to_pull(0.0, True, 10)) == [("a", [2, 1]), ("b", [3])]
    assert wanted.to_pull(0.0, True, 10) == ()


def test_the_limit_counts_bodies_on_their_way():
    wanted = Wanted()
    announce(wanted, "a", *(header(i) for i in range(5)))
    assert pulled(wanted.to_pull(0.0, True, 2)) == [("a", [0, 1])]
    wanted.have(header(0).id)
    assert pulled(wanted.to_pull(0.0, True, 2)) == [("a", [2])]
    assert wanted.num_waiting() == 4
    assert wanted.held() == (("a", header(0)),)


def test_requests_are_cut_into_batches():
    wanted = Wanted(GossipRules(batch=2))
    announce(wanted, "a", *(header(i) for i in range(5)))
    assert pulled(wanted.to_pull(0.0, True, 10)) == [("a", [0, 1]), ("a", [2, 3]), ("a", [4])]


def test_after_a_failure_another_holder_is_asked_then_back_off_then_given_up():
    wanted = Wanted(GossipRules(max_attempts=3, backoff_s=1.0))
    announce(wanted, "a", header(1))
    wanted.holds("b", header(1).id)
    assert pulled(wanted.to_pull(0.0, True, 1)) == [("a", [1])]
    assert not wanted.failed(header(1).id, "b", 0.1)  # not the one that was asked
    assert not wanted.failed(header(1).id, "a", 0.1)
    assert pulled(wanted.to_pull(0.1, True, 1)) == [("b", [1])]
    assert not wanted.failed(header(1).id, "b", 0.2)
    assert wanted.to_pull(2.1, True, 1) == ()
    assert pulled(wanted.to_pull(2.2, True, 1)) == [("a", [1])]
    assert wanted.failed(header(1).id, "a", 2.3)
    assert wanted.to_pull(99.0, True, 1) == () and wanted.num_waiting() == 0
    wanted.told("c", "a", [header(1)], 100.0)  # somebody turns up who has it
    assert pulled(wanted.to_pull(100.0, True, 1)) == [("c", [1])]


def test_a_pull_without_an_end_fails_by_itself():
    wanted = Wanted(GossipRules(pull_s=15.0))
    announce(wanted, "a", header(1))
    wanted.to_pull(0.0, True, 1)
    wanted.holds("b", header(1).id)
    assert wanted.to_pull(14.9, True, 1) == ()
    assert pulled(wanted.to_pull(15.0, True, 1)) == [("b", [1])]


def test_a_thief_of_an_id_does_not_hide_its_maker():
    wanted = Wanted()
    announce(wanted, "thief", header(1))
    announce(wanted, "maker", header(1))
    assert pulled(wanted.to_pull(0.0, True, 1)) == [("thief", [1])]
    wanted.failed(header(1).id, "thief", 0.1)
    assert pulled(wanted.to_pull(0.1, True, 1)) == [("maker", [1])]


def test_trained_groups_are_not_new_again_until_their_branch_loses():
    wanted = Wanted()
    announce(wanted, "a", header(1))
    wanted.forget([header(1).id])
    assert announce(wanted, "a", header(1)) == () and len(wanted) == 0
    wanted.reopen([header(1).id])
    assert announce(wanted, "a", header(1)) == (header(1),)


def test_old_ones_expire_by_time_and_by_version():
    wanted = Wanted()
    announce(wanted, "a", header(1, step=1), header(2, step=9), now=0.0)
    announce(wanted, "a", header(3, step=9), now=50.0)
    assert wanted.expire(50.0, 60.0, min_step=5) == (header(1).id,)
    assert wanted.expire(61.0, 60.0) == (header(2).id,)
    assert [h for _, h in wanted.known()] == [header(3, step=9)]


def test_one_maker_cant_push_out_the_others():
    wanted = Wanted(GossipRules(max_per_teller=3, max_groups=10))
    announce(wanted, "quiet", header(1))
    for i in range(10, 60):
        announce(wanted, "loud", header(i))
    assert [h for maker, h in wanted.known() if maker == "quiet"] == [header(1)]
    assert len(wanted) == 4


def test_nobody_can_push_out_a_makers_groups_in_its_name():
    wanted = Wanted(GossipRules(max_per_teller=3))
    announce(wanted, "maker", header(1))
    wanted.told("liar", "maker", [header(2)], 0.0)  # a group of the maker's that we had not heard of
    announce(wanted, "maker", header(2))
    for i in range(10, 60):
        wanted.told("liar", "maker", [header(i)], 1.0)
    assert [h for _, h in wanted.known()][:2] == [header(1), header(2)] and len(wanted) == 5


def test_a_makers_own_header_counts_whatever_was_told_before():
    wanted = Wanted()
    lie = header(1, step=99)
    wanted.told("liar", "maker", [lie], 0.0)
    announce(wanted, "maker", header(1))
    wanted.told("liar", "maker", [lie], 1.0)
    assert wanted.known() == (("maker", header(1)),)


def test_a_crowd_pushes_out_its_own_first_and_nobodys_for_good():
    wanted = Wanted(GossipRules(max_groups=8))
    announce(wanted, "quiet", header(1))
    for i in range(10, 100):
        announce(wanted, f"loud {i % 3}", header(i))
    assert wanted.known()[0] == ("quiet", header(1)) and len(wanted) == 8
    assert announce(wanted, "loud 0", header(12)) == (header(12),)


def test_a_peer_that_answers_nothing_does_not_keep_others_bodies_waiting():
    wanted = Wanted(GossipRules(max_asked=4))
    for i in range(100, 164):
        announce(wanted, "silent", header(i, step=2**40))
    announce(wanted, "honest", *(header(i) for i in range(3)))
    asked = dict(pulled(wanted.to_pull(0.0, True, 6)))
    assert asked["honest"] == [0, 1, 2] and len(asked["silent"]) == 3
    assert len(dict(pulled(wanted.to_pull(1.0, True, 60)))["silent"]) == 1


def test_own_groups_are_known_and_held():
    wanted = Wanted()
    wanted.own("me", header(1), 0.0)
    assert wanted.to_pull(0.0, True, 9) == () and wanted.held() == (("me", header(1)),)


@given(st.sets(st.integers(0, 200)), st.sets(st.integers(0, 200)))
def test_a_digest_exchange_finds_exactly_what_is_missing(ours, theirs):
    found = missing([header(i) for i in sorted(ours)], digest(header(i).id for i in theirs))
    assert found == tuple(header(i) for i in sorted(ours - theirs))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40)), max_size=120))
def test_tables_are_bounded_whatever_is_announced(plan):
    wanted = Wanted(GossipRules(max_groups=10, max_per_teller=6, max_done=12, max_sources=2))
    for now, (maker, i) in enumerate(plan):
        announce(wanted, maker, header(i), now=float(now))
        for pull in wanted.to_pull(float(now), True, 4):
            wanted.failed(pull.headers[0].id, pull.peer, float(now))
        assert len(wanted) <= 10 and len(wanted._done) <= 12
        assert all(len(entry.sources) <= 2 for entry in wanted._entries.values())
        assert sum(map(len, wanted._by_teller.values())) == len(wanted)
