"""`p2prl invite`: what others need to join this swarm.

In: GET /api/v1/status. Out: p2prl://SWARM_ID?peer=MULTIADDR.
"""

import click

from p2prl.cli.reading import daemon_of, print_json, reading, wants_json
from p2prl.errors import P2prlError
from p2prl.status import Status


@click.command()
@reading
def invite(ctx: click.Context, as_json: bool) -> None:
    """What others need to join this swarm: give it to `p2prl run`."""
    status = daemon_of(ctx).read("/api/v1/status", Status)
    if not status.swarm.addresses:
        raise P2prlError(
            "this node has no address for peers yet. Wait until `p2prl status` shows the network, try again"
        )
    if wants_json(ctx, as_json):
        swarm = status.swarm
        print_json({"schema": 1, "invite": status.invite, "swarm": swarm.id, "recipe": swarm.recipe})
    else:
        click.echo(status.invite)
