"""`p2prl status`: what the node is doing.

In: GET /api/v1/status, with --watch the status events. Out: one screen, or the reply's JSON; exit 4 with --check when
something is wrong.
"""

import click

from p2prl.cli.client import decode
from p2prl.cli.reading import daemon_of, print_json, reading, wants_json
from p2prl.cli.render import status_text, utc_now
from p2prl.status import Status

UNHEALTHY = 4


@click.command()
@click.option("--watch", is_flag=True, help="Show it anew each time it changes, until Ctrl-C.")
@click.option("--check", is_flag=True, help="Exit with 4 when the node is unhealthy.")
@reading
def status(ctx: click.Context, watch: bool, check: bool, as_json: bool) -> None:
    """What this node is doing, in one screen."""
    daemon = daemon_of(ctx)
    as_json = wants_json(ctx, as_json)
    reply = daemon.get("/api/v1/status")
    show(reply, as_json)
    if watch:
        for kind, data in daemon.events("status"):
            reply = data if kind == "status" else daemon.get("/api/v1/status")
            if not as_json:
                click.clear()
            show(reply, as_json)
    if check and not is_healthy(decode(reply, Status)):
        ctx.exit(UNHEALTHY)


def show(reply: bytes, as_json: bool) -> None:
    if as_json:
        print_json(reply)
    else:
        click.echo(status_text(decode(reply, Status), utc_now()))


def is_healthy(status: Status) -> bool:
    return not status.health and status.state.now != "degraded"
