"""How far this clock is from the swarm's, and what that means for the node.

In: offsets by peer (ours minus theirs, seconds, each measured in one of our own calls). Out: a `Skew`.

Invariants: fewer than three peers that agree never stop a node, whatever they say, so that one or two liars can't; the
median decides, so a minority of liars is not even told of; no peer counts twice.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from statistics import median

import msgspec

MAX_SKEW_S = 3.0
WITNESSES = 3


class Judged(StrEnum):
    FINE = "fine"
    WARN = "warn"  # the median is beyond the limit, but too few peers say so
    OFF = "off"  # at least WITNESSES peers say so, and the median with them


class Skew(msgspec.Struct, frozen=True):
    """`offset_s` is the median, positive when this clock is ahead; `num_peers` say that it is beyond the limit."""

    kind: Judged
    offset_s: float = 0.0
    num_peers: int = 0

    @property
    def message(self) -> str:
        way = "ahead of" if self.offset_s > 0 else "behind"
        peers = "1 peer" if self.num_peers == 1 else f"{self.num_peers} peers"
        return f"this clock is {abs(self.offset_s):.1f} s {way} the swarm's, as {peers} tell (limit {MAX_SKEW_S:g} s)"


FIX = "set it by NTP (timedatectl set-ntp true)"


def offset(sent_at: float, received_at: float, theirs: float) -> float | None:
    """Ours minus theirs, from one call's unix times; None for a clock that is no time. Right to half the round trip."""
    if not math.isfinite(theirs) or abs(theirs) > 2**40:
        return None
    return (sent_at + received_at) / 2 - theirs


def judge(offsets: Mapping[str, float]) -> Skew:
    if not offsets:
        return Skew(Judged.FINE)
    middle = median(offsets.values())
    if abs(middle) <= MAX_SKEW_S:
        return Skew(Judged.FINE, middle)
    agreeing = sum(1 for value in offsets.values() if abs(value) > MAX_SKEW_S and (value > 0) == (middle > 0))
    return Skew(Judged.OFF if agreeing >= WITNESSES else Judged.WARN, middle, agreeing)
