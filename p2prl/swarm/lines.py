"""Our line under its caps: `fair.py` and `bandwidth.py` carried out on the running loop.

In: items about to be sent or received. Out: they wait for their turn. A change of the rate is felt at once, also by who
waits already. Nothing here fails; a cancelled wait leaves no trace.
"""

import asyncio
from contextlib import suppress

from p2prl.clock import Clock
from p2prl.swarm.bandwidth import Bandwidth
from p2prl.swarm.fair import FairLine, Ticket

LEAST_WAIT_S = 1e-4  # a wait shorter than the clock can tell would not be one


class UpLine:
    """Turns of peers to send."""

    def __init__(self, line: FairLine, clock: Clock) -> None:
        self._line, self._clock = line, clock
        self._waiting: dict[int, asyncio.Future[None]] = {}  # by id of the ticket
        self._timer: asyncio.TimerHandle | None = None

    @property
    def rate(self) -> float | None:
        return self._line.rate

    def set_rate(self, rate: float | None) -> None:
        self._line.set_rate(rate, self._clock.monotonic())
        if self._waiting:
            self._pump()

    def charge(self, num_bytes: int) -> None:
        """Bytes that go without waiting."""
        self._line.charge(num_bytes, self._clock.monotonic())

    async def turn(self, peer: str, num_bytes: int) -> Ticket:
        """Wait until this item may go; tell `sent` when it went, or came to nothing."""
        ticket = self._line.ask(peer, num_bytes, self._clock.monotonic())
        self._pump()
        if ticket.granted_at is None:
            granted = self._waiting[id(ticket)] = asyncio.get_running_loop().create_future()
            try:
                await granted
            except asyncio.CancelledError:
                self._waiting.pop(id(ticket), None)
                self.sent(ticket)
                raise
        return ticket

    def sent(self, ticket: Ticket) -> None:
        self._line.sent(ticket, self._clock.monotonic())
        if self._waiting:
            self._pump()

    def _pump(self) -> None:
        granted, wait_s = self._line.grants(self._clock.monotonic())
        for ticket in granted:
            waiting = self._waiting.pop(id(ticket), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wait_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(wait_s, LEAST_WAIT_S), self._pump)


class DownLine:
    """Room for what is about to come, in the order of asking."""

    def __init__(self, bucket: Bandwidth, clock: Clock) -> None:
        self._bucket, self._clock = bucket, clock
        self._first = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def rate(self) -> float | None:
        return self._bucket.rate

    def set_rate(self, rate: float | None) -> None:
        self._bucket.set_rate(rate, self._clock.monotonic())
        self._changed.set()

    async def make_room(self, num_bytes: int) -> None:
        """Wait until so many bytes, as far as known, may come."""
        if self._bucket.rate is None:
            return
        async with self._first:
            while (wait_s := self._bucket.wait_s(self._clock.monotonic())) > 0:
                self._changed.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), max(wait_s, LEAST_WAIT_S))
            self._bucket.take(num_bytes, self._clock.monotonic())

    def correct(self, num_bytes: int) -> None:
        """So many more came than there was room made for; fewer when negative."""
        if num_bytes < 0:
            self._bucket.give_back(-num_bytes)
        else:
            self._bucket.take(num_bytes, self._clock.monotonic())
