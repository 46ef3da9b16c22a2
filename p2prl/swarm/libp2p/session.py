"""One life of p2pd and of the DHT node on top of it: launched, then closed for good.

In: settings. Out: a `Session` that the calls, streams, topics and directory run over. A closed session leaves no
process and no socket of ours behind, also when its launch was cancelled half-way.
"""

# hivemind has no types: its attributes begin as None and its protobuf modules are made at import.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hivemind.dht import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from hivemind.utils.multiaddr import Multiaddr

from p2prl.errors import ConfigError, PreflightFailed, Unreachable
from p2prl.identity import Identity
from p2prl.swarm import addresses
from p2prl.swarm.libp2p.validator import PublisherValidator

# What hivemind raises when the network fails; TimeoutError is an OSError, IncompleteReadError an EOFError.
NETWORK_ERRORS = (P2PDaemonError, P2PHandlerError, OSError, EOFError)
LAUNCH_TIMEOUT_S = 60.0
MAX_CACHED_RECORDS = 2000
MAX_STORED_KEYS = 20_000
_EXIT_S = 1.0


@dataclass(frozen=True)
class Settings:
    identity: Identity
    identity_file: Path
    host: str
    port: int
    announce: tuple[str, ...]
    relay: bool

    @property
    def loopback(self) -> bool:
        return addresses.is_loopback(self.host)

    @property
    def listen(self) -> str:
        return f"/{'ip6' if ':' in self.host else 'ip4'}/{self.host}/tcp/{self.port}"

    def at_port(self, port: int) -> "Settings":
        return replace(self, port=port)


class Session:
    """A running p2pd with its DHT node."""

    def __init__(self, p2p: P2P, node: DHTNode, announced: Sequence[str]) -> None:
        self.p2p, self.node = p2p, node
        self.announced = tuple(announced)

    @property
    def pid(self) -> int:
        return self.p2p._child.pid

    async def died(self) -> None:
        """Return when p2pd has ended, for whatever reason."""
        await self.p2p._child.wait()

    async def connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A fresh control connection to p2pd. The caller closes the writer, and keeps it while it reads."""
        return await self.p2p._client.control.daemon_connector.open_connection()

    async def dial(self, address: str, timeout_s: float) -> None:
        peer = PeerID.from_base58(addresses.peer_of(address))
        route = Multiaddr(address.rsplit("/p2p/", 1)[0])
        await asyncio.wait_for(self.p2p._client.connect(peer, [route]), timeout_s)

    async def close(self) -> None:
        self.node.is_alive = False
        tasks = [
            self.node.cache_refresh_task,
            *self.p2p._client.control._handler_tasks.values(),
        ]
        for task in tasks:
            if task is not None:
                task.cancel()
        await _end(self.p2p)


async def launch(settings: Settings) -> Session:
    """Start p2pd and its DHT node. Raises PreflightFailed when the port is taken or the identity unusable."""
    _check_identity(settings)
    _check_port(settings)
    begun: list[P2P] = []

    class Daemon(P2P):  # local: hivemind's own class stays as it is for others in this process
        def __init__(self) -> None:
            super().__init__()
            self._daemon_listen_maddr = self._client_listen_maddr = {"unix": None}  # until `create` sets them
            begun.append(self)

        @staticmethod
        def _make_process_args(*args: object, **kwargs: object) -> list[str]:
            return [
                *P2P._make_process_args(*args, **kwargs),
                "-pubsub=1",
                "-pubsubSignStrict=1",
            ]

    try:
        p2p = await Daemon.create(
            host_maddrs=[settings.listen],
            announce_maddrs=[a.rsplit("/p2p/", 1)[0] for a in settings.announce] or None,
            identity_path=str(settings.identity_file),
            check_if_identity_free=False,  # it starts a second p2pd and knows RSA keys only
            nat_port_map=not settings.loopback,
            auto_nat=not settings.loopback,
            use_relay=settings.relay,
            use_auto_relay=settings.relay and not settings.loopback,
            startup_timeout=LAUNCH_TIMEOUT_S,
        )
        if str(p2p.peer_id) != settings.identity.peer_id:
            raise PreflightFailed(
                f"p2pd took {settings.identity_file} for another peer, {p2p.peer_id}. Replace the file"
            )
        session = Session(p2p, await _dht(p2p, settings), await visible(p2p, settings))
    except PreflightFailed:
        await _end_all(begun)
        raise
    except (*NETWORK_ERRORS, ValueError) as error:
        await _end_all(begun)
        raise PreflightFailed(
            f"can't start the network on {settings.listen}: {str(error)[:300]}. Check swarm.port and swarm.announce"
        ) from None
    except asyncio.CancelledError:
        await asyncio.shield(_end_all(begun))
        raise
    return session


async def _dht(p2p: P2P, settings: Settings) -> DHTNode:
    node = await DHTNode.create(
        p2p=p2p,
        node_id=DHTID.generate(source=p2p.peer_id.to_bytes()),  # the same after a restart: no stale twin in the tables
        record_validator=PublisherValidator(settings.identity),
        cache_size=MAX_CACHED_RECORDS,
        parallel_rpc=64,
        reuse_get_requests=False,  # one search that hangs would hang all later ones of its key
        ensure_bootstrap_success=False,
        strict=False,
    )
    node.protocol.storage.maxsize = MAX_STORED_KEYS
    return node


async def visible(p2p: P2P, settings: Settings, *, latest: bool = False) -> tuple[str, ...]:
    """The addresses to announce: those the user gave, else what p2pd sees, without loopback where it has others."""
    if settings.announce:
        return settings.announce
    found: list[str] = []
    for maddr in await p2p.get_visible_maddrs(latest=latest):
        with contextlib.suppress(ConfigError):
            found.append(addresses.check(str(maddr)))
    public = [a for a in found if not addresses.is_loopback(a)]
    return tuple(found if settings.loopback or not public else public)


def peer_bytes(peer: str) -> PeerID:
    try:
        return PeerID.from_base58(peer)
    except ValueError:
        raise Unreachable(f"{peer[:64]!r} is not a peer id") from None


def _check_identity(settings: Settings) -> None:
    try:
        found = Identity.load(settings.identity_file)
    except ConfigError as error:
        raise PreflightFailed(str(error)) from None
    if found.peer_id != settings.identity.peer_id:
        raise PreflightFailed(f"{settings.identity_file} holds another key than this node's. Restore the right file")


def _check_port(settings: Settings) -> None:
    """p2pd shares a port with another p2pd of the same user without a word: ask the kernel first."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
            probe.listen(1)
        except OSError as error:
            raise PreflightFailed(
                f"can't listen on {settings.host} port {settings.port}: {error.strerror}. "
                "Stop what uses it, or choose another: --set swarm.port=PORT (0: any free one)"
            ) from None


async def _end_all(begun: list[P2P]) -> None:
    for p2p in begun:
        await _end(p2p)


async def _end(p2p: P2P) -> None:
    """Terminate p2pd, kill it if it lingers, remove its sockets."""
    tasks = [p2p._reader_task, p2p._listen_task]
    if p2p._client is not None:
        tasks += [p2p._client.control._read_task, p2p._client.control._write_task]
    p2p._terminate()
    child = p2p._child
    if child is not None and child.returncode is None:
        try:
            await asyncio.wait_for(child.wait(), _EXIT_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), _EXIT_S)
    running = [task for task in tasks if task is not None]
    if running:
        await asyncio.wait(running, timeout=_EXIT_S)
    for maddr in (p2p._daemon_listen_maddr, p2p._client_listen_maddr):
        with contextlib.suppress(OSError, TypeError):
            os.remove(maddr["unix"])
