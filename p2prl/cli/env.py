"""`p2prl env`: which tasks there are, what they ask, what an answer is worth, whether a recipe's is sound.

In: names, parameters, recipes. Out: text or JSON. The environments run in a child process with a fixed hash seed and a
node's limits; nothing here loads their code.
"""

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from datetime import date, time
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from p2prl.cli.reading import home_of, print_json, reading, wants_json
from p2prl.cli.render import span, table
from p2prl.errors import ConfigError, P2prlError
from p2prl.exits import describe_exit

if TYPE_CHECKING:
    from p2prl.environments import workbench
    from p2prl.environments.spec import Spec

TIMEOUT_S = 600
T = TypeVar("T")
set_option = click.option("--set", "given", multiple=True, metavar="KEY=VALUE", help="A parameter, as TOML writes it.")


@click.group()
def env() -> None:
    """Tasks: what there is, what they ask, what an answer is worth."""


@env.command("list")
@reading
def show_all(ctx: click.Context, as_json: bool) -> None:
    """Every environment on this machine, by SOURCE:NAME."""
    from p2prl.environments import workbench

    found = ask(workbench.ListQuestion(_folders(ctx)), workbench.ListAnswer).environments
    if wants_json(ctx, as_json):
        print_json(found)
    else:
        rows = [(entry.name, entry.version, entry.about) for entry in found]
        click.echo(table(("NAME", "FROM", ""), rows))


@env.command()
@click.argument("name")
@click.option("--count", default=3, show_default=True, type=click.IntRange(1, 100), help="How many prompts.")
@set_option
@reading
def show(ctx: click.Context, name: str, count: int, given: tuple[str, ...], as_json: bool) -> None:
    """What NAME asks: some prompts with right answers, its parameters, a data file's hash."""
    from p2prl.environments import workbench

    found = ask(workbench.ShowQuestion(_spec(ctx, name, given), count), workbench.ShowAnswer)
    if wants_json(ctx, as_json):
        print_json(reply_of(found))
        return
    prompts = "any number of prompts" if found.num_prompts is None else f"{found.num_prompts} training prompts"
    click.echo(safe(f"{found.name}  {found.version}  {prompts}"))
    if found.turns:
        click.echo("it answers back: a recipe sets [environment] max_turns")
    if found.unsafe:
        click.echo(safe(f"not the same everywhere: {found.unsafe}; a recipe needs same_python"))
    if found.data_hash:
        click.echo(f'hash = "{found.data_hash}"')
    for prompt in (*found.prompts, found.held_out):
        kind = "" if prompt in found.prompts else " (held out)"
        click.echo(f"\n--- {prompt.index}{kind}\n{safe(prompt.prompt)}")
        for turn, answer in enumerate(prompt.answers):
            worth = f", worth {prompt.reward}" if turn == len(prompt.answers) - 1 else ""
            click.echo(f"--- right answer{worth}\n{safe(answer)}")
            if turn < len(prompt.said):
                click.echo(f"--- it says\n{safe(prompt.said[turn])}")
    if found.parameters:
        click.echo("\nparameters:\n  " + "\n  ".join(map(safe, found.parameters)))


@env.command()
@click.argument("name")
@click.argument("index", type=click.IntRange(0, 2**53))
@click.argument("answer", nargs=-1, required=True)
@set_option
@reading
def score(
    ctx: click.Context, name: str, index: int, answer: tuple[str, ...], given: tuple[str, ...], as_json: bool
) -> None:
    """What ANSWER to NAME's prompt INDEX is worth, and why; several, a turn each, where NAME answers back.

    An ANSWER that begins with a minus comes after two: env score chain_sum 0 -- -5.
    """
    from p2prl.environments import workbench

    found = ask(workbench.ScoreQuestion(_spec(ctx, name, given), index, answer), workbench.ScoreAnswer)
    if wants_json(ctx, as_json):
        print_json(reply_of(found))
        return
    for said in found.said:
        click.echo(f"--- it says\n{safe(said)}")
    click.echo(f"{found.reward:g}  {safe(found.detail)}")


@env.command()
@click.argument("recipe")
@reading
def check(ctx: click.Context, recipe: str, as_json: bool) -> None:
    """Draw 100 prompts of RECIPE's environment, score right and wrong answers, time it. Exit 1 for a problem."""
    from p2prl import recipe as recipes
    from p2prl.environments import workbench
    from p2prl.environments.spec import spec_of

    home = home_of(ctx)
    chosen, _ = recipes.find(recipe, (home.recipes,))
    spec = spec_of(chosen.environment, recipes.data_folders((home.datasets,)))
    found = ask(workbench.CheckQuestion(spec), workbench.CheckAnswer)
    if wants_json(ctx, as_json):
        print_json(reply_of(found))
    else:
        click.echo(check_text(found))
    if found.problems:
        ctx.exit(1)


def check_text(found: "workbench.CheckAnswer") -> str:
    known = "none is known" if found.reference < 0 else f"{found.reference:.3f} on average"
    known += f", in up to {found.num_turns} turns" if found.num_turns > 1 else ""
    drawn = "  ".join(f"{name} {number}" for name, number in sorted(found.members.items()))
    rows = [
        ("environment", f"{found.name}  {found.version}"),
        ("drawn", drawn),
        ("prompts", f"{found.num_distinct} different, the longest of {found.longest_characters} characters"),
        ("right answers", known),
        ("wrong answers", f"{found.wrong:.3f} on average"),
        ("time", f"{span(found.prompt_s)} a prompt, {span(found.reward_s)} a reward, slowest {span(found.slowest_s)}"),
    ]
    lines = [f"{name:<14} {safe(text)}" for name, text in rows]
    return "\n".join(
        [*lines, *(f"! {safe(problem)}" for problem in found.problems)] if found.problems else [*lines, "ok"]
    )


def ask(question: msgspec.Struct, kind: type[T]) -> T:
    """The child's answer. Raises what it failed with."""
    from p2prl.environments.messages import Failed

    try:
        said = msgspec.json.encode(question)
    except UnicodeEncodeError:
        raise ConfigError("what you typed holds bytes that are no UTF-8 text; type it again") from None
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "p2prl.environments.workbench"], input=said,
            capture_output=True, timeout=TIMEOUT_S, check=False,
            env=os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise P2prlError(f"the environment did not answer within {TIMEOUT_S} s; is it hung?") from None
    try:
        reply = msgspec.json.decode(done.stdout, type=kind | Failed)  # pyright: ignore[reportArgumentType]
    except msgspec.MsgspecError:
        last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        said = f"; it said last: {last[0][:300]}" if last else ""
        raise P2prlError(f"the environment's process has no answer ({describe_exit(done.returncode)}){said}") from None
    if isinstance(reply, Failed):
        raise ConfigError(reply.message) if done.returncode == ConfigError.exit_code else P2prlError(reply.message)
    return reply


def reply_of(answer: msgspec.Struct) -> dict[str, Any]:
    """As every command's JSON is: with the schema's number, without the pipe's tag."""
    return {"schema": 1} | {name: value for name, value in msgspec.to_builtins(answer).items() if name != "type"}


def parse_params(given: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE, the value as TOML writes it; what is no TOML is text."""
    found: dict[str, Any] = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--set {item!r} is not KEY=VALUE; write it like --set digits=3")
        try:
            read = tomllib.loads(f"value = {value}")
        except tomllib.TOMLDecodeError:
            read = {"value": value}
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--set {key.strip()} has a value that can't be read: {error}; correct it") from None
        is_text = len(read) > 1 or isinstance(read["value"], (date, time))  # environments take dates as text
        found[key.strip()] = value if is_text else read["value"]
    return found


def checked_params(params: dict[str, Any]) -> dict[str, Any]:
    """What a recipe could have too: JSON would turn what is no finite number into nothing."""
    from p2prl.recipe_values import checked_param

    try:
        return checked_param(params)
    except ValueError as error:
        raise ConfigError(f"a parameter is not usable: {error}; correct it") from None


def _spec(ctx: click.Context, name: str, given: Sequence[str]) -> "Spec":
    from p2prl.environments.spec import Member, Spec

    return Spec((Member(name, params=checked_params(parse_params(given))),), folders=_folders(ctx))


def _folders(ctx: click.Context) -> tuple[str, ...]:
    from p2prl.recipe import data_folders

    return tuple(map(str, data_folders((home_of(ctx).datasets,))))


def safe(text: str) -> str:
    """An environment's words, for a terminal: no control characters but line ends."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)
