"""Counted, attributed, told once a minute, bounded."""

from p2prl.swarm import faults as room
from p2prl.swarm.faults import LOG_EVERY_S, Faults


def test_each_kind_of_each_peer_is_told_once_a_minute_and_counted_always() -> None:
    faults = Faults()
    told = [faults.count("bad_record", peer, now) for now in range(int(2 * LOG_EVERY_S)) for peer in ("a", "b")]
    assert told.count(True) == 4
    assert faults.by_kind["bad_record"] == len(told)
    assert faults.of("a") == len(told) / 2


def test_a_peer_that_left_is_not_suspect() -> None:
    faults = Faults()
    faults.count("unreachable", "a", 0.0)
    assert faults.of("a") == 0 and faults.by_kind["unreachable"] == 1


def test_passing_identities_and_made_up_kinds_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(room, "MAX_PEERS", 10)
    faults = Faults()
    for number in range(1000):
        faults.count(f"kind {number}", f"peer {number}", float(number))
    assert len(faults.by_kind) <= room.MAX_KINDS + 1 and faults.by_kind["other"] > 900
    assert faults.of("peer 0") == 0 and faults.of("peer 999") == 1
    assert len(faults._told) <= 10  # noqa: SLF001
