"""`p2prl web`: this node's page, logged in.

In: POST /api/v1/login-code. Out: a browser at /login#CODE, or the address printed. The code is good once, for a minute;
in the fragment it stays out of logs and referrers.
"""

import os
import sys
import webbrowser

import click
import msgspec

from p2prl.cli.client import decode
from p2prl.cli.reading import daemon_of, print_json, reading, wants_json


class LoginCode(msgspec.Struct, frozen=True):
    code: str
    expires_in_s: float


@click.command()
@click.option("--print-url", is_flag=True, help="Only print the address; open nothing.")
@reading
def web(ctx: click.Context, print_url: bool, as_json: bool) -> None:
    """Open this node's page, logged in."""
    daemon = daemon_of(ctx)
    login = decode(daemon.post("/api/v1/login-code"), LoginCode)
    url = f"{daemon.url}/login#{login.code}"
    if wants_json(ctx, as_json):
        print_json({"schema": 1, "url": url, "expires_in_s": login.expires_in_s})
        return
    click.echo(url)
    if not print_url and has_screen() and webbrowser.open(url):
        return
    if not print_url:
        click.echo(f"Open this address in a browser on this machine within {login.expires_in_s:.0f} s.", err=True)


def has_screen() -> bool:
    """Whether opening a browser makes sense: someone looks, and on Linux there is a display."""
    if not sys.stdout.isatty():
        return False
    return sys.platform != "linux" or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
