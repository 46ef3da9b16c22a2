"""The shared line alone: peers that always have something to send, at any rate, over lines of their own."""

import heapq
import itertools
from bisect import bisect_left

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.swarm.fair import BURST_S, FairLine, Ticket

ITEM = 2**18
MIB = 2**20


class Sim:
    """`streams[peer]` streams each; an item is on its way for `takes_s[peer]`, then the next one comes after `gap_s`."""

    def __init__(self, rate: float | None, streams: dict[str, int], takes_s: dict[str, float], gap_s: float = 1e-4):
        self.line = FairLine(rate, 0.0)
        self.takes_s, self.gap_s, self.now = takes_s, gap_s, 0.0
        self.events: list[tuple[float, int, str, Ticket | None]] = []
        self.numbers = itertools.count()
        self.went: list[tuple[float, str, int]] = []
        for peer, count in streams.items():
            for _ in range(count):
                self.at(0.0, peer, None)

    def at(self, time: float, peer: str, ticket: Ticket | None) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), peer, ticket))

    def run(self, until: float) -> dict[str, int]:
        """Bytes by peer."""
        granted, wait = self.line.grants(self.now)
        assert not granted
        while self.now < until:
            next_event = self.events[0][0] if self.events else until
            self.now = min(next_event, self.now + max(wait, 1e-5) if wait is not None else until)
            while self.events and self.events[0][0] <= self.now:
                _, _, peer, ticket = heapq.heappop(self.events)
                if ticket is None:
                    self.line.ask(peer, ITEM, self.now)
                else:
                    self.line.sent(ticket, self.now)
                    self.at(self.now + self.gap_s, peer, None)
            granted, wait = self.line.grants(self.now)
            for ticket in granted:
                self.went.append((self.now, ticket.peer, ticket.num_bytes))
                self.at(self.now + self.takes_s[ticket.peer], ticket.peer, ticket)
        totals: dict[str, int] = {}
        for _, peer, num_bytes in self.went:
            totals[peer] = totals.get(peer, 0) + num_bytes
        return totals

    def most_in(self, seconds: float) -> int:
        """The most bytes in any window."""
        times = [at for at, _, _ in self.went]
        sums = list(itertools.accumulate((num_bytes for _, _, num_bytes in self.went), initial=0))
        return max(sums[bisect_left(times, at + seconds)] - sums[first] for first, at in enumerate(times))


@pytest.mark.parametrize("rate", [5.0 * MIB, None])
@pytest.mark.parametrize("streams", [1, 4, 8])
def test_who_opens_more_streams_gets_no_more(rate: float | None, streams: int):
    totals = Sim(rate, {"one": 1, "many": streams}, {"one": 1e-3, "many": 1e-3}).run(20.0 if rate else 2.0)
    share = totals["one"] / sum(totals.values())
    assert 0.4 <= share <= 0.6


def test_who_takes_long_by_its_own_line_holds_nobody_up():
    alone = Sim(None, {"fast": 1}, {"fast": 2e-3}).run(5.0)["fast"]
    both = Sim(None, {"fast": 1, "slow": 2}, {"fast": 2e-3, "slow": 0.5}).run(5.0)
    assert both["fast"] > 0.9 * alone
    assert both["slow"] >= 2 * 9 * ITEM, "and it gets what its own line takes"


def test_who_was_quiet_saved_nothing_up():
    line = FairLine(None, 0.0)
    for number in range(1000):
        line.ask("busy", MIB, number / 100)
        granted, _ = line.grants(number / 100)
        for ticket in granted:
            line.sent(ticket, number / 100)
    line.ask("new", MIB, 10.0)
    for _ in range(4):
        line.ask("busy", MIB, 10.0)
    granted, _ = line.grants(10.0)
    assert [ticket.peer for ticket in granted][:3].count("busy") >= 1, "nobody waits for it to catch up"


def test_a_change_of_the_rate_counts_from_now():
    sim = Sim(1.0 * MIB, {"a": 2}, {"a": 1e-3})
    before = sim.run(10.0)["a"]
    sim.line.set_rate(4.0 * MIB, sim.now)
    after = sim.run(20.0)["a"] - before
    assert before == pytest.approx(10 * MIB, rel=0.06)
    assert after == pytest.approx(40 * MIB, rel=0.06)


def test_a_ticket_that_is_given_up_leaves_the_line():
    line = FairLine(1.0, 0.0)
    line.charge(10, 0.0)
    ticket = line.ask("a", 100, 0.0)
    assert line.grants(0.0)[0] == []
    line.sent(ticket, 0.0)
    assert line.grants(1000.0) == ([], None)


@given(
    rate=st.floats(0.5 * MIB, 20.0 * MIB),
    streams=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5), min_size=1),
    takes_s=st.floats(1e-4, 0.05),
    gap_s=st.floats(0.0, 0.01),
)
@settings(max_examples=40, deadline=None)
def test_any_window_is_within_the_cap_and_whoever_can_take_it_gets_an_equal_share(rate, streams, takes_s, gap_s):
    sim = Sim(rate, streams, dict.fromkeys(streams, takes_s), gap_s)
    totals = sim.run(6.0)
    for seconds in (1.0, 5.0):
        assert sim.most_in(seconds) <= rate * (seconds + BURST_S) + 2 * ITEM
    slowest = min(streams.values()) * ITEM / (takes_s + gap_s)
    if slowest > 1.5 * rate:
        assert sum(totals.values()) >= 0.95 * 6.0 * rate - ITEM
        assert min(totals.values()) >= 0.8 * sum(totals.values()) / len(totals) - ITEM
