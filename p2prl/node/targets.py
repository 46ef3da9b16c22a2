"""Which of the heads that peers told of is followed next.

In: (holder, manifest id) as they are told, failures, monotonic seconds. Out: the next to try, how long to wait for one.

Invariants: the table is bounded; each holder has one head in it, its newest; the leader's comes first, the others take
turns; who fails waits longer each time, the leader a second, so that nobody who tells of heads it does not give keeps
a node from those of others.
"""

from collections import OrderedDict

import msgspec

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
LEAST_S = 1e-3  # a wait shorter than the clock can tell would not be one
MAX_HOLDERS = 64


class Target(msgspec.Struct, frozen=True):
    """A head that somebody told of, and who: asked first for manifests and pieces."""

    manifest_id: bytes
    holder: str


class _Pause(msgspec.Struct, frozen=True):
    length_s: float
    until: float


class Targets:
    """Holds no clock."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, bytes] = OrderedDict()  # the longest waiting first
        self._pauses: OrderedDict[str, _Pause] = OrderedDict()

    def told(self, manifest_id: bytes, holder: str, leader: str) -> None:
        """`holder` has this head; of too many, the longest waiting one goes that is not the leader's."""
        self._told[holder] = manifest_id
        if len(self._told) > MAX_HOLDERS:
            del self._told[next(known for known in self._told if known not in (leader, holder))]

    def next(self, leader: str, now: float) -> Target | None:
        """The one to try now; it is taken out."""
        ready = [holder for holder in self._told if self._ready_at(holder) <= now]
        if not ready:
            return None
        holder = leader if leader in ready else ready[0]
        return Target(self._told.pop(holder), holder)

    def any_ready(self, now: float) -> bool:
        """Whether `next` would give one."""
        return any(self._ready_at(holder) <= now for holder in self._told)

    def is_ready(self, holder: str, now: float) -> bool:
        """Whether `next` could give a head of this holder."""
        return holder in self._told and self._ready_at(holder) <= now

    def wait_s(self, now: float) -> float | None:
        """Until one of those that failed may be tried again; None when there is none."""
        if not self._told:
            return None
        return max(LEAST_S, min(map(self._ready_at, self._told)) - now)

    def failed(self, target: Target, leader: str, now: float) -> None:
        """Tried again after a pause, unless its holder tells of another one before."""
        before = self._pauses.pop(target.holder, None)
        length_s = FIRST_PAUSE_S if before is None else min(2 * before.length_s, LONGEST_PAUSE_S)
        if target.holder == leader:
            length_s = FIRST_PAUSE_S
        self._pauses[target.holder] = _Pause(length_s, now + length_s)
        if len(self._pauses) > 4 * MAX_HOLDERS:
            self._pauses.popitem(last=False)
        if target.holder not in self._told:
            self.told(target.manifest_id, target.holder, leader)

    def done(self, target: Target) -> None:
        """Its holder gave what it told of."""
        self._pauses.pop(target.holder, None)

    def _ready_at(self, holder: str) -> float:
        pause = self._pauses.get(holder)
        return float("-inf") if pause is None else pause.until
