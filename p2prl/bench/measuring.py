"""How a measuring child runs: one coroutine until it returns, or until the benchmark is gone.

In: `python -m MODULE FD FOLDER`, FD the read end of the benchmark's pipe. Out: one JSON line on stdout.

Ends by cancelling the coroutine, so that its `finally` leaves no p2pd behind: at SIGTERM, at SIGINT, and when FD closes.
"""

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

INTERRUPTED = 130


def run(measure: Callable[[Path], Awaitable[Any]]) -> int:
    """The `main` of a measuring child."""
    return asyncio.run(_run(measure, int(sys.argv[1]), Path(sys.argv[2])))


async def _run(measure: Callable[[Path], Awaitable[Any]], pipe: int, folder: Path) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(measure(folder))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    loop.add_reader(pipe, task.cancel)  # readable: its other end is closed
    try:
        result = await task
    except asyncio.CancelledError:
        return INTERRUPTED
    finally:
        loop.remove_reader(pipe)
    print(json.dumps(result), flush=True)
    return 0


def say(text: str) -> None:
    """Progress, to whoever watches."""
    print(text, file=sys.stderr, flush=True)
