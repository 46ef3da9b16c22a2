"""`p2prl bench weights`: what it takes to bring a new version to everybody.

In: how long. Out: a table, or one JSON line (schema 1) whose sections have the same figures under plain names; progress
on stderr. Exit 0 when everything was measured, whether or not a target was met.
"""

import os
import signal
import sys
import time
from typing import Any

import click

from p2prl.cli.bench_node import TERMINATED, show
from p2prl.cli.reading import home_of, print_json, reading, wants_json


@click.command()
@click.option("--quick", is_flag=True, help="A few optimiser steps; their deltas are smaller than later ones.")
@click.option("--threads", type=click.IntRange(min=1), help="Of torch, of the codec and of zstd [all cores].")
@reading
def weights(ctx: click.Context, as_json: bool, quick: bool, threads: int | None) -> None:
    """How small a version's delta is, how fast it is made, applied and fetched, on SmolLM2 in training.

    It takes about twenty minutes on two free cores, three with --quick, and 6 GB of memory.
    """
    import msgspec

    from p2prl.bench import figures, node, transfers
    from p2prl.bench import weights as codec

    started = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - started:4.0f} s] {text}", err=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    changes: dict[str, Any] = {"threads": threads or os.cpu_count() or 1, "models_cache": str(home_of(ctx).models)}
    plan = msgspec.structs.replace(codec.QUICK if quick else codec.Plan(), **changes)
    machine: dict[str, Any] = node.machine()
    moved = transfers.measure(say, transfers.QUICK_MIB if quick else transfers.VERSION_MIB)
    pairs = codec.measure(plan, say)
    machine |= {"load_after": node.machine()["load"]}
    rows = [*codec.figures(plan, pairs), *transfers.figures(moved)]
    sections = {"codec": codec.short(plan, pairs), "transfer": transfers.short(moved)}
    if wants_json(ctx, as_json):
        print_json(figures.report(rows, machine, time.monotonic() - started) | sections)
    else:
        show(rows, color=ctx.color is not False)
