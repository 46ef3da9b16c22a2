"""`p2prl bench staleness`: which objective survives samplers that lag.

In: objectives, ages, a number of seeds, a delay law. Out: staleness.json, a table, plots, and each run's own files, in
one folder; progress on stderr. Stopped at any moment it goes on where it was when the same command is given again.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from p2prl.bench.laws import LAWS
from p2prl.cli.reading import home_of, print_json, reading, wants_json

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from p2prl.bench.staleness import Run, RunSpec
    from p2prl.bench.staleness_summary import Row

TERMINATED = 143


def _words(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (value or "").split(",") if word.strip())


def _numbers(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(ctx, parameter, value))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of whole numbers like 0,32,64") from None


_POSITIVE = click.IntRange(min=1)
_OPTIONS = (
    click.option("--quick", is_flag=True, help="A small study, 8 minutes on two cores; other options still count."),
    click.option("--objectives", callback=_words, metavar="A,B", help="Registry names, with choices: gepo_vcpo:mean."),
    click.option("--ages", callback=_numbers, metavar="N,N", help="In versions [0,8,16,32,64,128,256]."),
    click.option("--seeds", type=_POSITIVE, help="Runs of each kind [5]."),
    click.option("--law", type=click.Choice(LAWS), default="fixed", show_default=True, help="Of the delays."),
    click.option("--steps", type=_POSITIVE, help="Optimiser steps of a run [300, --quick: 250]."),
    click.option("--groups", type=_POSITIVE, default=32, show_default=True, help="Groups in a step."),
    click.option("--learning-rate", type=float, default=3e-4, show_default=True),
    click.option("--max-age", type=_POSITIVE, help="Refuse older groups [no limit]."),
    click.option("--workers", type=_POSITIVE, help="Processes, one thread each [all cores]."),
    click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder of the results."),
)  # fmt: skip


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command()
@_options
@reading
def staleness(ctx: click.Context, as_json: bool, **given: Any) -> None:
    """Train the built-in policy with samplers that lag, and compare objectives.

    An objective is a registry name, with choices behind colons: mean or min_variance (baseline), ess, weights or none
    (what sizes the step), unclipped, or a key of the recipe's section: clip=0.3.
    """
    from p2prl.bench import staleness_pool, staleness_summary

    specs = specs_of(given)
    folder: Path = given["out"] or home_of(ctx).cache / "bench" / "staleness"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    with watching(color=ctx.color is not False) as watch:
        try:
            runs = staleness_pool.study(specs, folder, given["workers"] or os.cpu_count() or 1, watch)
        except KeyboardInterrupt:
            num_done = sum(staleness_pool.load(spec, folder) is not None for spec in specs)
            watch.say(f"stopped: {num_done} of {len(specs)} runs are finished in {folder}; the same command goes on")
            raise
    report, rows = staleness_summary.report(runs), staleness_summary.summarise(runs)
    staleness_pool.write_whole(folder / "staleness.json", msgspec.json.format(msgspec.json.encode(report)))
    _plot(folder, specs, runs, rows)
    if wants_json(ctx, as_json):
        print_json(report)
    else:
        show(rows, color=ctx.color is not False)
        click.echo(f"\nAll of it: {folder}")


def specs_of(given: dict[str, Any]) -> "tuple[RunSpec, ...]":
    """The runs that the options ask for; what is not said comes from the quick or the full study."""
    from p2prl.bench import staleness as study

    quick = given["quick"]
    settings = study.Settings(
        num_steps=given["steps"] or (study.QUICK_STEPS if quick else study.FULL_STEPS),
        groups_per_step=given["groups"],
        learning_rate=given["learning_rate"],
        max_age=given["max_age"] or study.NO_MAX_AGE,
    )
    return study.plan(
        given["objectives"] or (study.QUICK_OBJECTIVES if quick else study.FULL_OBJECTIVES),
        given["ages"] or (study.QUICK_AGES if quick else study.FULL_AGES),
        given["seeds"] or (study.QUICK_SEEDS if quick else study.FULL_SEEDS),
        given["law"],
        settings,
    )


def _plot(folder: Path, specs: "Sequence[RunSpec]", runs: "Sequence[Run]", rows: "Sequence[Row]") -> None:
    from p2prl.bench import staleness_plots, staleness_pool

    traces = {
        (run.objective, run.age, run.seed): spec for spec, run in zip(specs, runs, strict=True)
    }  # fmt: skip
    try:
        staleness_plots.draw(
            folder, runs, rows,
            lambda run: staleness_pool.load_trace(traces[run.objective, run.age, run.seed], folder),
        )  # fmt: skip
    except staleness_plots.NoPlots as error:
        click.echo(str(error), err=True)


@contextmanager
def watching(*, color: bool) -> "Iterator[Terminal]":
    """A bar on stderr when a person looks, else a line for each finished run."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True, no_color=not color, highlight=False)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(elapsed_when_finished=False),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=600) as bar:
        yield Terminal(bar)


class Terminal:
    """Implements `staleness_pool.Watch` with rich's progress bar."""

    def __init__(self, bar: "Progress") -> None:
        self._bar = bar
        self._task: TaskID | None = None
        self._num_done = self._num_runs = 0

    def say(self, text: str) -> None:
        self._bar.console.print(text, soft_wrap=True, markup=False)

    def begin(self, num_ticks: int, num_found: int, num_runs: int) -> None:
        self._num_done, self._num_runs = num_found, num_runs
        if num_found:
            self.say(f"{num_found} of {num_runs} runs are finished already")
        self._task = self._bar.add_task(self._title(), total=num_ticks)

    def advance(self, num_ticks: int) -> None:
        assert self._task is not None, "begin comes first"
        self._bar.advance(self._task, num_ticks)

    def finished(self, run: "Run", wall_s: float) -> None:
        assert self._task is not None, "begin comes first"
        self._num_done += 1
        self._bar.update(self._task, description=self._title())
        fate = ", collapsed" if run.collapsed else ""
        self.say(
            f"{self._num_done}/{self._num_runs} {run.objective} age {run.age} seed {run.seed}: "
            f"{run.reward_final:.3f} (best {run.reward_best:.3f}{fate}) in {wall_s:.0f} s"
        )

    def _title(self) -> str:
        return f"run {min(self._num_done + 1, self._num_runs)} of {self._num_runs}"


def show(rows: "Sequence[Row]", *, color: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("objective")
    for name in ("age", "seeds", "reward", "sd", "loss %", "95 % of it", "collapsed"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        loss = "" if row.loss_vs_fresh_percent is None else f"{row.loss_vs_fresh_percent:+.1f}"
        between = "" if row.loss_low is None else f"{row.loss_low:+.1f} to {row.loss_high:+.1f}"
        mark = " *" if row.significant else ""
        collapsed = f"[red]{row.num_collapsed}[/]" if row.num_collapsed else "0"
        table.add_row(
            row.objective, str(row.age), str(row.num_seeds), f"{row.mean:.4f}",
            "" if row.sd is None else f"{row.sd:.4f}", loss, between + mark, collapsed,
        )  # fmt: skip
    Console(no_color=not color, highlight=False).print(table)
    click.echo("loss: above 0 is worse than the same objective at age 0, same seeds; *: the interval leaves out 0")
