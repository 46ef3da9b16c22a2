"""How an upload is spared: each piece goes to a few peers at once, who pass it on; a learner gives few copies in all.

In: who asks for which piece and whom they found useless, what was sent, monotonic seconds. Out: serve it, or whom to
ask instead. Pure; holds no clock.

Invariants: a learner gives a piece to at most `copies` peers as long as these serve it or still may: one on its way
counts while it moves, one given counts until somebody says that its owner does not serve it. Nobody waits for the dead
for longer than `stall_s` or the settling time, nor for who takes it slowly for longer than `slow_s`, nor at all for who
takes it again; nor for anybody for longer than `patience_s`, once those we named turned out to be of no use; nor at all
for longer than `longest_s`, where nobody gives it anything. A peer counts once however many streams it opens. The table
is bounded by contents and by rows (a piece, a copy or who waits for one).

Few at once is faster for all: at a line's whole rate a first peer has a piece, and passes it on, before an equal share
of the line would have given it to anybody.
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable

import msgspec

MAX_CONTENTS = 512
MAX_ROWS = 2**17  # about 30 MB


class SpareRules(msgspec.Struct, frozen=True):
    copies: int | None = None  # of a piece, in all
    piece_at_once: int = 2  # copies of one piece on their way
    peers_at_once: int = 4  # who get pieces of one content
    stall_s: float = 10.0  # a copy on its way that moves nothing for so long is none
    slow_s: float = 15.0  # one that takes longer makes nobody wait
    patience_s: float = 30.0  # that one waits for who took it and does not serve it, one after the other
    longest_s: float = 90.0  # that one waits who starves, whomever it names: those who do not serve may be many
    settle_s: float = 3.0  # the least time that a peer has from the last byte until it serves what it was given


LEARNER = SpareRules(copies=3, piece_at_once=1, peers_at_once=3)
HOLDER = SpareRules()


class Answer(msgspec.Struct, frozen=True):
    """Serve it; else `ask` these, who have it or get it."""

    serve: bool
    ask: tuple[str, ...] = ()


class _Copy(msgspec.Struct):
    began: float
    moved: float
    given_at: float | None = None
    is_again: bool = False


class _Piece(msgspec.Struct):
    """`refused`: who waits for it, and since when."""

    copies: dict[str, _Copy] = msgspec.field(default_factory=dict)
    refused: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return 1 + len(self.copies) + len(self.refused)


class Spare:
    """The copies that we gave, by content and piece."""

    def __init__(self) -> None:
        self._contents: OrderedDict[bytes, dict[int, _Piece]] = OrderedDict()  # the longest unasked first
        self._num_rows = 0

    def order(self, content: bytes, indexes: Iterable[int]) -> list[int]:
        """What the fewest have from us first."""
        pieces = self._of(content)
        return sorted(indexes, key=lambda index: len(pieces[index].copies) if index in pieces else 0)

    def ask(
        self, rules: SpareRules, content: bytes, index: int, peer: str, without: Collection[str], now: float
    ) -> Answer:
        """Whether `peer`, who got nothing from those `without`, gets this piece now; one that starves is among them."""
        pieces, piece = self._of(content), self._piece(content, index)
        copies = {other: copy for other, copy in piece.copies.items() if other != peer}
        useful = tuple(other for other, copy in copies.items() if _is_useful(rules, other, copy, without, now))
        on_their_way = [other for other, copy in copies.items() if _is_on_its_way(rules, copy, now)]
        busy_with = {
            other
            for one in pieces.values()
            for other, copy in one.copies.items()
            if other != peer and _is_on_its_way(rules, copy, now)
        }
        enough = rules.copies is not None and len(useful) >= rules.copies
        full = len(on_their_way) >= rules.piece_at_once or len(busy_with) >= rules.peers_at_once
        waited_s = now - piece.refused.get(peer, now)
        in_vain = waited_s >= rules.patience_s and {*useful, *on_their_way} <= set(without)
        starves = waited_s >= rules.longest_s and peer in without
        if in_vain or starves or not (enough or full):
            return Answer(True)
        if peer not in piece.refused:
            piece.refused[peer] = now
            self._grew(content)
        return Answer(False, useful)

    def begin(self, content: bytes, index: int, peer: str, now: float) -> None:
        """A copy for `peer` is on its way."""
        piece = self._piece(content, index)
        before = piece.num_rows
        piece.refused.pop(peer, None)
        piece.copies[peer] = _Copy(now, now, is_again=peer in piece.copies)
        self._grew(content, piece.num_rows - before)

    def moved(self, content: bytes, index: int, peer: str, now: float) -> None:
        copy = self._copy(content, index, peer)
        if copy is not None:
            copy.moved = now

    def end(self, content: bytes, index: int, peer: str, now: float, *, whole: bool) -> None:
        """All of it was sent; else it is no copy, but what comes of it is known."""
        copy = self._copy(content, index, peer)
        if copy is not None:
            copy.given_at = now if whole else copy.given_at
            copy.moved = now if whole else -math.inf

    def _piece(self, content: bytes, index: int) -> _Piece:
        pieces = self._of(content)
        if index not in pieces:
            pieces[index] = _Piece()
            self._grew(content)
        return pieces[index]

    def _copy(self, content: bytes, index: int, peer: str) -> _Copy | None:
        piece = self._contents.get(content, {}).get(index)
        return None if piece is None else piece.copies.get(peer)

    def _of(self, content: bytes) -> dict[int, _Piece]:
        pieces = self._contents.setdefault(content, {})
        self._contents.move_to_end(content)
        if len(self._contents) > MAX_CONTENTS:
            self._forget(next(iter(self._contents)))
        return pieces

    def _grew(self, content: bytes, num_rows: int = 1) -> None:
        """Too many rows: the longest unasked contents go; where there is only this one, its first pieces."""
        self._num_rows += num_rows
        while self._num_rows > MAX_ROWS:
            oldest = next(iter(self._contents))
            if oldest != content:
                self._forget(oldest)
                continue
            pieces = self._contents[content]
            self._num_rows -= pieces.pop(next(iter(pieces))).num_rows

    def _forget(self, content: bytes) -> None:
        self._num_rows -= sum(piece.num_rows for piece in self._contents.pop(content).values())


def _is_on_its_way(rules: SpareRules, copy: _Copy, now: float) -> bool:
    is_slow = copy.is_again or now - copy.began > rules.slow_s
    return copy.given_at is None and now - copy.moved <= rules.stall_s and not is_slow


def _is_useful(rules: SpareRules, peer: str, copy: _Copy, without: Collection[str], now: float) -> bool:
    """It has the piece or will soon, as far as we know."""
    if copy.given_at is None:
        return _is_on_its_way(rules, copy, now) or (now - copy.moved <= rules.stall_s and peer not in without)
    settled = copy.given_at + max(rules.settle_s, min(rules.slow_s, copy.given_at - copy.began))
    return peer not in without or now < settled
