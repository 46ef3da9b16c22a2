"""Events to a browser or `p2prl logs -f` as server-sent events.

In: the ring, the id the reader saw last. Out: `id:`, `event:`, `data:`; `event: reset` where it must fetch anew.

A reader that takes nothing for SEND_TIMEOUT_S is dropped; at most MAX_STREAMS at once; closing the ring ends all.
"""

from collections.abc import AsyncIterator

from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse
from starlette.requests import Request

from p2prl.events import TYPES, Ring

MAX_STREAMS = 8
PING_S = 15
RETRY_MS = 3000
SEND_TIMEOUT_S = 10.0


class BadQuery(ValueError):
    """The request asks for something that can't be."""


class Streams:
    """Counts the open streams of one app."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self.num_open = 0

    @property
    def full(self) -> bool:
        return self.num_open >= MAX_STREAMS

    def respond(self, since: int | None, kinds: tuple[str, ...]) -> EventSourceResponse:
        return EventSourceResponse(self._events(since, kinds), ping=PING_S, sep="\n", send_timeout=SEND_TIMEOUT_S)

    async def _events(self, since: int | None, kinds: tuple[str, ...]) -> AsyncIterator[ServerSentEvent]:
        if self.full:
            return  # several were let in at one moment, before the first of them began
        self.num_open += 1
        try:
            yield ServerSentEvent(comment="p2prl", retry=RETRY_MS)
            async for event in self._ring.subscribe(since, kinds):
                yield ServerSentEvent(data=event.data.decode(), event=event.type, id=str(event.id))
        finally:
            self.num_open -= 1


def since_of(request: Request) -> int | None:
    """Where to resume: the browser's Last-Event-ID, else ?since=; None for from now on. BadQuery for nonsense."""
    text = request.headers.get("last-event-id") or request.query_params.get("since")
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise BadQuery("since must be an event id")
    return int(text)


def kinds_of(request: Request) -> tuple[str, ...]:
    """The wanted event types, all by default. BadQuery for an unknown one."""
    text = request.query_params.get("types")
    kinds = tuple(text.split(",")) if text else TYPES
    unknown = [kind for kind in kinds if kind not in TYPES]
    if unknown:
        raise BadQuery(f"types must be among {', '.join(TYPES)}")
    return kinds
