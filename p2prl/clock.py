"""Time as an argument: monotonic seconds for decisions, unix seconds for stamps that people and peers read.

The daemon uses `SystemClock`. Under a virtual-time event loop `LoopClock` makes both follow the loop, so that the
simulator runs hours in seconds and the same seed gives the same trace.
"""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds that never go back; only differences mean anything."""
        ...

    def unix(self) -> float:
        """Seconds since 1970-01-01 UTC by this machine's clock."""
        ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time()


class LoopClock:
    """Follows the running event loop's time; `start` is the unix time at loop time 0."""

    def __init__(self, start: float = 1_790_000_000.0) -> None:
        self._start = start

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def unix(self) -> float:
        return self._start + asyncio.get_running_loop().time()
