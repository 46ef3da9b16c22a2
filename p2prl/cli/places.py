"""`p2prl paths` and `p2prl version`: where things are and what runs.

In: the home, the installed packages. Out: lines or JSON. Packages are looked up, never imported.
"""

import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

import click

from p2prl import __version__
from p2prl.cli.reading import home_of, print_json, reading, wants_json

PACKAGES = ("torch", "transformers", "hivemind")


@click.command()
@reading
def paths(ctx: click.Context, as_json: bool) -> None:
    """Where this node keeps its things."""
    home = home_of(ctx)
    names = ("config_file", "identity", "token", "node_file", "database", "checkpoints", "logs")
    names += ("states", "blobs", "models")
    places = {name: str(getattr(home, name)) for name in names}
    if wants_json(ctx, as_json):
        print_json({"schema": 1, **places})
        return
    notes = {
        "identity": "back this up",
        "states": "safe to delete",
        "blobs": "safe to delete",
        "models": "safe to delete",
    }
    for name, place in places.items():
        click.echo(f"{name:<12} {place}" + (f"  ({notes[name]})" if name in notes else ""))


@click.command()
@reading
def version(ctx: click.Context, as_json: bool) -> None:
    """Versions of p2prl and what it stands on."""
    versions = {"p2prl": __version__, "python": platform.python_version()} | {
        name: installed(name) for name in PACKAGES
    }
    if wants_json(ctx, as_json):
        print_json({"schema": 1, **versions})
    else:
        click.echo("\n".join(f"{name:<13} {number}" for name, number in versions.items()))


def installed(name: str) -> str:
    try:
        return version_of(name)
    except PackageNotFoundError:
        return ""
