"""Whom to ask for a small content: few at a time, and everybody in the end."""

from hypothesis import given
from hypothesis import strategies as st

from p2prl.weights.holders import HolderRules, Holders

RULES = HolderRules()
PEERS = [f"peer {number}" for number in range(12)]
ALL, NONE = frozenset({0}), frozenset()


def small(peers: list[str] = PEERS) -> Holders:
    holders = Holders("me", 1, {}, RULES, is_small=True)
    holders.offer(peers, 0.0)
    return holders


def test_two_are_asked_the_likeliest_first_and_nobody_else_when_one_serves() -> None:
    holders = small()
    assert holders.to_ask(0.0) == PEERS[:2]
    assert holders.to_ask(0.1) == []
    holders.answered(PEERS[0], ALL, 0.1, hungry=True)
    holders.answered(PEERS[1], NONE, 0.1, hungry=True)
    assert holders.to_ask(0.2) == []
    assert holders.to_ask(0.5) == [PEERS[2]], "one more, should the first fail"


def test_a_large_content_asks_all_at_once() -> None:
    holders = Holders("me", 4, {}, RULES)
    holders.offer(PEERS, 0.0)
    assert holders.to_ask(0.0) == PEERS


def test_the_silent_and_the_dead_hold_nobody_up() -> None:
    holders = small()
    holders.to_ask(0.0)
    assert holders.to_ask(RULES.silent_s) == PEERS[2:4]
    for peer in PEERS[:4]:
        holders.failed(peer, 1.1)
    assert holders.to_ask(1.1) == PEERS[4:6]


def test_whoever_is_named_by_one_that_has_it_is_asked_at_once() -> None:
    holders = small()
    holders.to_ask(0.0)
    holders.answered(PEERS[0], ALL, 0.01, hungry=True)
    holders.busy(PEERS[0], 0, 0.02)
    holders.offer([PEERS[7], "stranger", PEERS[9]], 0.02, named=True)
    assert set(holders.to_ask(0.02)) == {PEERS[7], "stranger", PEERS[9]}


@given(st.sampled_from(PEERS), st.sets(st.sampled_from(PEERS)), st.floats(0.001, 0.2))
def test_the_one_that_has_it_is_found_and_asking_is_paced(owner: str, dead: set[str], tick_s: float) -> None:
    holders, asks, now = small(), [], 0.0
    while True:
        for peer in holders.to_ask(now):
            asks.append(now)
            if peer == owner:
                holders.answered(peer, ALL, now, hungry=True)
                assert len([at for at in asks if at > now - RULES.hungry_s]) <= RULES.few + len(dead)
                return
            if peer in dead:
                holders.failed(peer, now)
            else:
                holders.answered(peer, NONE, now, hungry=True)
        now += tick_s
        assert now < 1.0 + len(PEERS) * RULES.hungry_s
