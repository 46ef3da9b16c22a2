"""What happens, as numbered events: a ring that any number of readers follow, each at its own speed.

In: `publish(type, data)` from the loops and the log handler (any thread). Out: `subscribe(since)` for the page's stream
and `recent()`.

Ids rise by 1. A reader holds no queue: it reads from the ring, so a slow one costs nothing and, once what it wants next
has left the ring, is told to start afresh (`RESET`). An id from another life of the daemon is told the same.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterable

import msgspec

TYPES = ("status", "step", "rollout", "peer", "health", "log")
RESET = "reset"
CAPACITY = 4096


class Event(msgspec.Struct, frozen=True):
    """`data` is JSON, encoded once for all readers."""

    id: int
    type: str
    data: bytes


class Ring:
    """The newest `capacity` events. `first_id` should differ between lives of a daemon (its start in ms, say)."""

    def __init__(self, capacity: int = CAPACITY, first_id: int = 1) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)
        self._first_id = first_id
        self._next_id = first_id
        self._lock = threading.Lock()
        self._readers: dict[asyncio.Event, tuple[asyncio.AbstractEventLoop, int]] = {}
        self._closed = False

    @property
    def last_id(self) -> int:
        return self._next_id - 1

    def publish(self, kind: str, data: object) -> Event:
        """Add an event and wake the readers; safe from any thread."""
        assert kind in TYPES, kind
        body = data if isinstance(data, bytes) else msgspec.json.encode(data)
        with self._lock:
            event = Event(self._next_id, kind, body)
            self._next_id += 1
            self._events.append(event)
        self._wake()
        return event

    def recent(self, kinds: Iterable[str] = TYPES, limit: int = CAPACITY) -> list[Event]:
        """The newest events of these types, oldest first."""
        wanted = frozenset(kinds)
        with self._lock:
            found = [event for event in self._events if event.type in wanted]
        return found[-limit:] if limit else []

    def close(self) -> None:
        """End every subscription once it has what is in the ring, so that a last word still gets out."""
        self._closed = True
        self._wake()

    async def subscribe(self, since: int | None = None, kinds: Iterable[str] = TYPES) -> AsyncIterator[Event]:
        """Events after id `since` (None: from now on) until `close`; a RESET event where some are lost for good."""
        wanted = frozenset(kinds)
        woken = asyncio.Event()
        self._readers[woken] = (asyncio.get_running_loop(), threading.get_ident())
        position = self.last_id if since is None else since
        try:
            while True:
                woken.clear()
                for event in self._after(position):
                    if event.type in wanted or event.type == RESET:
                        yield event
                    position = event.id
                if position != self.last_id:
                    continue
                if self._closed:
                    return
                await woken.wait()
        finally:
            del self._readers[woken]

    def _after(self, position: int) -> list[Event]:
        with self._lock:
            oldest = self._events[0].id if self._events else self._next_id
            if position < oldest - 1 or position >= self._next_id:
                return [Event(self._next_id - 1, RESET, b"{}")]
            return [self._events[index] for index in range(position - oldest + 1, len(self._events))]

    def _wake(self) -> None:
        for woken, (loop, thread) in list(self._readers.items()):
            if thread == threading.get_ident():
                woken.set()
            elif not loop.is_closed():
                loop.call_soon_threadsafe(woken.set)
