"""Who is in the swarm, who of them is alive, and where they can be dialled.

In: "this peer was heard", verified directory records, round-trip samples, paths; monotonic seconds. Out: the live set
that elections count, the records of known peers, addresses worth keeping on disk.

Invariants: a directory record never makes a peer alive (records outlive their peer), only `heard` does, and a peer that
gossips but answers no call is not live either: elections would wait for its vote for ever; the table is bounded; a
record of an older sequence, or of a boot that was already superseded, changes nothing.
"""

from enum import StrEnum

import msgspec

from p2prl.records import PeerInfo

RTT_WEIGHT = 0.2  # of a new sample in the moving average
KEPT_BOOTS = 4  # superseded boot ids remembered per peer


class MembershipRules(msgspec.Struct, frozen=True):
    alive_s: float = 5.0
    gone_s: float = 30.0
    forget_s: float = 3600.0  # a peer not heard for so long leaves the table, its addresses with it
    max_peers: int = 1024
    greet_after_s: float = 1.5  # so long without a word, and we call
    greet_least: int = 8  # called in each round, whoever was heard: clocks and round trips are measured by it
    greet_gone: int = 4  # of those that are gone, in turn
    mute_after: int = 2  # unanswered calls in a row, and it is not live, however much it gossips


class Liveness(StrEnum):
    ALIVE = "alive"
    SUSPECT = "suspect"
    GONE = "gone"


class Recorded(StrEnum):
    """What became of a directory record."""

    NEW = "new"  # first record of the peer
    UPDATED = "updated"
    OLD = "old"  # ignored: known or superseded
    FULL = "full"  # ignored: the table holds `max_peers` that are alive
    CLASH = "clash"  # our own peer id under another boot id: ping its address before believing it
    OWN = "own"


class Member(msgspec.Struct, frozen=True):
    """One peer as we know it. `path` is "direct", "relayed" or "" when unknown."""

    peer_id: str
    since: float  # first heard of, by whatever way
    heard_at: float | None = None
    info: PeerInfo | None = None
    rtt_s: float | None = None
    path: str = ""
    old_boots: tuple[bytes, ...] = ()
    num_unanswered: int = 0  # calls of ours in a row


class Membership:
    """The table of peers of one node. Holds no clock and no socket."""

    def __init__(self, me: str, boot_id: bytes, rules: MembershipRules | None = None) -> None:
        self.me = me
        self._boot_id = boot_id
        self._rules = rules or MembershipRules()
        self._members: dict[str, Member] = {}
        self.num_changes = 0  # of the records: who goes by them looks again when it has risen

    def heard(self, peer: str, now: float) -> bool:
        """A message or answer came from `peer`. True when it was not alive before."""
        if peer == self.me:
            return False
        member = self._member(peer, now)
        if member is None:
            return False
        was_alive = self._liveness(member, now) is Liveness.ALIVE
        self._members[peer] = msgspec.structs.replace(member, heard_at=now)
        return not was_alive

    def record(self, info: PeerInfo, now: float) -> Recorded:
        """A verified directory record, ours too."""
        if info.peer_id == self.me:
            return Recorded.OWN if info.boot_id == self._boot_id else Recorded.CLASH
        member = self._member(info.peer_id, now)
        if member is None:
            return Recorded.FULL
        known = member.info
        old_boots = member.old_boots
        if known is not None and known.boot_id == info.boot_id:
            if info.sequence <= known.sequence:
                return Recorded.OLD
        elif info.boot_id in old_boots:
            return Recorded.OLD
        elif known is not None:
            old_boots = (*old_boots, known.boot_id)[-KEPT_BOOTS:]
        self._members[info.peer_id] = msgspec.structs.replace(member, info=info, old_boots=old_boots)
        self.num_changes += 1
        return Recorded.NEW if known is None else Recorded.UPDATED

    def answered(self, peer: str, now: float) -> None:
        """A call of ours, whatever it was."""
        self.heard(peer, now)
        member = self._members.get(peer)
        if member is not None and member.num_unanswered:
            self._members[peer] = msgspec.structs.replace(member, num_unanswered=0)

    def unanswered(self, peer: str) -> None:
        """A call of ours ran into its deadline."""
        member = self._members.get(peer)
        if member is not None:
            self._members[peer] = msgspec.structs.replace(member, num_unanswered=member.num_unanswered + 1)

    def measured(self, peer: str, rtt_s: float, now: float) -> None:
        """A round trip that took `rtt_s`; the peer was heard by it."""
        self.answered(peer, now)
        member = self._members.get(peer)
        if member is not None and rtt_s >= 0:
            smooth = rtt_s if member.rtt_s is None else member.rtt_s + RTT_WEIGHT * (rtt_s - member.rtt_s)
            self._members[peer] = msgspec.structs.replace(member, rtt_s=smooth)

    def path(self, peer: str, path: str) -> None:
        """The connection to `peer` is "direct" or "relayed"; unknown peers are ignored."""
        member = self._members.get(peer)
        if member is not None:
            self._members[peer] = msgspec.structs.replace(member, path=path)

    def liveness(self, peer: str, now: float) -> Liveness:
        if peer == self.me:
            return Liveness.ALIVE
        member = self._members.get(peer)
        return Liveness.GONE if member is None else self._liveness(member, now)

    def live(self, now: float, within_s: float | None = None) -> frozenset[str]:
        """Peers heard in the last `within_s` (`alive_s` by default) that answer, and ourselves."""
        window_s = self._rules.alive_s if within_s is None else within_s
        heard = [
            m.peer_id
            for m in self._members.values()
            if m.heard_at is not None and now - m.heard_at <= window_s and m.num_unanswered < self._rules.mute_after
        ]
        return frozenset([self.me, *heard])

    def members(self) -> tuple[Member, ...]:
        """Every known peer but ourselves, by peer id."""
        return tuple(self._members[peer] for peer in sorted(self._members))

    def get(self, peer: str) -> Member | None:
        return self._members.get(peer)

    def infos(self) -> dict[str, PeerInfo]:
        """The newest directory record of each peer that has one, by peer id; without ours."""
        return {m.peer_id: m.info for m in self.members() if m.info is not None}

    def expire(self, now: float) -> tuple[str, ...]:
        """Forget who was not heard for `forget_s` (or never, since it was first heard of); returns whom."""
        lost = tuple(m.peer_id for m in self.members() if now - _last(m) > self._rules.forget_s)
        for peer in lost:
            del self._members[peer]
            self.num_changes += 1
        return lost

    def to_greet(self, now: float, round_number: int) -> tuple[str, ...]:
        """Whom to call in this round, the longest silent first, then some of the gone ones in turn.

        Who was heard of late needs no call: in a large swarm gossip and others' calls keep most of it alive.
        """
        rules, members = self._rules, self.members()
        here = [m for m in members if now - _last(m) <= rules.gone_s]
        here.sort(key=lambda m: (m.heard_at is not None, _last(m), m.peer_id))
        due = [m for i, m in enumerate(here) if i < rules.greet_least or now - _last(m) > rules.greet_after_s]
        gone = [m for m in members if now - _last(m) > rules.gone_s]
        turn = (round_number * rules.greet_gone) % max(1, len(gone))
        return tuple(m.peer_id for m in (*due, *[*gone, *gone][turn : turn + min(rules.greet_gone, len(gone))]))

    def good_addresses(self, limit: int = 32) -> tuple[str, ...]:
        """To save and dial at the next start: of peers that we heard ourselves, the last heard first, direct ones
        before relayed ones; one address of each before the second of any."""
        heard = [m for m in self.members() if m.heard_at is not None and m.info is not None]
        heard.sort(key=lambda m: (m.path == "relayed", -_last(m), m.peer_id))
        lists = [m.info.addresses for m in heard if m.info is not None]
        deepest = max((len(addresses) for addresses in lists), default=0)
        turns = [addresses[i] for i in range(deepest) for addresses in lists if i < len(addresses)]
        return tuple(dict.fromkeys(turns))[:limit]

    def _liveness(self, member: Member, now: float) -> Liveness:
        if member.heard_at is None or now - member.heard_at > self._rules.gone_s:
            return Liveness.GONE
        return Liveness.ALIVE if now - member.heard_at <= self._rules.alive_s else Liveness.SUSPECT

    def _member(self, peer: str, now: float) -> Member | None:
        """The peer's entry, made if there is room: whoever was never heard, then the longest silent, makes room."""
        member = self._members.get(peer)
        if member is not None:
            return member
        if len(self._members) >= self._rules.max_peers:
            weakest = min(self._members.values(), key=lambda m: (m.heard_at is not None, _last(m), m.peer_id))
            if self._liveness(weakest, now) is Liveness.ALIVE:
                return None
            del self._members[weakest.peer_id]
            self.num_changes += 1
        member = self._members[peer] = Member(peer, now)
        return member


def _last(member: Member) -> float:
    return member.since if member.heard_at is None else member.heard_at
