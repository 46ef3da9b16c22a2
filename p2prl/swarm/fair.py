"""Whose bytes go next over a line that several peers share, and when.

In: items about to be sent to a peer, items handed over, monotonic seconds, a rate that its owner may change at any time.
Out: which items go now, and how long until the next may. Pure; holds no clock.

Invariants: over any t seconds at one rate at most BURST_S of it, one item and rate * t go; while two peers have
something to send, neither gets ahead of the other by more than `lead_bytes` and an item, however many streams each has;
a peer whose own line is slow holds nobody up: one that takes an item longer than `slow_s` is not waited for, and saves
nothing up meanwhile.

This is start-time fair queueing over peers, below a token bucket with debt. Without a cap it evens out what our own
machine gives; where the line itself is the limit, each peer has one connection and TCP shares it out.
"""

import math
from collections import deque
from collections.abc import Iterator

import msgspec

from p2prl.swarm.bandwidth import Bandwidth

BURST_S = 0.1


class FairRules(msgspec.Struct, frozen=True):
    lead_bytes: int = 2**20
    memory_bytes: int = (
        16 * 2**20
    )  # that a peer may be behind, and catches up with: it reads its disk between two items
    slow_s: float = 0.05
    grace_s: float = 0.02  # between two items of a peer: it still has more to send
    quiet_s: float = 1.0  # without an item: then a peer has left the line


class Ticket(msgspec.Struct, eq=False):
    """One item of a peer: it waits, then it is on its way until `sent`."""

    peer: str
    num_bytes: int
    granted_at: float | None = None


class _Peer(msgspec.Struct, eq=False):
    service: float  # bytes that it got, on a scale that all share
    waiting: deque[Ticket] = msgspec.field(default_factory=deque)
    moving: dict[int, Ticket] = msgspec.field(default_factory=dict)  # by id of the ticket
    is_slow: bool = False  # its last item took long
    seen_at: float = 0.0


class FairLine:
    """`rate` in bytes a second, None for no cap."""

    def __init__(self, rate: float | None, now: float, rules: FairRules | None = None) -> None:
        self._rules = rules or FairRules()
        self._bucket = Bandwidth(rate, now, burst_s=BURST_S)
        self._peers: dict[str, _Peer] = {}

    @property
    def rate(self) -> float | None:
        return self._bucket.rate

    def set_rate(self, rate: float | None, now: float) -> None:
        self._bucket.set_rate(rate, now)

    def charge(self, num_bytes: int, now: float) -> None:
        """Bytes that did not wait: others wait for them."""
        self._bucket.take(num_bytes, now)

    def ask(self, peer: str, num_bytes: int, now: float) -> Ticket:
        """An item of `peer` is ready; `grants` says when it goes."""
        ticket = Ticket(peer, num_bytes)
        known = self._peers.get(peer)
        least = self._least(now)
        if known is None:
            known = self._peers[peer] = _Peer(least)
        known.service = max(known.service, least - self._rules.memory_bytes)
        known.waiting.append(ticket)
        known.seen_at = now
        return ticket

    def grants(self, now: float) -> tuple[list[Ticket], float | None]:
        """Items that go now; seconds until the next may, None when only another event changes that."""
        granted: list[Ticket] = []
        self._forget(now)
        while True:
            behind_s = self._bucket.wait_s(now)
            candidate = self._first(now)
            if candidate is None:
                return granted, self._until_free_s(now)
            if behind_s > 0:
                return granted, behind_s
            ticket = candidate.waiting.popleft()
            ticket.granted_at = now
            candidate.moving[id(ticket)] = ticket
            candidate.service += ticket.num_bytes
            self._bucket.take(ticket.num_bytes, now)
            granted.append(ticket)

    def sent(self, ticket: Ticket, now: float) -> None:
        """Handed over to the network, or given up."""
        peer = self._peers.get(ticket.peer)
        if peer is None:
            return
        if ticket.granted_at is None:
            peer.waiting.remove(ticket)
            return
        peer.moving.pop(id(ticket), None)
        peer.is_slow = now - ticket.granted_at > self._rules.slow_s
        if peer.is_slow:
            peer.service = max(peer.service, self._least(now))
        peer.seen_at = now

    def _first(self, now: float) -> _Peer | None:
        """Of those with something to send the one that got least, if it is not too far ahead of somebody in work."""
        waiting = [peer for peer in self._peers.values() if peer.waiting]
        if not waiting:
            return None
        first = min(waiting, key=lambda peer: peer.service)
        return first if first.service <= self._least(now) + self._rules.lead_bytes else None

    def _least(self, now: float) -> float:
        """The least that one in work got; who is slow by its own line doesn't count."""
        return min((peer.service for peer in self._in_work(now)), default=self._most())

    def _in_work(self, now: float) -> Iterator[_Peer]:
        for peer in self._peers.values():
            if peer.waiting or now <= self._in_work_until(peer):
                yield peer

    def _in_work_until(self, peer: _Peer) -> float:
        """Its own line keeps it from taking more, or it has no more, when nothing happens until then."""
        if peer.is_slow:
            return -math.inf
        if peer.moving:
            return min(ticket.granted_at or 0.0 for ticket in peer.moving.values()) + self._rules.slow_s
        return peer.seen_at + self._rules.grace_s

    def _until_free_s(self, now: float) -> float | None:
        """Until nobody waits any more for somebody who doesn't take more; None when nobody waits at all."""
        if not any(peer.waiting for peer in self._peers.values()):
            return None
        ends = [self._in_work_until(peer) for peer in self._peers.values() if not peer.waiting]
        return min((end for end in ends if end >= now), default=now) - now + 1e-4

    def _most(self) -> float:
        return max((peer.service for peer in self._peers.values()), default=0.0)

    def _forget(self, now: float) -> None:
        """Who has had nothing to send for a while starts anew, level with the others."""
        quiet = [
            name
            for name, peer in self._peers.items()
            if not peer.waiting and not peer.moving and now - peer.seen_at > self._rules.quiet_s
        ]
        for name in quiet:
            del self._peers[name]
