"""`p2prl generate`: what a recipe's model answers here, and what that is worth, without a swarm.

In: a recipe, how many prompts. Out: prompts, answers, rewards with their reasons, as text or one JSON line; progress on
stderr. The engine and the environment run in a node's own child processes.
"""

import asyncio
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from p2prl.cli.env import safe
from p2prl.cli.reading import home_of, print_json, reading, wants_json
from p2prl.cli.run import ENGINES
from p2prl.errors import P2prlError

if TYPE_CHECKING:
    from rich.console import Console

    from p2prl.node.local_rollouts import Answer, LocalRollouts, Shown
    from p2prl.recipe import Recipe

WIDTH = 100  # where no terminal tells its own
Show = Callable[["Shown", int], None]


@click.command()
@click.argument("recipe")
@click.option("--count", default=4, show_default=True, type=click.IntRange(1, 1000), help="How many prompts.")
@click.option("--engine", type=click.Choice(ENGINES), help="Which; default: as config.toml says.")
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0, 2**53), help="Other prompts, other answers."
)
@click.option("--weights", type=click.Path(path_type=Path), metavar="DIR", help="A folder that p2prl export wrote.")
@reading
def generate(
    ctx: click.Context,
    as_json: bool,
    recipe: str,
    count: int,
    engine: str | None,
    seed: int,
    weights: Path | None,
) -> None:
    """Answer some of RECIPE's training prompts here, and show what each answer is worth.

    No swarm is joined, nothing is sent or trained on. Exit 1 when no prompt could be answered.
    """
    from p2prl import config as configs
    from p2prl import recipe as recipes
    from p2prl.node.children import open_log
    from p2prl.node.local_rollouts import check_engine, local_rollouts

    home, started = home_of(ctx), time.monotonic()
    chosen, _ = recipes.find(recipe, (home.recipes,))
    overrides = [f"rollout.engine={engine}"] if engine else []
    settings, _ = configs.load(home.config_file, os.environ, overrides)
    check_engine(settings.rollout.engine, importlib.util.find_spec("vllm") is not None)
    home.create()

    def say(text: str) -> None:
        click.echo(safe(f"[{time.monotonic() - started:4.0f} s] {text}"), err=True)

    in_json = wants_json(ctx, as_json)
    show = (
        (lambda shown, number: say(f"prompt {number} of {count}")) if in_json else shower(ctx.color is not False, count)
    )
    with open_log(home) as child_log:
        rollouts = local_rollouts(chosen, home, settings, say, child_log)
        found = asyncio.run(run(rollouts, count, seed, weights, show))
    report = summary(chosen, rollouts, found, seed)
    if in_json:
        print_json(report)
    else:
        click.echo(f"\n{summary_text(report)}")
    if not any(shown.answers for shown in found):
        raise P2prlError("no prompt could be answered; what went wrong is said above")


async def run(rollouts: "LocalRollouts", count: int, seed: int, weights: Path | None, show: Show) -> "list[Shown]":
    """Ends its children on SIGTERM too."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    found: list[Shown] = []
    try:
        await rollouts.start(weights)
        async for shown in rollouts.draw(count, seed):
            found.append(shown)
            show(shown, len(found))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        await rollouts.stop()
    return found


def summary(recipe: "Recipe", rollouts: "LocalRollouts", found: "list[Shown]", seed: int) -> dict[str, Any]:
    from p2prl.rollout.worker import mean_and_error

    rewards = [[answer.reward for answer in shown.answers] for shown in found if shown.answers]
    mean, error = mean_and_error(rewards) if rewards else (None, None)
    return {
        "schema": 1,
        "recipe": recipe.name,
        "swarm": recipe.swarm_id.hex(),
        "engine": rollouts.engine_name,
        "plan": rollouts.plan,
        "seed": seed,
        "groups": msgspec.to_builtins(found),
        "num_answered": len(rewards),
        "num_answers": sum(map(len, rewards)),
        "reward_mean": mean,
        "reward_error": error,
        "num_tokens": rollouts.num_tokens,
        "tokens_per_s": rollouts.num_tokens / rollouts.busy_s if rollouts.busy_s else 0.0,
    }


def summary_text(report: dict[str, Any]) -> str:
    mean = report["reward_mean"]
    reward = "none" if mean is None else f"{mean:.3f} +- {report['reward_error']:.3f}"
    num_lost = len(report["groups"]) - report["num_answered"]
    lost = f"; {num_lost} more could not be answered" if num_lost else ""
    rows = [
        ("mean reward", f"{reward} over {report['num_answered']} prompts, {report['num_answers']} answers{lost}"),
        ("tokens", f"{report['num_tokens']}, {report['tokens_per_s']:.0f} a second"),
        ("engine", f"{report['engine']}"),
    ]
    return "\n".join(f"{name:<12} {safe(text)}" for name, text in rows)


def shower(color: bool, count: int) -> Show:
    """Prints a group: the prompt, then each answer under its reward, wrapped to the terminal."""
    from rich.console import Console  # some 50 ms

    width = None if sys.stdout.isatty() else WIDTH
    console = Console(highlight=False, markup=False, emoji=False, no_color=not color, width=width)

    def show(shown: "Shown", number: int) -> None:
        worth = ""
        if shown.answers:
            worth = f"  mean reward {sum(answer.reward for answer in shown.answers) / len(shown.answers):.3f}"
        console.print(f"\n--- {shown.index} ({number} of {count}){worth}", style="bold")
        if shown.prompt:
            _indented(console, shown.prompt)
            console.print()
        if shown.error:
            console.print(f"! {safe(shown.error)}", style="red")
        for answer in shown.answers:
            _show_answer(console, answer)

    return show


def _show_answer(console: "Console", answer: "Answer") -> None:
    style = "green" if answer.reward >= 1 else "red" if answer.reward <= 0 else "yellow"
    cut = "" if answer.finish_reason == "stop" else ", cut at the longest length"
    console.print(f"{answer.reward:6.3f}  {safe(answer.detail)}  ({answer.num_tokens} tokens{cut})", style=style)
    for turn in answer.turns:
        _indented(console, turn.text or "(nothing)", "" if turn.drawn else "dim", "" if turn.drawn else "environment: ")


def _indented(console: "Console", text: str, style: str = "", head: str = "") -> None:
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding(Text(safe(head + text), style), (0, 0, 0, 8), expand=False))
