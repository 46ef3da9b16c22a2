"""Whether a peer's request is served at once, slowed or ignored.

In: the caller that the connection proves, bytes it asks for, monotonic seconds. Out: a `Ruling` with its reason, shown
to both sides.

Invariants: every peer has its own buckets, so nobody pays for another's greed; an ignored request costs the peer
nothing, so who slows down is served again; the table is bounded, and a peer can't empty its record by being dropped
from it while it is in debt unless `max_peers` others asked since.
"""

from collections import OrderedDict
from enum import StrEnum

import msgspec

from p2prl.swarm.bandwidth import Bandwidth


class QuotaRules(msgspec.Struct, frozen=True):
    requests_per_s: float = 20.0
    bytes_per_s: float = 4.0 * 2**20
    burst_s: float = 10.0  # of both, saved up by a quiet peer
    max_wait_s: float = 5.0  # slowed by up to this; who is further behind is ignored
    max_peers: int = 1024


class Ruled(StrEnum):
    SERVE = "serve"
    SLOW = "slow"
    IGNORE = "ignore"


class Ruling(msgspec.Struct, frozen=True):
    """Serve now, serve after `wait_s`, or answer OverQuota with `reason`."""

    kind: Ruled
    wait_s: float = 0.0
    reason: str = ""


class Quota:
    """The buckets of the peers that asked lately. Holds no clock."""

    def __init__(self, rules: QuotaRules | None = None) -> None:
        self._rules = rules or QuotaRules()
        self._buckets: OrderedDict[str, tuple[Bandwidth, Bandwidth]] = OrderedDict()  # the longest quiet first

    def ask(self, peer: str, num_bytes: int, now: float) -> Ruling:
        """One request that moves `num_bytes` (both ways, as far as known)."""
        requests, volume = self._of(peer, now)
        rules = self._rules
        after_requests_s = requests.take(1, now)
        after_bytes_s = volume.take(num_bytes, now)
        wait_s = max(after_requests_s, after_bytes_s)
        if wait_s == 0.0:
            return Ruling(Ruled.SERVE)
        if after_requests_s >= after_bytes_s:
            reason = f"more than {rules.requests_per_s:g} requests a second"
        else:
            reason = f"more than {rules.bytes_per_s / 2**20:g} MiB a second"
        if wait_s <= rules.max_wait_s:
            return Ruling(Ruled.SLOW, wait_s, reason)
        requests.give_back(1)
        volume.give_back(num_bytes)
        return Ruling(Ruled.IGNORE, reason=f"{reason}, and {wait_s:.0f} s behind: ask less often")

    def spend(self, peer: str, num_bytes: int, now: float) -> float:
        """Bytes of a reply that was let in: how many seconds to wait with them."""
        return self._of(peer, now)[1].take(num_bytes, now)

    def __len__(self) -> int:
        return len(self._buckets)

    def _of(self, peer: str, now: float) -> tuple[Bandwidth, Bandwidth]:
        buckets = self._buckets.get(peer)
        if buckets is None:
            burst_s = self._rules.burst_s
            buckets = self._buckets[peer] = (
                Bandwidth(self._rules.requests_per_s, now, burst_s=burst_s),
                Bandwidth(self._rules.bytes_per_s, now, burst_s=burst_s),
            )
            if len(self._buckets) > self._rules.max_peers:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(peer)
        return buckets
