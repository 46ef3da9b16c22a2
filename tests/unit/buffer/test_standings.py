"""Verdicts to standings, over restarts."""

from p2prl.buffer import standings as room
from p2prl.buffer.standings import Standings
from p2prl.buffer.store import Store
from p2prl.buffer.trust import HALF_LIFE_S
from p2prl.records import Verdict
from tests.factories import NOW

GOOD = Verdict(bytes(32), True, "")
FORGED = Verdict(bytes(32), False, "wrong_reward")


def test_a_forger_is_shut_out_once_also_after_a_restart_and_comes_back() -> None:
    store = Store.open(":memory:", NOW)
    standings = Standings(store.standings())
    entered = [standings.judged("forger", FORGED, NOW) for _ in range(5)]
    assert entered.count(True) == 1 and standings.quarantined("forger", NOW)
    assert not standings.quarantined("stranger", NOW)
    standings.flush(store)
    again = Standings(store.standings())
    assert again.quarantined("forger", NOW)
    assert not again.quarantined("forger", NOW + 12 * HALF_LIFE_S)


def test_being_refused_in_quarantine_does_not_prolong_it() -> None:
    standings = Standings({})
    for _ in range(3):
        standings.judged("forger", FORGED, NOW)
    before = standings.score("forger", NOW + HALF_LIFE_S)
    standings.judged("forger", Verdict(bytes(32), False, "quarantined"), NOW + HALF_LIFE_S)
    assert standings.score("forger", NOW + HALF_LIFE_S) == before


def test_counts_are_for_people() -> None:
    standings = Standings({})
    for verdict in (GOOD, GOOD, FORGED):
        standings.judged("maker", verdict, NOW)
    counts = standings.counts("maker")
    assert (counts.admitted, counts.refused) == (2, 1)


def test_a_crowd_of_strangers_does_not_push_out_whoever_is_in_quarantine(monkeypatch) -> None:
    monkeypatch.setattr(room, "MAX_MAKERS", 8)
    standings = Standings({})
    for _ in range(3):
        standings.judged("forger", FORGED, NOW)
    for number in range(100):
        standings.judged(f"stranger {number}", GOOD, NOW)
    assert standings.quarantined("forger", NOW)
    assert len(standings._standings) <= 8  # noqa: SLF001
