"""An invite: the swarm's id and peers to join it through.

In: `p2prl://SWARM_ID?peer=MULTIADDR&peer=...`. Out: an `Invite` with checked addresses, or ConfigError.
"""

import re
from urllib.parse import parse_qs, urlsplit

import msgspec

from p2prl.errors import ConfigError
from p2prl.swarm.addresses import check

SCHEME = "p2prl://"
MAX_PEERS = 16


class Invite(msgspec.Struct, frozen=True):
    swarm_id: bytes
    peers: tuple[str, ...]


def parse_invite(text: str) -> Invite:
    try:
        parts = urlsplit(text.strip())
        query = parse_qs(parts.query, max_num_fields=64)
    except ValueError:
        parts, query = urlsplit(""), {}
    if not text.strip().startswith(SCHEME) or not re.fullmatch(r"[0-9a-f]{64}", parts.netloc):
        raise ConfigError(
            f"{text[:80]!r} is not an invite: it must look like p2prl://SWARM_ID?peer=MULTIADDR with 64 hex digits. "
            "Copy the whole line that `p2prl invite` printed"
        )
    if set(query) - {"peer"}:
        raise ConfigError(f"the invite has unknown parts ({', '.join(sorted(set(query) - {'peer'}))[:80]}); only peer=")
    peers = tuple(check(address) for address in query.get("peer", [])[:MAX_PEERS])
    if not peers:
        raise ConfigError("the invite names no peer to join through; ask for one from a node that listens")
    return Invite(bytes.fromhex(parts.netloc), peers)
