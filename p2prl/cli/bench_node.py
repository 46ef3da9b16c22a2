"""`p2prl bench node`: how fast a node is here, each figure beside its reference.

In: nothing; it starts daemons of its own in temporary homes. Out: a table, or one JSON line (schema 1); progress on
stderr. Exit 0 when everything was measured, whether or not a target was met; 1 when something could not be.
"""

import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from p2prl.cli.client import Daemon
from p2prl.cli.reading import print_json, reading, wants_json
from p2prl.errors import P2prlError
from p2prl.paths import Home
from p2prl.status import Status

if TYPE_CHECKING:
    from p2prl.bench.figures import Figure

TERMINATED = 143


@click.command()
@reading
def node(ctx: click.Context, as_json: bool) -> None:
    """How fast a node is here: commands, join, gossip, event loop, generation, idle cost. About three minutes."""
    from p2prl.bench import figures
    from p2prl.bench import node as benchmark

    started = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - started:4.0f} s] {text}", err=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    before = benchmark.machine()
    found = benchmark.measure(read_status, say)
    machine = before | {"load_after": benchmark.machine()["load"]}
    if wants_json(ctx, as_json):
        print_json(figures.report(found, machine, time.monotonic() - started))
    else:
        show(found, color=ctx.color is not False)


def read_status(home: Path) -> Status | None:
    """None while the daemon of that home does not answer yet."""
    try:
        return Daemon.find(Home.locate(home)).read("/api/v1/status", Status)
    except (P2prlError, OSError):
        return None


def show(figures: Sequence["Figure"], *, color: bool) -> None:
    """The table, and below it how each figure was measured."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("figure")
    for name in ("value", "target", "reference", "samples"):
        table.add_column(name, justify="right")
    table.add_column("")
    for figure in figures:
        verdict = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}[figure.met]
        table.add_row(
            figure.name, f"{figure.value:.3g} {figure.unit}", bound(figure),
            "" if figure.reference is None else f"{figure.reference:.3g}", str(figure.num_samples), verdict,
        )  # fmt: skip
    console = Console(no_color=not color, highlight=False)
    console.print(table)
    for figure in figures:
        console.print(f"\n[bold]{figure.name}[/]: {figure.how}. Reference: {figure.reference_how}.")
        if figure.broken:
            console.print(f"  [red]{figure.broken}[/]")


def bound(figure: "Figure") -> str:
    if figure.target is None:
        return ""
    return f"{'>=' if figure.at_least else '<'} {figure.target:g}"
