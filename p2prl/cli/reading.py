"""What reading commands share: the --json option, the home, the daemon.

In: click's context. Out: `Invocation` resolved to a home and a daemon; a reply printed as JSON.
"""

from collections.abc import Callable
from typing import Any

import click
import msgspec

from p2prl.cli.client import Daemon
from p2prl.cli.main import Invocation
from p2prl.paths import Home

json_option = click.option("--json", "as_json", is_flag=True, help="JSON instead of text.")


def home_of(ctx: click.Context) -> Home:
    return Home.locate(_invocation(ctx).home)


def daemon_of(ctx: click.Context) -> Daemon:
    return Daemon.find(home_of(ctx))


def wants_json(ctx: click.Context, as_json: bool) -> bool:
    return as_json or _invocation(ctx).json


def reading(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds --json and the context to a command that reads."""
    return json_option(click.pass_context(command))


def print_json(value: object) -> None:
    """One line: bytes as the daemon sent them, else the value encoded."""
    click.echo(value.decode() if isinstance(value, bytes) else msgspec.json.encode(value).decode())


def _invocation(ctx: click.Context) -> Invocation:
    return ctx.obj if isinstance(ctx.obj, Invocation) else Invocation()
