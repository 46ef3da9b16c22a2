"""Whose group begins next in an engine that works on many at once.

In: groups with the cache positions and answers they need. Out: their turns, in the order they came.

Invariants: never more positions or answers are in work than there is room for; no group begins while weights change;
weights change only once every answer in work has its first token, so that all answers of a group begin under one version.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Turn:
    """A group at work; `started` once for each answer's first token."""

    def __init__(self, num_answers: int, moved: Callable[[], None]) -> None:
        self.num_unstarted, self._moved = num_answers, moved

    def started(self) -> None:
        self.num_unstarted -= 1
        self._moved()


class Turns:
    def __init__(self, num_positions: int, num_answers: int) -> None:
        self.num_positions, self.num_answers = num_positions, num_answers
        self._free_positions, self._free_answers = num_positions, num_answers
        self._queue: deque[object] = deque()
        self._working: dict[Turn, None] = {}
        self._changing = 0
        self._moved = asyncio.Event()

    @asynccontextmanager
    async def turn(self, num_positions: int, num_answers: int) -> AsyncIterator[Turn]:
        """Waits for room, behind those that came before."""
        assert num_positions <= self.num_positions and num_answers <= self.num_answers, "it never fits"
        ticket = object()
        self._queue.append(ticket)
        try:
            await self._until(
                lambda: (
                    self._queue[0] is ticket
                    and not self._changing
                    and self._free_positions >= num_positions
                    and self._free_answers >= num_answers
                )
            )
        finally:
            self._queue.remove(ticket)
            self._move()
        turn = Turn(num_answers, self._move)
        self._working[turn] = None
        self._free_positions -= num_positions
        self._free_answers -= num_answers
        try:
            yield turn
        finally:
            del self._working[turn]
            self._free_positions += num_positions
            self._free_answers += num_answers
            self._move()

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Inside, no group begins, and what is in work has begun."""
        self._changing += 1
        try:
            await self._until(lambda: all(turn.num_unstarted == 0 for turn in self._working))
            yield
        finally:
            self._changing -= 1
            self._move()

    def _move(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._moved.wait()
