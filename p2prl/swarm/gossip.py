"""Which announced groups we know, want, are pulling and hold.

In: verified announcements, digests, results of pulls; monotonic seconds. Out: headers that are new, pulls to make
grouped by the peer to ask, the prefixes of what we know.

Invariants: a group is new once, however often it is announced; every table is bounded, for each teller too, and who
tells most makes room first, so that one peer can't push out the others' groups, not in another maker's name either; of
what one peer told few bodies are on their way at once and tellers take turns, so that a peer which answers nothing
holds up nobody else's; a peer that announces another's group id only adds a source to ask, it can't hide it; a body is
asked of one source at a time, and given up after `max_attempts`.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable

import msgspec

from p2prl.records import Announcement, GroupHeader

PREFIX_BYTES = 8  # of an id in a digest: two of a million ids collide with a chance of 3e-8


class GossipRules(msgspec.Struct, frozen=True):
    max_groups: int = 8192  # known and neither trained nor forgotten
    max_per_teller: int = 512
    max_asked: int = 32  # bodies on their way of what one peer told
    max_sources: int = 8  # peers to ask for one group
    max_done: int = 65536  # ids remembered after they were trained or forgotten
    pull_s: float = 15.0  # a pull that did not end by then failed
    backoff_s: float = 0.5  # after the first failure, doubled with each
    max_backoff_s: float = 30.0
    max_attempts: int = 8
    batch: int = 16  # groups in one request


class Pull(msgspec.Struct, frozen=True):
    """Ask `peer` for the bodies of these groups in one stream."""

    peer: str
    headers: tuple[GroupHeader, ...]


class _Entry:
    """One known group: who claims or holds it and how far we are with its body."""

    __slots__ = (
        "asked",
        "attempts",
        "deadline",
        "given_up",
        "have",
        "header",
        "heard_at",
        "maker",
        "next_at",
        "sources",
        "teller",
    )

    def __init__(self, header: GroupHeader, maker: str, teller: str, now: float) -> None:
        self.header = header
        self.maker = maker
        self.teller = teller  # in whose share of the table it is: its maker's, once that told of it
        self.heard_at = now
        self.sources: dict[str, int] = {maker: 0}  # -> failures with it
        self.have = False
        self.given_up = False
        self.attempts = 0
        self.next_at = 0.0
        self.asked = ""
        self.deadline = 0.0


class Wanted:
    """The announced groups of one node. Holds no clock and no socket."""

    def __init__(self, rules: GossipRules | None = None) -> None:
        self._rules = rules or GossipRules()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # the longest known first
        self._by_teller: dict[str, OrderedDict[bytes, None]] = {}
        self._done: OrderedDict[bytes, None] = OrderedDict()
        self._asked: dict[bytes, None] = {}  # those on their way, and some that came since

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, group_id: object) -> bool:
        """Known, also when trained or forgotten."""
        return group_id in self._entries or group_id in self._done

    def heard(self, announcement: Announcement, now: float) -> tuple[GroupHeader, ...]:
        """The headers that are new to us, for counting and relaying."""
        return self._learn(announcement.maker, announcement.headers, now, announcement.maker)

    def told(self, holder: str, maker: str, headers: Iterable[GroupHeader], now: float) -> tuple[GroupHeader, ...]:
        """As `heard`, of `maker`'s groups that `holder` named in a digest exchange: asked where the maker fails."""
        return self._learn(maker, headers, now, holder)

    def holds(self, peer: str, group_id: bytes) -> None:
        """`peer` serves the body too."""
        entry = self._entries.get(group_id)
        if entry is not None and len(entry.sources) < self._rules.max_sources:
            entry.sources.setdefault(peer, 0)

    def own(self, maker: str, header: GroupHeader, now: float) -> None:
        """A group that we made or already hold (after a restart): known, nothing to pull."""
        self._learn(maker, (header,), now, maker)
        self.have(header.id)

    def have(self, group_id: bytes) -> None:
        """Its body was pulled and verified."""
        entry = self._entries.get(group_id)
        if entry is not None:
            entry.have = True
            entry.asked = ""

    def failed(self, group_id: bytes, peer: str, now: float) -> bool:
        """`peer` did not give the body that it was asked for. True when we give the group up."""
        entry = self._entries.get(group_id)
        if entry is None or entry.have or entry.asked != peer:
            return False
        return self._fail(entry, now)

    def to_pull(self, now: float, want: bool, limit: int) -> tuple[Pull, ...]:
        """Pulls to start now, with at most `limit` bodies on their way in all; those of the newest versions first.

        A node that trains or audits nothing (`want` False) pulls nothing.
        """
        for group_id in tuple(self._asked):
            entry = self._entries.get(group_id)
            if entry is None or not entry.asked:
                del self._asked[group_id]
            elif now >= entry.deadline:
                del self._asked[group_id]
                self._fail(entry, now)
        if not want:
            return ()
        room = limit - len(self._asked)
        ready = [e for e in self._entries.values() if not (e.have or e.given_up or e.asked) and now >= e.next_at]
        ready.sort(key=lambda e: (-e.header.version.step, e.heard_at, e.header.id))
        batches: dict[str, list[GroupHeader]] = {}
        for entry in self._in_turns(ready)[: max(0, room)]:
            # The maker first; who failed least next; ties by the order in which they were learnt.
            peer = min(entry.sources, key=entry.sources.__getitem__)
            entry.asked = peer
            self._asked[entry.header.id] = None
            entry.deadline = now + self._rules.pull_s
            batches.setdefault(peer, []).append(entry.header)
        size = self._rules.batch
        return tuple(
            Pull(peer, tuple(headers[i : i + size]))
            for peer, headers in batches.items()
            for i in range(0, len(headers), size)
        )

    def _in_turns(self, ready: list[_Entry]) -> list[_Entry]:
        """The first of each teller, then the second of each, as far as each one's share of bodies on their way goes."""
        asked = Counter(self._entries[group_id].teller for group_id in self._asked)
        turns: list[tuple[int, _Entry]] = []
        for entry in ready:
            if asked[entry.teller] < self._rules.max_asked:
                turns.append((asked[entry.teller], entry))
                asked[entry.teller] += 1
        return [entry for _, entry in sorted(turns, key=lambda turn: turn[0])]

    def forget(self, group_ids: Iterable[bytes]) -> None:
        """Trained, refused or past max age: not pulled, not in digests, not new again."""
        for group_id in group_ids:
            self._drop(group_id)
            self._mark_done(group_id)

    def reopen(self, group_ids: Iterable[bytes]) -> None:
        """Groups of a losing branch: they count as new again when they are announced again."""
        for group_id in group_ids:
            self._done.pop(group_id, None)

    def expire(self, now: float, max_age_s: float, min_step: int = 0) -> tuple[bytes, ...]:
        """Forget what was announced longer than `max_age_s` ago or drawn before version step `min_step`."""
        old = tuple(
            group_id
            for group_id, entry in self._entries.items()
            if now - entry.heard_at > max_age_s or entry.header.version.step < min_step
        )
        self.forget(old)
        return old

    def known(self) -> tuple[tuple[str, GroupHeader], ...]:
        """(maker, header) of each group that is neither trained nor forgotten, the longest known first."""
        return tuple((entry.maker, entry.header) for entry in self._entries.values())

    def held(self) -> tuple[tuple[str, GroupHeader], ...]:
        """(maker, header) of each group whose body we have: what we can offer in a digest exchange."""
        return tuple((entry.maker, entry.header) for entry in self._entries.values() if entry.have)

    def num_waiting(self) -> int:
        """Bodies that we still hope for: the length of this queue."""
        return sum(1 for entry in self._entries.values() if not (entry.have or entry.given_up))

    def _learn(self, maker: str, headers: Iterable[GroupHeader], now: float, source: str) -> tuple[GroupHeader, ...]:
        new = []
        for header in headers:
            entry = self._entries.get(header.id)
            if entry is not None:
                self._another_source(entry, header, source, now)
                continue
            if header.id in self._done:
                continue
            entry = _Entry(header, maker, source, now)
            entry.sources.setdefault(source, 0)
            self._entries[header.id] = entry
            self._charge(entry)
            new.append(header)
        return tuple(new)

    def _charge(self, entry: _Entry) -> None:
        """Put it into its teller's share; what is over the bounds goes, of who told most, the longest known first."""
        told = self._by_teller.setdefault(entry.teller, OrderedDict())
        told[entry.header.id] = None
        if len(told) > self._rules.max_per_teller:
            self.forget([next(iter(told))])
        elif len(self._entries) > self._rules.max_groups:
            most = max(self._by_teller.values(), key=len)
            self._drop(next(iter(most)))  # not for good: its maker says again that it waits

    def _uncharge(self, entry: _Entry) -> None:
        told = self._by_teller[entry.teller]
        told.pop(entry.header.id, None)
        if not told:
            del self._by_teller[entry.teller]

    def _another_source(self, entry: _Entry, header: GroupHeader, source: str, now: float) -> None:
        if source == entry.maker != entry.teller:  # its own word for what another told of it
            self._uncharge(entry)
            entry.teller, entry.header = source, header
            self._charge(entry)
        if source in entry.sources or len(entry.sources) >= self._rules.max_sources:
            return
        entry.sources[source] = 0
        if entry.given_up:  # somebody else has it: one more try
            entry.given_up = False
            entry.attempts = self._rules.max_attempts - 1
            entry.next_at = now

    def _fail(self, entry: _Entry, now: float) -> bool:
        entry.sources[entry.asked] = entry.sources.get(entry.asked, 0) + 1
        entry.asked = ""
        entry.attempts += 1
        entry.given_up = entry.attempts >= self._rules.max_attempts
        untried = any(failures == 0 for failures in entry.sources.values())
        pause_s = min(self._rules.backoff_s * 2 ** min(entry.attempts - 1, 16), self._rules.max_backoff_s)
        entry.next_at = now if untried else now + pause_s
        return entry.given_up

    def _drop(self, group_id: bytes) -> None:
        entry = self._entries.pop(group_id, None)
        if entry is not None:
            self._uncharge(entry)

    def _mark_done(self, group_id: bytes) -> None:
        self._done[group_id] = None
        self._done.move_to_end(group_id)
        while len(self._done) > self._rules.max_done:
            self._done.popitem(last=False)


def digest(group_ids: Iterable[bytes]) -> tuple[bytes, ...]:
    """The sorted prefixes of what we know, for a peer to compare with what it holds."""
    return tuple(sorted({group_id[:PREFIX_BYTES] for group_id in group_ids}))


def missing(headers: Iterable[GroupHeader], prefixes: Iterable[bytes]) -> tuple[GroupHeader, ...]:
    """Those of our headers that a peer with this digest does not know."""
    known = frozenset(prefixes)
    return tuple(header for header in headers if header.id[:PREFIX_BYTES] not in known)
