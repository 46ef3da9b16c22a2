"""`p2prl bench step`: what an optimiser step costs, by its objective.

In: which models. Out: a table, or one JSON line (schema 1) whose `models` has the same figures under plain names;
progress on stderr. Exit 0 when everything was measured, whether or not a target was met.
"""

import os
import signal
import sys
import time
from typing import Any

import click

from p2prl.cli.bench_node import TERMINATED, show
from p2prl.cli.reading import home_of, print_json, reading, wants_json

MODELS = ("builtin", "smollm2")


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(MODELS), help="Which; may be repeated [both].")
@click.option("--rounds", type=click.IntRange(min=1), help="Paired rounds of each model [15, and 5 of smollm2].")
@click.option("--threads", type=click.IntRange(min=1), help="Of torch [all cores].")
@reading
def step(ctx: click.Context, as_json: bool, models: tuple[str, ...], rounds: int | None, threads: int | None) -> None:
    """What an optimiser step costs: VCPO with exact score norms, one backward pass an answer, A-3PO, and plain ones.

    With smollm2 it takes about ten minutes on two free cores and 8 GB of memory.
    """
    import msgspec

    from p2prl.bench import figures, node
    from p2prl.bench import step as benchmark

    started = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - started:4.0f} s] {text}", err=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    changes: dict[str, Any] = {"threads": threads or os.cpu_count() or 1, "models_cache": str(home_of(ctx).models)}
    if rounds:
        changes |= {"num_rounds": rounds, "least_rounds": min(rounds, 3)}
    plans = {
        name: msgspec.structs.replace(benchmark.MODELS[name], **changes) for name in dict.fromkeys(models or MODELS)
    }
    machine: dict[str, Any] = node.machine()
    found = benchmark.measure(plans, say)
    machine |= {"load_after": node.machine()["load"]}
    rows = [figure for name in plans for figure in benchmark.figures(name, plans[name], found[name])]
    if wants_json(ctx, as_json):
        report = figures.report(rows, machine, time.monotonic() - started)
        print_json(report | {"models": {name: benchmark.short(each) for name, each in found.items()}})
    else:
        show(rows, color=ctx.color is not False)
