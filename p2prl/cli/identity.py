"""`p2prl id`: this node's peer id and name, from its key file; no daemon is needed.

In: state/identity.key. Out: the public half only.
"""

import click

from p2prl.cli.reading import home_of, print_json, reading, wants_json


@click.command("id")
@reading
def show(ctx: click.Context, as_json: bool) -> None:
    """This node's peer id and name."""
    from p2prl.identity import Identity  # cryptography takes a while to load

    home = home_of(ctx)
    identity = Identity.load(home.identity)
    if wants_json(ctx, as_json):
        print_json({"schema": 1, "peer_id": identity.peer_id, "name": identity.name, "file": str(home.identity)})
    else:
        click.echo(f"{identity.peer_id}  {identity.name}")
