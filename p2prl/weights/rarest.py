"""Which pieces are fetched from whom next: rarest first, over several streams, and the slow are relieved.

In: what holders have, what comes over the streams, what is verified, monotonic seconds. Out: actions: ask a peer what it
has, start a stream, stop one. Pure; holds no clock.

Invariants: at most `streams_per_holder` streams a holder and `streams` in all; a verified piece is never fetched again; a
piece is in a second stream (or third) only when the holders before would take much longer than the next one for all of
it; what a stream that ended did not bring is free for others. Who is done takes over what waits at others.

A stream is long (its share of all that is missing): over a line with delay each new one starts slowly. All streams begin
at the rarest pieces and go on side by side, so that the file grows from its beginning where all are equally rare; that
different peers get different pieces first is the server's care (`spare.py`).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import msgspec

from p2prl.records import Content
from p2prl.weights.holders import Holder, HolderRules, Holders
from p2prl.weights.messages import MAX_ASKED, piece_bytes
from p2prl.weights.streams import PieceStream


class Rules(msgspec.Struct, frozen=True):
    holders: HolderRules = HolderRules()
    streams_per_holder: int = 2
    streams: int = 8
    streams_per_piece: int = 3
    hold_s: float = 0.3  # for the answers of others before the first stream starts
    takeover: float = 1.5  # so many times longer than the other would take
    takeover_s: float = 0.3  # and so much on top: not for what is nearly here
    silent_s: float = 1.5  # without a byte: then another one tries, where nobody knows yet how long a piece takes
    patience_s: float = 10.0  # without a byte of anybody
    longest_patience_s: float = 120.0  # the same, while holders answer that we come later


class Ask(msgspec.Struct, frozen=True):
    """Call `have`."""

    peer: str


class Start(msgspec.Struct, frozen=True):
    """Open a stream for these pieces, and name those of no use for them."""

    stream: int
    peer: str
    indexes: tuple[int, ...]
    without: tuple[str, ...]


class Stop(msgspec.Struct, frozen=True):
    stream: int


Action = Ask | Start | Stop


class Board:
    """One transfer. The driver reports events, then does what `decide` says."""

    def __init__(
        self,
        content: Content,
        done: Iterable[int],
        holders: Holders,
        rules: Rules,
        now: float,
    ) -> None:
        num_pieces = len(content.pieces)
        self._content_bytes, self._rules = content.content_bytes, rules
        self.holders = holders
        self._missing = set(range(num_pieces)) - set(done)  # neither verified nor being verified
        self._checking: set[int] = set()
        self._streams: dict[int, PieceStream] = {}
        self._next_stream = 0
        self._began: float | None = None  # when the first holder answered
        self._is_open = False
        self._moved = now  # when the last byte came
        self._busy: float | None = None
        self._stops: list[Action] = []

    @property
    def is_done(self) -> bool:
        return not self._missing and not self._checking

    @property
    def num_senders(self) -> int:
        """Peers that streams run from."""
        return len({found.peer for found in self._streams.values()})

    # -- events -----------------------------------------------------------------------------------------------------

    def answered(self, peer: str, have: frozenset[int], now: float) -> None:
        self.holders.answered(peer, have, now, hungry=not self._streams)
        if have and self._began is None:
            self._began = now

    def heads(self, stream: int, index: int, now: float) -> bool:
        """A piece begins; False when nobody waits for it there any more: close that stream."""
        found = self._streams.get(stream)
        if found is None or index not in found.expected or index not in self._missing:
            return False
        found.heads(index, now)
        return True

    def moved(self, stream: int, num_bytes: int, now: float) -> None:
        found = self._streams[stream]
        found.moved = self._moved = now
        found.num_bytes += num_bytes
        found.total_bytes += num_bytes

    def busy(self, stream: int, index: int, ask: Sequence[str], now: float) -> None:
        found = self._streams[stream]
        found.expected.discard(index)
        found.current = None
        self._busy = now
        self.holders.busy(found.peer, index, now)
        self.holders.offer(ask, now, named=True)

    def checking(self, stream: int, now: float) -> None:
        """All of the current piece came; it is being verified."""
        found = self._streams[stream]
        index = found.ends(now)
        if index in self._missing:  # else another stream's is being verified, or was the right one
            self._missing.discard(index)
            self._checking.add(index)
        holder, speed = self.holders[found.peer], found.mean_speed(now)
        holder.speed = speed if holder.speed == 0.0 else 0.5 * (holder.speed + speed)

    def verified(self, peer: str, index: int, now: float) -> None:
        """Whoever still sends it is too late."""
        self._checking.discard(index)
        self._missing.discard(index)
        self.holders.gave(peer, index, now)
        for stream, found in self._streams.items():
            if index in found.expected:
                self.holders[found.peer].num_slow += 1
                found.expected.discard(index)
                if found.current == index or not found.expected:
                    self._stops.append(Stop(stream))

    def corrupt(self, peer: str, index: int) -> None:
        """The piece it gave is not the right one: nothing more from this peer."""
        if index in self._checking:
            self._checking.discard(index)
            self._missing.add(index)
        self.holders[peer].is_corrupt = True
        self._stops += [Stop(stream) for stream, found in self._streams.items() if found.peer == peer]

    def expects(self, stream: int) -> bool:
        """Some of the pieces that were asked for in this stream are still to come in it."""
        return bool(self._streams[stream].expected)

    def ended(self, stream: int, now: float, *, failed: bool) -> None:
        found = self._streams.pop(stream)
        if failed:
            self.holders.failed(found.peer, now)

    def hopeless(self, now: float) -> bool:
        """Nobody is of any use, or nothing comes any more."""
        if self._streams or self._checking:
            return False
        if self.holders.all_failed(1 if self._began is None else self._rules.holders.failures):
            return True
        is_told_to_wait = self._busy is not None and now - self._busy <= self._rules.patience_s
        patience_s = self._rules.longest_patience_s if is_told_to_wait else self._rules.patience_s
        return now - self._moved > patience_s

    # -- decisions --------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Action]:
        actions, self._stops = self._stops, []
        asked = self.holders.to_ask(now)
        actions += [Ask(peer) for peer in asked]
        if not self._is_open:
            waits = self.holders.any_asked() and (self._began is None or now - self._began < self._rules.hold_s)
            self._is_open = self._began is not None and not waits
        if self._is_open:
            actions += self._starts(now)
        return actions

    def _starts(self, now: float) -> list[Action]:
        rules, usable = self._rules, self.holders.usable(now)
        num_slots = max(1, min(rules.streams, rules.streams_per_holder * len(usable)))
        pool = self._pool()
        share = -(-len(pool) // num_slots)
        counts = _rarity(pool, usable)
        starts: list[Action] = []
        idle = list(usable)
        while idle and len(self._streams) < rules.streams:
            idle = [holder for holder in idle if self._num_streams(holder) < rules.streams_per_holder]
            idle.sort(key=self._preference)
            if not idle:
                break
            holder = idle[0]
            chosen = self._fresh(holder, pool, counts, share, usable, now) or self._taken_over(holder, usable, now)
            if not chosen:
                idle.remove(holder)
                continue
            pool -= set(chosen)
            starts.append(self._start(holder, chosen, now))
        return starts

    def _preference(self, holder: Holder) -> tuple[float, ...]:
        return self.holders.is_slow(holder), holder.num_slow, self._num_streams(holder), -holder.speed

    def _pool(self) -> set[int]:
        """What is missing and waits in no stream."""
        return self._missing.difference(*(found.expected for found in self._streams.values()))

    def _fresh(
        self,
        holder: Holder,
        pool: set[int],
        counts: Counter[int],
        share: int,
        usable: Sequence[Holder],
        now: float,
    ) -> list[int]:
        """Its share of what nobody fetches yet, the rarest first; all of what it was too busy for before."""
        free = self._allowed(holder, pool, usable, now)
        first = free - holder.refused
        ordered = sorted(first or free, key=lambda index: (counts[index], index))
        if not first:
            return ordered[:MAX_ASKED]
        return ordered[:: -(-len(ordered) // min(share, MAX_ASKED))]

    def _allowed(self, holder: Holder, pieces: Collection[int], usable: Sequence[Holder], now: float) -> set[int]:
        """What it gives us of `pieces`; a slow one only what no good one has."""
        free = self.holders.free(holder, pieces, now)
        if self.holders.is_slow(holder):
            free = free.difference(*(other.have or () for other in usable if not self.holders.is_slow(other)))
        return free

    def _taken_over(self, holder: Holder, usable: Sequence[Holder], now: float) -> list[int]:
        """Part of what waits at the holder that needs longest; else the piece that comes slowest, as well."""
        streams = self._streams.values()
        others = [each for each in streams if each.peer != holder.peer and each.next_of(self._missing) is not None]
        others.sort(key=lambda found: found.left_s(now), reverse=True)
        for found in others:
            waiting = self._missing & found.expected - {found.next_of(self._missing)}
            waiting = self._allowed(holder, waiting, usable, now)
            if waiting and found.left_s(now) > self._rules.takeover_s:
                its_speed = found.speed(now)
                part = (holder.speed or its_speed) / ((holder.speed or its_speed) + its_speed)
                num_taken = max(1, min(MAX_ASKED, round(part * len(waiting))))
                taken = sorted(waiting)[-num_taken:]
                found.expected -= set(taken)
                return taken
        for found in others:
            index = found.next_of(self._missing)
            if index is not None and self._allowed(holder, {index}, usable, now):
                speed = holder.speed or self._mean_speed(usable)
                own_s = piece_bytes(self._content_bytes, index) / speed if speed else None
                if self._are_late(index, own_s, now):
                    return [index]
        return []

    def _are_late(self, index: int, own_s: float | None, now: float) -> bool:
        """All that fetch this piece will take much longer than `own_s` (None, unknown: are silent) and are not too many."""
        rules = self._rules
        rivals = [found for found in self._streams.values() if index in found.expected]
        if own_s is None:
            late = all(now - found.moved > rules.silent_s for found in rivals)
        else:
            limit_s = rules.takeover * own_s + rules.takeover_s
            late = all(found.piece_left_s(index, now) > limit_s for found in rivals)
        return late and len(rivals) < rules.streams_per_piece

    def _start(self, holder: Holder, chosen: list[int], now: float) -> Start:
        stream, self._next_stream = self._next_stream, self._next_stream + 1
        self._streams[stream] = PieceStream(holder.peer, set(chosen), self._content_bytes, now, now, now)
        self.holders.begged(holder.peer, now)
        return Start(stream, holder.peer, tuple(chosen), tuple(self.holders.useless_for(chosen, self._moved, now)))

    def _num_streams(self, holder: Holder) -> int:
        return sum(found.peer == holder.peer for found in self._streams.values())

    def _mean_speed(self, usable: Sequence[Holder]) -> float:
        speeds = [holder.speed for holder in usable if holder.speed and not self.holders.is_slow(holder)]
        return sum(speeds) / len(speeds) if speeds else 0.0


def _rarity(pool: Collection[int], holders: Iterable[Holder]) -> Counter[int]:
    """How many holders have each piece of the pool."""
    counts: Counter[int] = Counter()
    for holder in holders:
        counts.update((holder.have or frozenset()).intersection(pool))
    return counts
