"""What peers did wrong: counted by kind and by peer, told to people once a minute.

In: a fault with the peer it is attributed to ("" when nobody can be named), monotonic seconds. Out: counts; whether to
log this one.

Invariants: tables are bounded (a crowd of passing identities pushes out the longest quiet), counts by kind never fall.
"""

from collections import Counter, OrderedDict

LOG_EVERY_S = 60.0
MAX_PEERS = 1024
MAX_KINDS = 64
ORDINARY = frozenset({"unreachable", "truncated"})  # what a peer that left looks like: no suspicion


class Faults:
    """Holds no clock."""

    def __init__(self) -> None:
        self.by_kind: Counter[str] = Counter()
        self._by_peer: OrderedDict[str, Counter[str]] = OrderedDict()
        self._told: OrderedDict[tuple[str, str], float] = OrderedDict()

    def count(self, kind: str, peer: str, now: float) -> bool:
        """Count it; True when this kind by this peer was not told in the last minute."""
        if kind not in self.by_kind and len(self.by_kind) >= MAX_KINDS:
            kind = "other"
        self.by_kind[kind] += 1
        if peer:
            counts = self._by_peer.setdefault(peer, Counter())
            counts[kind] += 1
            self._by_peer.move_to_end(peer)
            if len(self._by_peer) > MAX_PEERS:
                self._by_peer.popitem(last=False)
        told_at = self._told.get((peer, kind))
        if told_at is not None and now - told_at < LOG_EVERY_S:
            return False
        self._told[peer, kind] = now
        self._told.move_to_end((peer, kind))
        if len(self._told) > MAX_PEERS:
            self._told.popitem(last=False)
        return True

    def peers(self) -> tuple[str, ...]:
        """Who made any that an honest node doesn't make, the longest quiet first."""
        return tuple(peer for peer in self._by_peer if self.of(peer))

    def of(self, peer: str) -> int:
        """Faults of `peer` that an honest node doesn't make."""
        counts = self._by_peer.get(peer, Counter())
        return sum(count for kind, count in counts.items() if kind not in ORDINARY)
