"""Who gets a piece of a learner, and who is told whom to ask."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.weights import spare as spare_module
from p2prl.weights.spare import HOLDER, LEARNER, Spare, SpareRules

X = bytes(32)
WIDE = SpareRules(copies=3, piece_at_once=99, peers_at_once=99)


def give(spare: Spare, index: int, peer: str, now: float, *, rules: SpareRules = WIDE) -> bool:
    """Asked, and if served all of it sent within 0.1 s."""
    if not spare.ask(rules, X, index, peer, (), now).serve:
        return False
    spare.begin(X, index, peer, now)
    spare.end(X, index, peer, now + 0.1, whole=True)
    return True


def test_three_get_it_and_the_fourth_is_told_whom_to_ask():
    spare = Spare()
    assert [give(spare, 0, peer, 0.0) for peer in "abcd"] == [True, True, True, False]
    assert spare.ask(WIDE, X, 0, "d", (), 1.0).ask == ("a", "b", "c")
    assert give(spare, 1, "d", 1.0), "of another piece there is no copy yet"


def test_it_serves_again_when_those_are_of_no_use():
    spare = Spare()
    for peer in "abc":
        give(spare, 0, peer, 0.0)
    assert not spare.ask(WIDE, X, 0, "d", "abc", 1.0).serve, "they may still be writing it down"
    assert spare.ask(WIDE, X, 0, "d", "abc", 4.0).serve
    assert give(spare, 0, "d", 4.0, rules=WIDE) is False, "who does not complain is sent to them"
    spare.begin(X, 0, "d", 4.0)
    assert spare.ask(WIDE, X, 0, "e", "abc", 4.5).serve, "one useful copy is less than three"


def test_a_copy_that_came_to_nothing_is_none():
    spare = Spare()
    for peer in "abc":
        assert spare.ask(WIDE, X, 0, peer, (), 0.0).serve
        spare.begin(X, 0, peer, 0.0)
    assert not spare.ask(WIDE, X, 0, "d", (), 1.0).serve
    spare.end(X, 0, "b", 1.0, whole=False)
    assert spare.ask(WIDE, X, 0, "d", (), 1.0).serve


def test_a_copy_that_stalls_or_drips_makes_nobody_wait():
    spare = Spare()
    for peer in "abc":
        spare.begin(X, 0, peer, 0.0)
    for peer in "ab":
        for second in range(40):
            spare.moved(X, 0, peer, float(second))
    assert spare.ask(WIDE, X, 0, "d", (), 12.0).serve, "c moves nothing"
    spare.moved(X, 0, "c", 39.0)
    assert not spare.ask(WIDE, X, 0, "d", (), 39.0).serve, "they drip, and nobody says that they are of no use"
    assert spare.ask(WIDE, X, 0, "d", "ab", 39.0).serve


def test_few_at_once_and_a_peer_counts_once():
    spare = Spare()
    for index, peer in enumerate("abc"):
        assert spare.ask(LEARNER, X, index, peer, (), 0.0).serve
        spare.begin(X, index, peer, 0.0)
    assert not spare.ask(LEARNER, X, 9, "d", (), 0.0).serve, "three peers are at it"
    assert not spare.ask(LEARNER, X, 0, "b", (), 0.0).serve, "this piece is on its way"
    assert spare.ask(LEARNER, X, 9, "a", (), 0.0).serve, "one of the three"
    assert spare.ask(LEARNER, X, 9, "d", (), LEARNER.slow_s + 0.1).serve, "they are too slow to wait for"


def test_what_the_fewest_have_comes_first():
    spare = Spare()
    give(spare, 0, "a", 0.0)
    give(spare, 2, "a", 0.0)
    give(spare, 2, "b", 0.0)
    assert spare.order(X, (2, 0, 3, 1)) == [3, 1, 0, 2]


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 2), st.booleans()), max_size=60))
def test_a_learner_never_gives_more_copies_than_that_to_peers_who_complain_of_nobody(asked: list):
    spare, now = Spare(), 0.0
    holders: dict[int, set[str]] = {}
    for peer, index, whole in asked:
        now += 1.0
        for rules in (HOLDER, LEARNER):
            answer = spare.ask(rules, X, index, peer, (), now)
            assert answer.serve or set(answer.ask) <= holders.get(index, set()) - {peer}
        if answer.serve:
            spare.begin(X, index, peer, now)
            spare.end(X, index, peer, now, whole=whole)
            held = holders.setdefault(index, set())
            held.add(peer) if whole else held.discard(peer)
    assert all(len(held) <= 3 for held in holders.values())


def test_who_takes_a_piece_again_and_again_makes_nobody_wait_twice():
    spare, now = Spare(), 0.0
    assert spare.ask(LEARNER, X, 0, "hog", (), now).serve
    spare.begin(X, 0, "hog", now)
    assert not spare.ask(LEARNER, X, 0, "b", (), now + 1).serve, "the first time it may be honest"
    for whole in (False, True, False):
        now += 9.0
        spare.end(X, 0, "hog", now, whole=whole)
        spare.begin(X, 0, "hog", now)
        assert spare.ask(LEARNER, X, 0, "b", ("hog",), now + 1).serve


def test_nobody_waits_for_one_useless_peer_after_the_other():
    """Each new one takes the piece slowly, for as long as is borne with."""
    spare, served_at = Spare(), 0.0
    for number in range(20):
        began = 14.0 * number
        spare.begin(X, 0, f"hog {number}", began)
        hogs = tuple(f"hog {other}" for other in range(number + 1))
        for second in range(14):
            spare.moved(X, 0, f"hog {number}", began + second)
            assert not spare.ask(LEARNER, X, 0, "patient", (), began + second).serve, "it may ask them"
            if not served_at and spare.ask(LEARNER, X, 0, "b", hogs[-16:], began + second).serve:
                served_at = began + second
        spare.end(X, 0, f"hog {number}", began + 14, whole=False)
    assert LEARNER.patience_s <= served_at <= LEARNER.patience_s + 1


def test_who_starves_is_served_whomever_it_names_and_whoever_else_is_busy_with_it():
    """Those who got it may be more than anybody can name, and they say that they are busy."""
    spare = Spare()
    for peer in "abc":
        give(spare, 0, peer, 0.0)
    assert not spare.ask(LEARNER, X, 0, "d", ("d",), 1.0).serve
    assert not spare.ask(LEARNER, X, 0, "d", ("d",), LEARNER.longest_s).serve
    assert not spare.ask(LEARNER, X, 0, "d", ("x",), 1.0 + LEARNER.longest_s).serve, "it gets something of somebody"
    spare.begin(X, 0, "hog", LEARNER.longest_s)
    assert spare.ask(LEARNER, X, 0, "d", ("d",), 1.0 + LEARNER.longest_s).serve


@pytest.mark.parametrize("num_contents", [1, 9, 100])
def test_contents_in_turn_are_given_as_often_as_one(num_contents: int):
    spare, given_away = Spare(), 0
    for number in range(20):
        for each in range(num_contents):
            content, peer, now = each.to_bytes(32), f"peer {number}", float(number)
            if spare.ask(LEARNER, content, 0, peer, (), now).serve:
                spare.begin(content, 0, peer, now)
                spare.end(content, 0, peer, now + 0.1, whole=True)
                given_away += 1
    assert given_away == 3 * num_contents


@pytest.mark.parametrize("num_contents", [1, 3])
def test_the_table_is_bounded_by_rows_and_by_contents(monkeypatch: pytest.MonkeyPatch, num_contents: int):
    monkeypatch.setattr(spare_module, "MAX_ROWS", 50)
    spare = Spare()
    for number in range(400):
        content, index, peer = (number % num_contents).to_bytes(32), number % 5, f"peer {number % 37}"
        if spare.ask(LEARNER, content, index, peer, (), 0.0).serve:
            spare.begin(content, index, peer, 0.0)
            spare.end(content, index, peer, 0.0, whole=True)
        rows = sum(piece.num_rows for pieces in spare._contents.values() for piece in pieces.values())
        assert rows == spare._num_rows <= 50
    for number in range(2 * spare_module.MAX_CONTENTS):
        spare.ask(LEARNER, number.to_bytes(32), 0, "a", (), 0.0)
    assert len(spare._contents) <= spare_module.MAX_CONTENTS
