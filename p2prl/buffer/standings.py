"""Every maker's standing here: fed by our own verdicts, kept over restarts, read before anything of a peer is taken.

In: verdicts with their time (unix seconds). Out: scores in (0, 1), who is in quarantine, counts for people.

Invariants: bounded: the one with the least evidence makes room; what is in memory is on the disk after `flush`.
"""

from collections.abc import Mapping

import msgspec

from p2prl.buffer import trust
from p2prl.buffer.store import Store
from p2prl.buffer.trust import Standing
from p2prl.records import Verdict

MAX_MAKERS = 4096


class MakerCounts(msgspec.Struct):
    """Since the start of this daemon: groups of one maker that were admitted and refused here."""

    admitted: int = 0
    refused: int = 0


class Standings:
    """Holds no clock."""

    def __init__(self, known: Mapping[str, Standing]) -> None:
        self._standings = dict(known)
        self._counts: dict[str, MakerCounts] = {}
        self._dirty: set[str] = set()

    def judged(self, maker: str, verdict: Verdict, now: float) -> bool:
        """Count a verdict; True when it puts the maker into quarantine."""
        before = self._standings.get(maker, Standing())
        after = trust.judged(before, verdict.admitted, verdict.reason, now)
        self._make_room(maker)
        self._standings[maker] = after
        self._dirty.add(maker)
        counts = self._counts.setdefault(maker, MakerCounts())
        if verdict.admitted:
            counts.admitted += 1
        else:
            counts.refused += 1
        return trust.quarantined(after, now) and not trust.quarantined(before, now)

    def quarantined(self, maker: str, now: float) -> bool:
        standing = self._standings.get(maker)
        return standing is not None and trust.quarantined(standing, now)

    def score(self, maker: str, now: float) -> float:
        return trust.score(self._standings.get(maker, Standing()), now)

    def counts(self, maker: str) -> MakerCounts:
        return self._counts.get(maker, MakerCounts())

    def flush(self, store: Store) -> None:
        """Write what changed since the last time."""
        changed = {maker: self._standings[maker] for maker in self._dirty if maker in self._standings}
        self._dirty.clear()
        if changed:
            store.save_standings(changed)

    def _make_room(self, maker: str) -> None:
        if maker in self._standings or len(self._standings) < MAX_MAKERS:
            return
        weakest = min(self._standings, key=lambda peer: (self._standings[peer].bad, self._standings[peer].good))
        del self._standings[weakest]
        self._counts.pop(weakest, None)
