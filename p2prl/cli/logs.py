"""`p2prl logs`: the daemon's newest lines, from its memory; where the file is when none runs.

In: GET /api/v1/logs, with -f the log events. Out: lines as on the daemon's console, or one JSON object each.
"""

import sys

import click

from p2prl.cli.client import Daemon, decode
from p2prl.cli.reading import daemon_of, home_of, print_json, reading, wants_json
from p2prl.errors import NoDaemon
from p2prl.logs import LEVELS, LogLine, text_of

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until Ctrl-C.")
@click.option("--level", type=click.Choice(LEVELS), default="debug", help="This level and worse.")
@click.option("--component", default="", help="One loop's lines: rollout, receive, train, ...")
@click.option("--since", "since_text", default="", metavar="10m", help="Not older: 30s, 10m, 2h, 1d.")
@click.option("-n", "--lines", default=100, type=click.IntRange(1, 1000), help="At most so many lines.")
@reading
def logs(
    ctx: click.Context, follow: bool, level: str, component: str, since_text: str, lines: int, as_json: bool
) -> None:
    """The newest log lines; -f follows."""
    as_json = wants_json(ctx, as_json)
    since_s = seconds_of(since_text)
    query = {"level": level, "component": component, "since_s": since_s, "limit": lines}
    try:
        daemon = daemon_of(ctx)
        newest = daemon.read("/api/v1/logs", list[LogLine], **query)
    except NoDaemon as error:
        file = home_of(ctx).log_file
        raise NoDaemon(f"{error}. What the last one logged: {file}" if file.is_file() else str(error)) from None
    for line in newest:
        show(ctx, line, as_json)
    if follow:
        follow_lines(ctx, daemon, level, component, as_json)


def follow_lines(ctx: click.Context, daemon: Daemon, level: str, component: str, as_json: bool) -> None:
    for kind, data in daemon.events("log"):
        if kind != "log":
            click.echo("(some lines were lost)", err=True)
            continue
        line = decode(data, LogLine)
        if LEVELS.index(line.level) >= LEVELS.index(level) and component in ("", line.component):
            show(ctx, line, as_json)


def show(ctx: click.Context, line: LogLine, as_json: bool) -> None:
    if as_json:
        print_json(line)
        return
    colour = ctx.color is not False and sys.stdout.isatty()
    click.echo(text_of(line, colour=colour))


def seconds_of(text: str) -> float:
    """10m -> 600; "" -> 0 (any time)."""
    if not text:
        return 0.0
    try:
        return float(text[:-1]) * _UNITS[text[-1]]
    except (ValueError, KeyError):
        raise click.BadParameter(f"{text!r} is not like 30s, 10m, 2h or 1d", param_hint="--since") from None
