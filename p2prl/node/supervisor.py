"""Keeps each loop alive on its own, measures the event loop's lag, ends everything in order.

In: named loops. Out: restarts with back-off, their last error for the status. One of two places that catch everything.
"""

import asyncio
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from p2prl.clock import Clock

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
STEADY_S = 120.0  # a loop that ran so long starts its back-off anew
RECOVERY_S = 2.0
LAG_PERIOD_S = 0.1
CANCEL_AGAIN_S = 1.0
LAG_WINDOW = 300  # samples kept: half a minute


class LoopHealth(msgspec.Struct):
    ok: bool = True
    restarts: int = 0
    error: str = ""
    failed_at: float = 0.0  # unix seconds


class Supervisor:
    def __init__(self, clock: Clock, emit: Callable[..., None]) -> None:
        self._clock, self._emit = clock, emit
        self._tasks: dict[str, asyncio.Task] = {}
        self.health: dict[str, LoopHealth] = {}
        self.lag_s = 0.0
        self.lags: deque[float] = deque(maxlen=LAG_WINDOW)

    def start(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        self.health[name] = LoopHealth()
        self._tasks[name] = asyncio.create_task(self._keep(name, run), name=name)

    async def stop(self, name: str | None = None) -> None:
        """Cancel one loop, or all."""
        names = [name] if name else list(self._tasks)
        tasks = [self._tasks.pop(name) for name in names if name in self._tasks]
        await end_tasks(tasks)

    async def watch_lag(self, report: Callable[[float], None]) -> None:
        """The loop's lag: how much later than asked a sleep ends."""
        while True:
            before = self._clock.monotonic()
            await asyncio.sleep(LAG_PERIOD_S)
            lag_s = max(0.0, self._clock.monotonic() - before - LAG_PERIOD_S)
            self.lags.append(lag_s)
            report(lag_s)

    async def _keep(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        pause_s, recovery = FIRST_PAUSE_S, None
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
            lasted_s = self._clock.monotonic() - started
            if lasted_s > STEADY_S:
                pause_s = FIRST_PAUSE_S
            health = self.health[name]
            if recovery is not None:
                recovery.cancel()
            health.ok, health.error, health.restarts = False, error[:500], health.restarts + 1
            health.failed_at = self._clock.unix()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            # Well again when it outlives its last failure: one that fails after 10 s is not well after 9.
            well_after_s = min(lasted_s, STEADY_S) + RECOVERY_S
            recovery = asyncio.get_running_loop().call_later(well_after_s, setattr, health, "ok", True)


async def end_tasks(tasks: Iterable[asyncio.Task]) -> None:
    """Cancel them, in their order, and wait until they have ended.

    Again and again: Python 3.11's `wait_for` swallows a cancellation that comes together with its result.
    """
    ending = dict.fromkeys(tasks)
    while ending:
        for task in ending:
            task.cancel()
        await asyncio.wait(ending, timeout=CANCEL_AGAIN_S)
        for task in [task for task in ending if task.done()]:
            del ending[task]
            if not task.cancelled():
                task.exception()  # seen: asyncio need not complain that nobody did
