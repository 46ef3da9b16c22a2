"""`p2prl stop`: ask the daemon to drain, and wait until its process is gone.

In: POST /api/v1/stop. Out: a word when it has ended; exit 1 when it hasn't in time.
"""

import os
import select
import time

import click

from p2prl.cli.client import is_running
from p2prl.cli.reading import daemon_of, print_json, reading, wants_json
from p2prl.errors import P2prlError

GRACE_S = 10.0


@click.command()
@click.option("--timeout", "timeout_s", default=60.0, type=click.FloatRange(0, 3600), help="Seconds to finish in.")
@reading
def stop(ctx: click.Context, timeout_s: float, as_json: bool) -> None:
    """Finish what runs, hand over, stop."""
    daemon = daemon_of(ctx)
    began = time.monotonic()
    watched = _watch(daemon.pid)
    daemon.post("/api/v1/stop", {"timeout_s": timeout_s})
    if not wait_gone(daemon.pid, timeout_s + GRACE_S, watched):
        raise P2prlError(
            f"the daemon (pid {daemon.pid}) still runs after {timeout_s + GRACE_S:.0f} s. "
            f"See: p2prl logs. To end it at once: kill {daemon.pid} (again, or with -9)"
        )
    took_s = time.monotonic() - began
    if wants_json(ctx, as_json):
        print_json({"schema": 1, "pid": daemon.pid, "stopped": True, "took_s": round(took_s, 3)})
    else:
        click.echo(f"stopped (pid {daemon.pid}) after {took_s:.1f} s")


def wait_gone(pid: int, timeout_s: float, watched: int | None = None) -> bool:
    """Whether the process ends in time. `watched`: its pidfd, which also tells a reused pid apart."""
    if watched is not None:
        try:
            return bool(select.select([watched], [], [], timeout_s)[0])
        finally:
            os.close(watched)
    until = time.monotonic() + timeout_s
    while is_running(pid):  # systems without pidfd
        if time.monotonic() >= until:
            return False
        time.sleep(0.05)
    return True


def _watch(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
