"""Text to checked multiaddr: the one importer of `multiaddr`; elsewhere an address is a `str`.

In: addresses from config, invites and peers. Out: the canonical text, its peer, its TCP endpoint; ConfigError else.

An address names a host (ip4, ip6 or dns), a TCP port and an Ed25519 peer id; a relayed one goes on with p2p-circuit
and the peer behind the relay.
"""

from ipaddress import ip_address

from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from p2prl.errors import ConfigError
from p2prl.identity import is_peer_id

MAX_ADDRESS_CHARS = 512
_EXAMPLE = "Example: /ip4/203.0.113.7/tcp/7001/p2p/12D3KooW..."
_HOSTS = frozenset({"ip4", "ip6", "dns", "dns4", "dns6"})
_DIRECT = ("tcp", "p2p")
_RELAYED = ("tcp", "p2p", "p2p-circuit", "p2p")


def check(text: str) -> str:
    """The address in canonical form. Raises ConfigError that says what is wrong with it."""
    parts = _parts(text)
    names = tuple(name for name, _ in parts)
    if not names or names[0] not in _HOSTS:
        raise _wrong(text, "it must begin with /ip4, /ip6 or /dns and a host")
    if names[1:2] != ("tcp",):
        raise _wrong(text, "after the host it needs /tcp and a port")
    if parts[1][1] == "0":
        raise _wrong(text, "port 0 can't be dialled")
    if names[1:] not in (_DIRECT, _RELAYED):
        if "p2p" not in names:
            raise _wrong(text, "it lacks the peer's id: /p2p/PEER_ID at its end")
        raise _wrong(
            text,
            "only HOST/tcp/PORT/p2p/PEER_ID, or that of a relay plus /p2p-circuit/p2p/PEER_ID, is known",
        )
    for name, value in parts:
        if name == "p2p" and not is_peer_id(value):
            raise _wrong(
                text,
                f"{value[:64]} is not an Ed25519 peer id (they begin with 12D3KooW)",
            )
    return "".join(f"/{name}/{value}" if value else f"/{name}" for name, value in parts)


def peer_of(text: str) -> str:
    """The peer an address leads to. Raises ConfigError when the address is wrong."""
    return check(text).rsplit("/", 1)[1]


def is_loopback(text: str) -> bool:
    """Whether an address, or a bare host name, leads to this machine only."""
    host = text
    if text.startswith("/"):
        parts = _parts(text)
        host = parts[0][1] if parts else ""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def is_relayed(text: str) -> bool:
    return "/p2p-circuit" in text


def tcp_endpoint(text: str) -> tuple[str, int] | None:
    """The host and port to connect to first (a relay's for a relayed address); None when there is no TCP in it."""
    parts = _parts(text)
    if len(parts) < 2 or parts[0][0] not in _HOSTS or parts[1][0] != "tcp":
        return None
    return parts[0][1], int(parts[1][1])


def _parts(text: str) -> list[tuple[str, str]]:
    if len(text) > MAX_ADDRESS_CHARS:
        raise _wrong(text, f"it is longer than {MAX_ADDRESS_CHARS} characters")
    if not text.isascii():
        raise _wrong(text, "only ASCII is allowed")
    try:
        return [(protocol.name, value or "") for protocol, value in Multiaddr(text).items()]
    except (MultiaddrError, ValueError) as error:
        raise _wrong(text, str(error).split(": ", 1)[-1].split(" (string", 1)[0][:160]) from None


def _wrong(text: str, why: str) -> ConfigError:
    return ConfigError(f"can't use the address {text[:120]!r}: {why}. {_EXAMPLE}")
