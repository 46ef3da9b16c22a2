"""The one place where a node is wired: home, identity, store, transport, loops, page.

In: a home, a config, a recipe. Out: a running `Node`; `run` returns when it was asked to stop and has drained.

Order: lock, identity, store, web page (so that progress is seen), network, loops. The end is the reverse.
"""

import asyncio
import contextlib
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

from filelock import FileLock, Timeout

from p2prl import __version__
from p2prl.buffer.admission import REASONS
from p2prl.buffer.standings import Standings
from p2prl.buffer.store import Store
from p2prl.clock import SystemClock
from p2prl.codec import decode
from p2prl.codec import encode as codec_encode
from p2prl.config import NodeConfig, SwarmSection
from p2prl.errors import HomeLocked, P2prlError, PeerError
from p2prl.events import Ring
from p2prl.identity import Identity
from p2prl.learner import messages as learner_messages
from p2prl.metrics import Metrics
from p2prl.node import disk
from p2prl.node.base_model import prepare_base
from p2prl.node.children import Child, open_log
from p2prl.node.control import Control
from p2prl.node.engine_keeper import child_environ, child_threads, engine_child
from p2prl.node.environment_client import EnvironmentClient
from p2prl.node.loops import Loops
from p2prl.node.measures import Measures, sizes_on_disk
from p2prl.node.membership_loop import HELLO
from p2prl.node.ports import Ports
from p2prl.node.restore import restore
from p2prl.node.snapshot import make_status
from p2prl.node.state import NodeState
from p2prl.node.supervisor import end_tasks
from p2prl.paths import Home
from p2prl.recipe import Recipe
from p2prl.records import WIRE_SCHEMA, Hello, Version
from p2prl.status import Status, encode
from p2prl.swarm import election
from p2prl.swarm.head import Chain
from p2prl.swarm.membership import Membership
from p2prl.swarm.metered_transport import MeteredTransport
from p2prl.swarm.transport import Transport
from p2prl.web.app import Door, make_app
from p2prl.web.login import ensure_token
from p2prl.web.server import Server, listen, port_of, url_of

STATUS_S = 1.0
RATE_S = 60  # rounds over which tokens a second are counted
DRAIN_S = 30.0
DISK_S = 30.0


class Node:
    """One daemon. Make it with `open_node`."""

    def __init__(self, state: NodeState, lock: FileLock, web_socket: socket.socket, child_log: IO[bytes]) -> None:
        self.state, self._lock, self._web_socket, self._child_log = state, lock, web_socket, child_log
        self.stopping = asyncio.Event()
        self._drain_s = DRAIN_S
        threads = child_threads(state.config)
        environment = EnvironmentClient(state.recipe, state.home, child_log)
        engine = engine_child(threads, child_log)
        environ = child_environ(threads)
        learner = Child("p2prl.learner.learner_process", (), learner_messages.Reply, environ=environ, stderr=child_log)
        engine.on_death = learner.on_death = self._on_death
        environment.on_death(self._on_death)
        self.failure: P2prlError | None = None
        self.loops = Loops(state, Ports(engine, learner, environment), threads, self._probe, self._on_fatal)
        self.supervisor = self.loops.supervisor
        self.control = Control(state, self.supervisor, self.stop)
        self._server: Server | None = None

    def status(self) -> Status:
        return make_status(self.state, self.supervisor, self.loops.waiting, self.loops.last_step)

    @property
    def url(self) -> str:
        """Of the page."""
        return url_of(self._web_socket)

    def stop(self, timeout_s: float = DRAIN_S) -> None:
        """Begin to drain; a second call ends at once."""
        if self.state.draining:
            self._drain_s = 0.0
        else:
            self._drain_s = timeout_s
        self.state.draining = True
        self.stopping.set()

    async def run(self) -> None:
        """Until `stop`."""
        try:
            if await self._started():
                await self.stopping.wait()
                await self._drain()
        finally:
            await self._close()
        if self.failure is not None:
            raise self.failure

    async def _probe(self, address: str) -> Hello | None:
        """Who answers at an address of our own peer id: asked under a passing identity, since nobody can dial itself."""
        state = self.state
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "identity.key"
            guest = Identity.create(file)
            transport = make_transport(
                guest, file, NodeConfig(swarm=SwarmSection(host="127.0.0.1", port=0)), state.swarm
            )
            await transport.start()
            try:
                (report,) = await transport.join([address])
                if not report.peer:
                    return None
                asking = Hello(guest.peer_id, state.boot_id, state.swarm, "", (WIRE_SCHEMA,), "", state.clock.unix())
                return decode(await transport.call(report.peer, HELLO, codec_encode(asking), timeout_s=3.0), Hello)
            except PeerError:
                return None
            finally:
                await transport.stop()

    def _on_death(self, why: str) -> None:
        if self.state.draining:
            return  # whoever stopped us stopped it too, as systemd does
        self.state.emit("log", level="warning", event="a child died; it is started again when it is needed", why=why)

    def _on_fatal(self, failure: P2prlError) -> None:
        """Found after the start: this node must not run like this."""
        self.failure = failure
        self.stop(0.0)

    async def _started(self) -> bool:
        """False when it was asked to stop before it had begun: there is nothing to drain then."""
        starting = asyncio.create_task(self._start(), name="start")
        stopping = asyncio.create_task(self.stopping.wait(), name="stop while starting")
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting  # raises what it raised
                return True
            return False
        finally:
            await end_tasks([starting, stopping])

    async def _start(self) -> None:
        state = self.state
        door = Door(token=ensure_token(state.home.token), port=port_of(self._web_socket), hosts=state.config.web.hosts)
        app = make_app(self.status, self.control, state.events, state.measures.metrics, door)
        self._server = Server(app, self._web_socket)
        await self._server.start()
        write_node_file(state.home, self.url)
        for code, (level, message, fix, _) in state.health.items():  # found while the home was opened
            state.emit("log", level=level, event=message, code=code, fix=fix)
        await self.loops.start()
        self.supervisor.start("status", self._publish_status)
        self.supervisor.start("disk", self._watch_disk)

    async def _watch_disk(self) -> None:
        """Its room once a second, what lies there now and then."""
        state, next_sizes = self.state, 0.0
        version_bytes = state.base_path.stat().st_size
        while True:
            state.note_room(disk.judge(disk.free_bytes(state.home), version_bytes, state.disk_full))
            if state.now() >= next_sizes:
                state.measures.disk(await asyncio.to_thread(sizes_on_disk, state.home))
                next_sizes = state.now() + DISK_S
            await asyncio.sleep(STATUS_S)

    async def _publish_status(self) -> None:
        state, before, alive = self.state, (0, 0), frozenset[str]()
        drawn = [0]  # tokens by the end of each of the last RATE_S rounds
        while True:
            traffic = state.transport.traffic()
            moved = (sum(traffic.sent.values()), sum(traffic.received.values()))
            state.up_bytes_per_s = (moved[0] - before[0]) / STATUS_S
            state.down_bytes_per_s = (moved[1] - before[1]) / STATUS_S
            before = moved
            drawn = [*drawn[-RATE_S:], state.counts.tokens]
            state.tokens_per_s = (drawn[-1] - drawn[0]) / (STATUS_S * max(1, len(drawn) - 1))
            snapshot = self.status()
            self.control.record(snapshot)
            buffered, capacity = snapshot.training.buffered, state.recipe.learner.groups_per_step
            state.measures.refresh(snapshot, traffic, buffered, capacity)
            state.measures.machine(state.loop_lag_s, state.skew_s)
            state.events.publish("status", encode(snapshot))
            alive, before_alive = state.live() - {state.me}, alive
            for peer in sorted(alive ^ before_alive):
                state.events.publish("peer", encode({"peer_id": peer, "alive": peer in alive}))
            if self.control.logs_source is not None:
                self.control.logs_source.flush()
            await asyncio.sleep(STATUS_S)

    async def _drain(self) -> None:
        """Give the batch in hand a moment to be announced; new ones are not drawn any more."""
        self.state.emit("log", level="info", event="draining")
        deadline = self.state.now() + self._drain_s
        while not self.loops.is_drained:
            if self.state.now() >= deadline or self._drain_s == 0.0:
                return
            await asyncio.sleep(0.05)

    async def _close(self) -> None:
        await self.loops.stop()
        self._child_log.close()
        await self.state.transport.stop()
        self.state.events.close()
        if self._server is not None:
            await self._server.stop()
        self.state.store.close()
        self.state.home.node_file.unlink(missing_ok=True)
        self._lock.release()


async def open_node(home: Home, config: NodeConfig, recipe: Recipe) -> Node:
    """Everything that can fail for the user's reasons fails here, before anything runs."""
    lock = take_lock(home)
    try:
        identity = Identity.load(home.identity)
        base_path = await prepare_base(recipe, home, learns=config.node.role in ("full", "learner"))
        disk.check_room(home, base_path.stat().st_size)
        base = Version(0, 0, bytes.fromhex(recipe.model.hash))
        store = Store.open(home.database, SystemClock().unix(), recipe.swarm_id)
        events = Ring(first_id=int(SystemClock().unix() * 1000))
        child_log = open_log(home)
        boot_id = secrets.token_bytes(8)
        metrics = Metrics(__version__, environment=recipe.environment.name, refusals=tuple(REASONS))
        metrics.start_timestamp.set(SystemClock().unix())

        def on_fault(peer: str, error: PeerError) -> None:
            state.blame(error, peer)

        def is_stopping() -> bool:
            return state.draining

        state = NodeState(
            home=home,
            config=config,
            recipe=recipe,
            identity=identity,
            boot_id=boot_id,
            clock=SystemClock(),
            transport=MeteredTransport(
                make_transport(identity, home.identity, config, recipe.swarm_id, on_fault, is_stopping),
                SystemClock(),
                up=config.swarm.up or None,
                down=config.swarm.down or None,
            ),
            store=store,
            events=events,
            base=base,
            base_path=base_path,
            chain=Chain(base),
            membership=Membership(identity.peer_id, boot_id),
            election=election.ElectionState(identity.peer_id, recipe.swarm_id, voted_term=store.voted_term()),
            name=config.node.name or identity.name,
            started_at=SystemClock().unix(),
            standings=Standings(store.standings()),
            measures=Measures(metrics),
        )
        state.transport.on_fault = on_fault
        restore(state)
        return Node(state, lock, listen(config.web.host, config.web.port), child_log)
    except BaseException:  # goes on; the home must be free again
        lock.release()
        raise


def make_transport(
    identity: Identity,
    identity_file: Path,
    config: NodeConfig,
    swarm: bytes,
    on_fault: Callable[[str, PeerError], None] | None = None,
    is_stopping: Callable[[], bool] | None = None,
) -> Transport:
    from p2prl.swarm.libp2p.transport import Libp2pTransport  # imports hivemind: seconds

    transport = Libp2pTransport(
        identity,
        identity_file,
        host=config.swarm.host,
        port=config.swarm.port,
        prefix=swarm.hex(),
        relay=config.swarm.relay,
    )
    if on_fault is not None:
        transport.on_fault(on_fault)
    if is_stopping is not None:
        transport.stops_while(is_stopping)
    return transport


def take_lock(home: Home) -> FileLock:
    lock = FileLock(home.lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        pid = ""
        with contextlib.suppress(OSError, ValueError):
            pid = f" (pid {json.loads(home.node_file.read_text())['pid']})"
        raise HomeLocked(
            f"another p2prl daemon{pid} holds {home.state}. Stop it ({home.command} stop), or use another --home"
        ) from None
    return lock


def write_node_file(home: Home, url: str) -> None:
    staged = home.node_file.with_suffix(".staged")
    started = SystemClock().unix()
    staged.write_text(json.dumps({"pid": os.getpid(), "url": url, "started_at": started, "version": __version__}))
    staged.rename(home.node_file)
