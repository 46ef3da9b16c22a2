"""`p2prl run`: the daemon in the foreground.

In: a recipe name, file or nothing; flags. Out: a node that runs until SIGINT or SIGTERM (drains), again (stops now), or,
when started with `--parent-pipe`, until the pipe's other end closes.
"""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import click

from p2prl.errors import ConfigError
from p2prl.paths import Home

INTERRUPTED = 130
ROLES = ("full", "rollout", "learner", "relay")
ENGINES = ("auto", "transformers", "vllm")


@click.command()
@click.argument("recipe", required=False)
@click.option("--role", type=click.Choice(ROLES), help="What this node does; default: full.")
@click.option("--engine", type=click.Choice(ENGINES), help="What generates; default: as config.toml says, else auto.")
@click.option("--join", multiple=True, metavar="MULTIADDR", help="A peer to join through; may be repeated.")
@click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="Override a key of config.toml.")
@click.option("--parent-pipe", type=int, hidden=True, help="End, and remove the home, when this descriptor closes.")
@click.pass_context
def run(
    ctx: click.Context,
    recipe: str | None,
    role: str | None,
    engine: str | None,
    join: tuple[str, ...],
    overrides: tuple[str, ...],
    parent_pipe: int | None,
) -> None:
    """Join a swarm and work in it: generate, train when elected, serve weights.

    RECIPE is a recipe's name or file, or an invite (p2prl://...); without it the configured or last one is used.
    """
    from p2prl import config as configs
    from p2prl.node.disk import check_room

    home = Home.locate(ctx.obj.home if ctx.obj else None)
    check_room(home)
    if role:
        overrides = (*overrides, f"node.role={role}")
    if engine:
        overrides = (*overrides, f"rollout.engine={engine}")
    if join:
        overrides = (*overrides, "swarm.join=" + str([check_address(address) for address in join]))
    settings, origins = configs.load(home.config_file, os.environ, overrides)
    invited = bool(recipe and recipe.startswith("p2prl://"))
    if not invited:
        choose_recipe(home, recipe, settings.node.recipe)  # a misspelt one leaves no home behind
    ensure_home(home)
    if recipe and invited:
        recipe, peers = accept_invite(home, recipe, settings)
        overrides = (*overrides, f"swarm.join={[*settings.swarm.join, *peers]}")
        settings, origins = configs.load(home.config_file, os.environ, overrides)
    chosen, text = choose_recipe(home, recipe, settings.node.recipe)
    (home.state / "last-recipe.toml").write_text(text)
    asyncio.run(_serve(home, settings, origins, (chosen, text), parent_pipe))


def accept_invite(home: Home, text: str, settings) -> tuple[str, tuple[str, ...]]:
    """(file of the invite's recipe, peers to join through). Says once what leaves this machine."""
    from p2prl.identity import Identity
    from p2prl.node.build import make_transport
    from p2prl.node.recipe_exchange import fetch_recipe, known_recipe
    from p2prl.swarm.invites import parse_invite

    invite = parse_invite(text)
    click.echo(
        "joining a swarm: what leaves this machine is its network address, the answers it generates with their "
        f"log-probs, and the node's name. Stored here: {home.state} (answers, versions) and {home.cache} (weights of "
        f"the newest versions, at most {settings.storage.cache / 1e9:.3g} GB)",
        err=True,
    )
    found = known_recipe(invite, home)
    if found is None:
        transport = make_transport(Identity.load(home.identity), home.identity, settings, invite.swarm_id)
        found = asyncio.run(fetch_recipe(transport, invite, lambda text: click.echo(text, err=True)))
    home.recipes.mkdir(parents=True, exist_ok=True)
    path = home.recipes / f"{invite.swarm_id.hex()[:16]}.toml"
    path.write_text(found, "utf-8")
    return str(path), invite.peers


def ensure_home(home: Home) -> None:
    """Folders and a key; says so when the key is new."""
    from p2prl.identity import Identity

    try:
        home.create()
    except OSError as error:
        raise ConfigError(f"can't make the home {home.state}: {error.strerror}; choose another with --home") from None
    if not home.identity.exists():
        Identity.create(home.identity)
        click.echo(f"made {home.identity}: it is your standing in the swarm, back it up; there is no reset", err=True)


def choose_recipe(home: Home, asked: str | None, configured: str):
    """(recipe, its text): the asked one, the configured one, the last one; else ConfigError with the list."""
    from p2prl import recipe as recipes

    last = home.state / "last-recipe.toml"
    name = asked or configured
    if name:
        return recipes.find(name, (home.recipes,))
    if last.is_file():
        return recipes.find(str(last))
    names = ", ".join(sorted(recipes.available((home.recipes,))))
    raise ConfigError(f"which recipe? There are: {names}. For example: p2prl run addition")


def check_address(text: str) -> str:
    from p2prl.swarm.addresses import check

    return check(text)


async def _serve(home: Home, settings, origins: dict[str, str], chosen, parent_pipe: int | None) -> None:
    from p2prl import logs
    from p2prl.node.build import open_node
    from p2prl.node.recipe_exchange import serve_recipe

    recipe, text = chosen
    node = await open_node(home, settings, recipe)
    serve_recipe(node.state, text)
    log = logs.set_up(settings.log.level, file=home.log_file, ring=node.state.events)
    node.control.logs_source, node.control.origins = log, origins
    click.echo(
        f"{node.state.name} runs {recipe.name} (swarm {recipe.swarm_id.hex()[:8]}), role {settings.node.role}. "
        f"Page: {node.url} (log in by: {home.command} web). Stop: Ctrl-C, or {home.command} stop",
        err=True,
    )
    loop = asyncio.get_running_loop()
    signals: list[int] = []

    def stop(number: int) -> None:
        signals.append(number)
        node.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    if parent_pipe is not None:
        os.set_blocking(parent_pipe, False)
        loop.add_reader(parent_pipe, lambda: _parent_gone(loop, parent_pipe, node))
    try:
        await node.run()
    finally:
        log.close()
        if parent_pipe is not None:
            _remove(home.state.parent)
    if len(signals) > 1:
        raise click.exceptions.Exit(INTERRUPTED)  # the drain was cut short


def _parent_gone(loop: asyncio.AbstractEventLoop, fd: int, node) -> None:
    if not os.read(fd, 1):
        loop.remove_reader(fd)
        node.stop(0.0)


def _remove(home: Path) -> None:
    """A demo's node takes its home along, and the last one the demo's folder: the demo itself may have been killed."""
    shutil.rmtree(home, ignore_errors=True)
    folder = home.parent
    if folder.name.startswith("p2prl-demo-") and not any(folder.glob("node*")):
        shutil.rmtree(folder, ignore_errors=True)
