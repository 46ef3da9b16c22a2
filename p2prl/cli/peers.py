"""`p2prl peers [PEER]`: the peers this node knows.

In: GET /api/v1/peers. Out: a table, or JSON: an array.
"""

import shutil
import sys

import click
import msgspec

from p2prl.cli.reading import daemon_of, print_json, reading, wants_json
from p2prl.cli.render import peers_text
from p2prl.errors import P2prlError
from p2prl.status import PeerRow


@click.command()
@click.argument("peer", required=False)
@click.option("--sort", type=click.Choice(["latency", "contribution"]), help="Nearest, or most giving, first.")
@reading
def peers(ctx: click.Context, peer: str | None, sort: str | None, as_json: bool) -> None:
    """The peers this node knows; PEER: those whose id or name begins so."""
    rows = daemon_of(ctx).read("/api/v1/peers", list[PeerRow])
    if peer:
        rows = [row for row in rows if row.peer_id.startswith(peer) or row.name.startswith(peer)]
        if not rows:
            raise P2prlError(f"no peer's id or name begins with {peer!r}. See them all: p2prl peers")
    if sort == "latency":
        rows.sort(key=lambda row: float("inf") if row.rtt_s is None else row.rtt_s)
    elif sort == "contribution":
        rows.sort(key=lambda row: -row.groups)
    if wants_json(ctx, as_json):
        print_json(msgspec.json.encode(rows))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        click.echo(peers_text(rows, width) if rows else "no peers yet")
