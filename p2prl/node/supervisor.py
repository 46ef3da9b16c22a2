"""Keeps each loop alive on its own, measures the event loop's lag, ends everything in order.

In: named loops. Out: restarts with back-off, their last error for the status. One of two places that catch everything.
"""

import asyncio
import traceback
from collections.abc import Awaitable, Callable

import msgspec

from p2prl.clock import Clock

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
STEADY_S = 120.0  # a loop that ran so long starts its back-off anew
LAG_PERIOD_S = 0.1


class LoopHealth(msgspec.Struct):
    ok: bool = True
    restarts: int = 0
    error: str = ""


class Supervisor:
    def __init__(self, clock: Clock, emit: Callable[..., None]) -> None:
        self._clock, self._emit = clock, emit
        self._tasks: dict[str, asyncio.Task] = {}
        self.health: dict[str, LoopHealth] = {}
        self.lag_s = 0.0
        self.lags: list[float] = []

    def start(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        self.health[name] = LoopHealth()
        self._tasks[name] = asyncio.create_task(self._keep(name, run), name=name)

    async def stop(self, name: str | None = None) -> None:
        """Cancel one loop, or all."""
        names = [name] if name else list(self._tasks)
        tasks = [self._tasks.pop(name) for name in names if name in self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def watch_lag(self, report: Callable[[float], None]) -> None:
        """The loop's lag: how much later than asked a sleep ends."""
        while True:
            before = self._clock.monotonic()
            await asyncio.sleep(LAG_PERIOD_S)
            lag_s = max(0.0, self._clock.monotonic() - before - LAG_PERIOD_S)
            self.lags = [*self.lags[-999:], lag_s]
            report(lag_s)

    async def _keep(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            started = self._clock.monotonic()
            try:
                await run()
                error = "ended"
            except asyncio.CancelledError:
                raise
            except Exception as caught:  # noqa: BLE001  # the supervisor: whatever happened, the node goes on
                error = f"{type(caught).__name__}: {caught}"
                self._emit("log", level="error", event=f"loop {name} failed", why=error[:500])
                self._emit("log", level="debug", event="traceback", exc=traceback.format_exc()[-4000:])
            if self._clock.monotonic() - started > STEADY_S:
                pause_s = FIRST_PAUSE_S
            health = self.health[name]
            health.ok, health.error, health.restarts = False, error[:500], health.restarts + 1
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            health.ok = True
