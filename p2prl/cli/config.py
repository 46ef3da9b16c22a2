"""`p2prl config show`: the configuration and where each value comes from: a running daemon's, else the resolved one.

In: config.toml, the environment. Out: TOML-like lines, or JSON: an array of {key, value, origin}.
"""

import os

import click
import msgspec

from p2prl.cli.reading import daemon_of, home_of, print_json, reading, wants_json
from p2prl.cli.render import plain, table
from p2prl.errors import NoDaemon
from p2prl.status import ConfigValue


@click.group()
def config() -> None:
    """The configuration and where each value comes from."""


@config.command()
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@reading
def show(ctx: click.Context, origin: bool, as_json: bool) -> None:
    """Print every key with its value."""
    values = resolved(ctx)
    if wants_json(ctx, as_json):
        print_json(values)
    elif origin:
        click.echo(table(("KEY", "VALUE", "ORIGIN"), [(each.key, _toml(each.value), each.origin) for each in values]))
    else:
        for each in values:
            click.echo(f"{each.key} = {plain(_toml(each.value))}")


def resolved(ctx: click.Context) -> list[ConfigValue]:
    from p2prl import config as node_config  # pydantic takes a while to load

    try:  # a running daemon knows its --set and its environment
        return daemon_of(ctx).read("/api/v1/config", list[ConfigValue])
    except NoDaemon:
        loaded, origins = node_config.load(home_of(ctx).config_file, os.environ)
    values = loaded.model_dump(mode="json")
    return [
        ConfigValue(key=key, value=values[key.partition(".")[0]][key.partition(".")[2]], origin=origin)
        for key, origin in origins.items()
    ]


def _toml(value: object) -> str:
    return msgspec.json.encode(value).decode()
