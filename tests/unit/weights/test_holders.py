"""Whom to ask for a small content: few at a time, and everybody in the end."""

from hypothesis import given
from hypothesis import strategies as st

from p2prl.weights.holders import HolderRules, Holders
from p2prl.weights.messages import MAX_NAMED

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


def starved(num_owing: int) -> tuple[Holders, list[str]]:
    """Asked at 0 s for the one piece: they say that they have it, and give nothing. One more is dead."""
    owing = [f"owing {number}" for number in range(num_owing)]
    holders = Holders("me", 1, {}, RULES)
    holders.offer(["dead", *owing], 0.0)
    holders.failed("dead", 0.0)
    for peer in owing:
        holders.answered(peer, ALL, 0.0, hungry=True)
        holders.begged(peer, 0.0)
        holders.busy(peer, 0, 0.0)
    return holders, owing


def test_while_we_starve_those_that_give_nothing_are_named_and_we_ourselves() -> None:
    holders, owing = starved(3)
    assert holders.useless_for(ALL, 0.0, RULES.starved_s - 0.1) == ["dead"], "they may be busy with others"
    assert holders.useless_for(ALL, 5.0, RULES.starved_s + 4.9) == ["dead"], "there came bytes"
    assert holders.useless_for(ALL, 0.0, RULES.starved_s) == ["dead", *owing, "me"]
    assert holders.useless_for(ALL, RULES.dripped_s, RULES.dripped_s) == ["dead", *owing, "me"], "bytes, and no piece"
    assert starved(30)[0].useless_for(ALL, 0.0, RULES.starved_s)[-1] == "me"
    assert len(starved(30)[0].useless_for(ALL, 0.0, RULES.starved_s)) == MAX_NAMED


def test_who_gave_a_piece_lately_is_not_named_and_nobody_is_while_pieces_come() -> None:
    holders, owing = starved(3)
    holders.gave(owing[0], 0, 50.0)
    assert holders.useless_for(ALL, 50.0, 50.0 + RULES.starved_s - 0.1) == ["dead"]
    holders.gave(owing[1], 0, 60.0)
    assert holders.useless_for(ALL, 60.0, 60.0 + RULES.starved_s) == ["dead", *owing, "me"]
    holders.offer(["late"], 70.0)
    holders.begged("late", 70.0)
    assert "late" not in holders.useless_for(ALL, 60.0, 60.0 + RULES.starved_s), "it was asked just now"


def test_who_was_not_asked_for_a_piece_owes_none() -> None:
    holders = small()
    assert holders.useless_for(ALL, 0.0, 1000.0) == []
