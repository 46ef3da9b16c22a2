"""Who may have pieces of one content: who is asked when, who is left out, and for how long.

In: peers that may hold it, their answers, their faults, monotonic seconds. Out: whom to ask now, who serves what. Pure;
holds no clock.

Invariants: at most `tracked` peers are watched, and as many again that others named; who fails is left alone longer each
time; who served a wrong piece is never asked again; who is slow serves only what nobody else has. Both are remembered
for the content beyond one attempt. Once we starve, whoever has pieces and gives us none is named useless like the dead.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

import msgspec

from p2prl.weights.messages import MAX_NAMED

MAX_REMEMBERED = 64


class HolderRules(msgspec.Struct, frozen=True):
    tracked: int = 12
    refresh_s: float = 1.0  # between two looks at what a peer has that doesn't have all
    hungry_s: float = 0.3  # the same while nothing comes in
    complete_s: float = 10.0  # the same of one that has all
    pause_s: float = 0.5  # after a failure, doubled with each
    longest_pause_s: float = 30.0
    busy_s: float = 0.2  # until a busy holder is asked again for what it refused, doubled with each refusal
    longest_busy_s: float = 1.0
    slow_strikes: int = 2  # pieces that another had to take over, until it counts as slow
    failures: int = 3  # in a row, until it counts as slow
    few: int = 2  # are asked at a time for a small content, as asking all would cost more than it
    silent_s: float = 1.0  # without an answer: then another one is asked
    starved_s: float = 30.0  # without a byte of anybody, though they were asked: as long as a learner is patient
    dripped_s: float = 60.0  # the same without a right piece: the honest with slow lines are not to be named


class Holder(msgspec.Struct):
    peer: str
    have: frozenset[int] | None = None  # None: it has not answered yet
    is_corrupt: bool = False
    num_slow: int = 0
    num_failures: int = 0  # in a row
    is_named: bool = False  # by one that has it
    is_asked: bool = False
    asked_at: float = 0.0
    ask_at: float = 0.0
    parked_until: float = 0.0
    speed: float = 0.0  # bytes a second of one stream, 0 while unknown
    refused: set[int] = msgspec.field(default_factory=set)  # pieces that it has, and was too busy for
    refused_until: float = 0.0
    refused_s: float = 0.0  # the last pause after a refusal
    owes_since: float | None = None  # when it was first asked for pieces, or gave the last one


class Remembered:
    """What holders did wrong, by content: one for all transfers of a node."""

    def __init__(self) -> None:
        self._contents: OrderedDict[bytes, dict[str, Holder]] = OrderedDict()  # the oldest first

    def of(self, content_hash: bytes) -> dict[str, Holder]:
        """The holders of a content, as the last attempt left them."""
        holders = self._contents.setdefault(content_hash, {})
        self._contents.move_to_end(content_hash)
        if len(self._contents) > MAX_REMEMBERED:
            self._contents.popitem(last=False)
        return holders

    def forget(self, content_hash: bytes) -> None:
        """It is here now."""
        self._contents.pop(content_hash, None)


class Holders:
    """The holders of one content, by peer. `me` is never asked; for a small content only a few are at a time."""

    def __init__(
        self, me: str, num_pieces: int, known: dict[str, Holder], rules: HolderRules, *, is_small: bool = False
    ) -> None:
        self._me, self._num_pieces, self._rules, self._is_small = me, num_pieces, rules, is_small
        self._known = known
        self._asks: list[float] = []  # of a small content, the last ones
        self._fed_at: float | None = None  # when we first asked for pieces, or got the last one
        for holder in known.values():  # of the last attempt: only what they did wrong counts
            known[holder.peer] = Holder(holder.peer, is_corrupt=holder.is_corrupt, num_slow=holder.num_slow)

    def __getitem__(self, peer: str) -> Holder:
        """Also of one that made room while a stream of it still ran: what it does then counts."""
        return self._known.setdefault(peer, Holder(peer))

    def offer(self, peers: Iterable[str], now: float, *, named: bool = False) -> None:
        """Peers that may have it, the likeliest first; `named` by one that has. Useless ones make room."""
        most = self._rules.tracked * (2 if named else 1)
        for peer in peers:
            holder = self._known.get(peer)
            if holder is not None:
                holder.is_named |= named
                if named and not holder.is_asked:
                    holder.ask_at = min(holder.ask_at, max(now, holder.parked_until))
                continue
            if peer == self._me:
                continue
            if len(self._watched()) >= most and not self._drop_one(now):
                return
            self._known[peer] = Holder(peer, is_named=named)

    def to_ask(self, now: float) -> list[str]:
        """Whom to ask now what it has; they count as asked until they answered or failed."""
        due = [h for h in self._watched() if not h.is_asked and h.ask_at <= now and h.parked_until <= now]
        if self._is_small:
            due = self._few(due, now)
        for holder in due:
            holder.is_asked, holder.asked_at = True, now
        return [holder.peer for holder in due]

    def _few(self, due: list[Holder], now: float) -> list[Holder]:
        """Those that others named, and so many more that a few are asked or serve it; those that have not answered first."""
        rules = self._rules
        self._asks = [at for at in self._asks if now - at < rules.hungry_s]
        num_hopeful = sum(self._is_hopeful(holder, now) for holder in self._watched())
        due.sort(key=lambda holder: (not holder.is_named, holder.have is not None, holder.ask_at))
        num_named = sum(holder.is_named and holder.have is None for holder in due)
        chosen = due[: max(num_named, rules.few - max(num_hopeful, len(self._asks)))]
        self._asks += [now for holder in chosen if not holder.is_named]
        return chosen

    def _is_hopeful(self, holder: Holder, now: float) -> bool:
        """It may answer, or give us something now."""
        if holder.is_asked:
            return now - holder.asked_at < self._rules.silent_s
        is_free = holder.parked_until <= now and holder.refused_until <= now
        return bool(holder.have) and is_free and not self.is_slow(holder)

    def answered(self, peer: str, have: frozenset[int], now: float, *, hungry: bool) -> None:
        holder, rules = self[peer], self._rules
        holder.is_asked, holder.have = False, have
        every_s = rules.hungry_s if hungry else rules.refresh_s
        holder.ask_at = now + (rules.complete_s if len(have) == self._num_pieces else every_s)

    def failed(self, peer: str, now: float) -> None:
        """It did not answer, or its stream broke."""
        holder, rules = self[peer], self._rules
        holder.is_asked = False
        holder.num_failures += 1
        self._asks = self._asks[1:]  # it cost nothing, and says nothing
        pause_s = min(rules.pause_s * 2 ** (holder.num_failures - 1), rules.longest_pause_s)
        holder.parked_until = max(holder.parked_until, now + pause_s)
        holder.ask_at = holder.parked_until

    def begged(self, peer: str, now: float) -> None:
        """It was asked for pieces."""
        holder = self[peer]
        holder.owes_since = now if holder.owes_since is None else holder.owes_since
        self._fed_at = now if self._fed_at is None else self._fed_at

    def busy(self, peer: str, index: int, now: float) -> None:
        """It has the piece, but not for us now; all that it refuses is asked for again together."""
        holder, rules = self[peer], self._rules
        holder.refused.add(index)
        if holder.refused_until <= now:
            holder.refused_s = min(max(2 * holder.refused_s, rules.busy_s), rules.longest_busy_s)
            holder.refused_until = now + holder.refused_s

    def gave(self, peer: str, index: int, now: float) -> None:
        """A right piece."""
        holder = self[peer]
        holder.num_failures, holder.refused_s = 0, 0.0
        holder.owes_since = self._fed_at = now
        holder.refused.discard(index)

    def usable(self, now: float) -> list[Holder]:
        """Those that serve something, the good ones before the slow ones."""
        serving = [h for h in self._watched() if h.have and h.parked_until <= now]
        return sorted(serving, key=self.is_slow)

    def is_slow(self, holder: Holder) -> bool:
        rules = self._rules
        return holder.num_slow >= rules.slow_strikes or holder.num_failures >= rules.failures

    def free(self, holder: Holder, pieces: Collection[int], now: float) -> set[int]:
        """Those of `pieces` that it gives us now."""
        assert holder.have is not None
        found = holder.have.intersection(pieces)
        return set(found - holder.refused if holder.refused_until > now else found)

    def useless_for(self, pieces: Collection[int], moved_at: float, now: float) -> Sequence[str]:
        """Peers that gave us none of these: they failed, or have none of them. Once we starve, who gives none; and we.

        `moved_at`: when the last byte came.
        """
        useless = [
            h.peer
            for h in self._known.values()
            if h.is_corrupt or self.is_slow(h) or h.num_failures or (h.have is not None and h.have.isdisjoint(pieces))
        ]
        if self._starves(moved_at, now):
            long_ago = now - self._rules.starved_s
            owing = [h.peer for h in self._known.values() if h.owes_since is not None and h.owes_since <= long_ago]
            useless = [*(peer for peer in useless if peer not in owing), *owing, self._me]
        return useless[-MAX_NAMED:]

    def _starves(self, moved_at: float, now: float) -> bool:
        rules, fed_at = self._rules, self._fed_at
        if fed_at is None:
            return False
        return now - max(fed_at, moved_at) >= rules.starved_s or now - fed_at >= rules.dripped_s

    def any_asked(self) -> bool:
        """Somebody may still answer."""
        return any(holder.is_asked for holder in self._known.values())

    def all_failed(self, times: int) -> bool:
        """Nobody is left who didn't fail so often in a row or serve something false."""
        return all(h.is_corrupt or (h.num_failures >= times and not h.is_asked) for h in self._known.values())

    def _watched(self) -> list[Holder]:
        return [holder for holder in self._known.values() if not holder.is_corrupt]

    def _drop_one(self, now: float) -> bool:
        for holder in self._watched():
            is_useless = holder.num_failures > 1 or holder.have == frozenset()
            if is_useless and not holder.is_asked and not holder.num_slow and holder.ask_at <= now:
                del self._known[holder.peer]
                return True
        return False
