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
from pathlib import Path

from filelock import FileLock, Timeout

from p2prl import __version__
from p2prl.buffer import admission
from p2prl.buffer.store import Store
from p2prl.clock import SystemClock
from p2prl.codec import decode
from p2prl.codec import encode as codec_encode
from p2prl.config import NodeConfig, SwarmSection
from p2prl.errors import HomeLocked, P2prlError, PeerError, PreflightFailed
from p2prl.events import Ring
from p2prl.identity import Identity
from p2prl.learner import messages as learner_messages
from p2prl.metrics import Metrics
from p2prl.node.base_model import prepare_base
from p2prl.node.children import Child
from p2prl.node.control import Control
from p2prl.node.election_loop import ElectionLoop
from p2prl.node.environment_client import EnvironmentClient
from p2prl.node.membership_loop import HELLO, MembershipLoop
from p2prl.node.receive_loop import ReceiveLoop
from p2prl.node.rollout_loop import RolloutLoop
from p2prl.node.snapshot import make_status
from p2prl.node.state import NodeState
from p2prl.node.supervisor import Supervisor
from p2prl.node.train_loop import TrainLoop
from p2prl.node.weights_loop import WeightsLoop
from p2prl.paths import Home
from p2prl.recipe import Recipe
from p2prl.records import WIRE_SCHEMA, Hello, Version
from p2prl.rollout import messages as rollout_messages
from p2prl.status import Status, encode
from p2prl.swarm import election
from p2prl.swarm.head import Chain
from p2prl.swarm.membership import Membership
from p2prl.swarm.transport import Transport
from p2prl.web.app import Door, make_app
from p2prl.web.login import ensure_token
from p2prl.web.server import Server, listen, port_of, url_of

STATUS_S = 1.0
PRUNE_S = 60.0
KEEP_BODIES_S = 600.0  # of trained groups: a losing branch gives them back
MAX_BODIES_BYTES = 512 * 2**20
DRAIN_S = 30.0


class Node:
    """One daemon. Make it with `open_node`."""

    def __init__(self, state: NodeState, lock: FileLock, web_socket: socket.socket, child_log: int) -> None:
        self.state, self._lock, self._web_socket = state, lock, web_socket
        self.supervisor = Supervisor(state.clock, state.emit)
        self.stopping = asyncio.Event()
        self._drain_s = DRAIN_S
        cores = os.cpu_count() or 1
        threads = state.config.limits.threads or max(1, cores // 2)
        single = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "P2PRL_HOME": ""}
        environ = {name: value for name, value in single.items() if value}
        self.environment = EnvironmentClient(state.recipe, state.home, child_log)
        engine = Child("p2prl.rollout.engine_process", (), rollout_messages.Reply, environ=environ, stderr=child_log)
        learner = Child("p2prl.learner.learner_process", (), learner_messages.Reply, environ=environ, stderr=child_log)
        self._children = (engine, learner)
        self.election = ElectionLoop(state)
        self.weights = WeightsLoop(state)
        self.membership = MembershipLoop(state, state.config.swarm.join, self._probe, self._on_clash)
        self.failure: P2prlError | None = None
        self._receive: ReceiveLoop | None = None
        self._rollout: RolloutLoop | None = None
        self._train: TrainLoop | None = None
        self._engine, self._learner, self._threads = engine, learner, threads
        self.control = Control(state, self.supervisor, self.stop)
        self._server: Server | None = None

    def status(self) -> Status:
        waiting = self._rollout.waiting if self._rollout is not None else ""
        return make_status(self.state, self.supervisor, waiting, self._train.last if self._train is not None else {})

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
            await self._start()
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

    def _on_clash(self, address: str) -> None:
        self.failure = PreflightFailed(
            f"this identity runs elsewhere too, at {address}. Two nodes with one identity disturb each other: stop that "
            "one, or give this one a home and identity of its own (--home)"
        )
        self.stop(0.0)

    async def _start(self) -> None:
        state = self.state
        door = Door(token=ensure_token(state.home.token), port=port_of(self._web_socket), hosts=state.config.web.hosts)
        app = make_app(self.status, self.control, state.events, Metrics(__version__), door)
        self._server = Server(app, self._web_socket)
        await self._server.start()
        url = url_of(self._web_socket)
        write_node_file(state.home, url)
        ready = await self.environment.start()
        rules = admission.rules_of(state.recipe, ready.tokenizer_hash, ready.stop_ids, ready.num_prompts)
        await state.transport.start()
        self._receive = ReceiveLoop(state, self.environment, rules)
        self._rollout = RolloutLoop(state, self.environment, self._receive, self._engine, self._threads)
        self._train = TrainLoop(state, self.weights, self.election, self._receive, self._learner)
        self._train.set_threads(self._threads)
        await self.membership.dial()
        self.supervisor.start("membership", self.membership.run)
        self.supervisor.start("weights", self.weights.run)
        self.supervisor.start("receive", self._receive.run)
        self.supervisor.start("admission", self._receive.run_admission)
        self.supervisor.start("election", self.election.run)
        if state.can_learn:
            self.supervisor.start("train", self._train.run)
        if state.generates:
            self.supervisor.start("rollout", self._rollout.run)
        self.supervisor.start("lag", self._watch_lag)
        self.supervisor.start("status", self._publish_status)
        self.supervisor.start("prune", self._prune)

    async def _watch_lag(self) -> None:
        def report(lag_s: float) -> None:
            self.state.loop_lag_s = lag_s

        await self.supervisor.watch_lag(report)

    async def _publish_status(self) -> None:
        state, before = self.state, (0, 0)
        while True:
            traffic = state.transport.traffic()
            moved = (sum(traffic.sent.values()), sum(traffic.received.values()))
            state.up_bytes_per_s = (moved[0] - before[0]) / STATUS_S
            state.down_bytes_per_s = (moved[1] - before[1]) / STATUS_S
            before = moved
            snapshot = self.status()
            self.control.record(snapshot)
            self.state.events.publish("status", encode(snapshot))
            if self.control.logs_source is not None:
                self.control.logs_source.flush()
            await asyncio.sleep(STATUS_S)

    async def _prune(self) -> None:
        """Keep the store within its bound."""
        while True:
            await asyncio.sleep(PRUNE_S)
            older_than = self.state.clock.unix() - KEEP_BODIES_S
            await asyncio.to_thread(self.state.store.prune, MAX_BODIES_BYTES, older_than)

    async def _drain(self) -> None:
        """Give the batch in hand a moment to be announced; new ones are not drawn any more."""
        self.state.emit("log", level="info", event="draining")
        deadline = self.state.now() + self._drain_s
        while self._rollout is not None and self.state.generates and self._rollout.waiting != "draining":
            if self.state.now() >= deadline or self._drain_s == 0.0 or not self._engine.alive:
                return
            await asyncio.sleep(0.05)

    async def _close(self) -> None:
        await self.supervisor.stop()
        await asyncio.gather(*(child.stop() for child in self._children), self.environment.stop())
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
        base_path = await prepare_base(recipe, home)
        base = Version(0, 0, bytes.fromhex(recipe.model.hash))
        store = Store.open(home.database, SystemClock().unix())
        events = Ring(first_id=int(SystemClock().unix() * 1000))
        child_log = os.open(home.logs / "children.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        boot_id = secrets.token_bytes(8)
        state = NodeState(
            home=home,
            config=config,
            recipe=recipe,
            identity=identity,
            boot_id=boot_id,
            clock=SystemClock(),
            transport=make_transport(identity, home.identity, config, recipe.swarm_id),
            store=store,
            events=events,
            base=base,
            base_path=base_path,
            chain=Chain(base),
            membership=Membership(identity.peer_id, boot_id),
            election=election.ElectionState(identity.peer_id, recipe.swarm_id, voted_term=store.voted_term()),
            name=config.node.name or identity.name,
            started_at=SystemClock().unix(),
        )
        restore(state)
        return Node(state, lock, listen(config.web.host, config.web.port), child_log)
    except BaseException:  # goes on; the home must be free again
        lock.release()
        raise


def make_transport(identity: Identity, identity_file: Path, config: NodeConfig, swarm: bytes) -> Transport:
    from p2prl.swarm.libp2p.transport import Libp2pTransport  # imports hivemind: seconds

    return Libp2pTransport(
        identity,
        identity_file,
        host=config.swarm.host,
        port=config.swarm.port,
        prefix=swarm.hex(),
        relay=config.swarm.relay,
    )


def restore(state: NodeState) -> None:
    """Take up the chain where this home left it: manifests, the newest head whose weights are whole, our groups."""
    from p2prl import codec
    from p2prl.errors import PeerError
    from p2prl.records import GroupHeader, Manifest
    from p2prl.weights.pieces import blob_path

    usable = [codec.ZERO_HASH]
    for manifest_id, data in state.store.manifests():
        try:
            manifest = codec.unseal(data, Manifest, state.swarm).record
            state.chain.add(manifest_id, manifest)
        except PeerError:
            continue  # of another recipe, or its parent is gone: fetched again when needed
        state.manifests[manifest_id], state.sealed_manifests[manifest_id] = manifest, data
        if blob_path(state.home.blobs, manifest.content_hash).is_file():
            usable.append(manifest_id)
    state.head_id = state.chain.best(usable)
    for row in state.store.own_waiting():
        header = GroupHeader(row.id, row.content_bytes, row.version, row.num_answers, row.reward_mean)
        state.wanted.own(state.me, header, state.now())


def take_lock(home: Home) -> FileLock:
    lock = FileLock(home.lock)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        pid = ""
        with contextlib.suppress(OSError, ValueError):
            pid = f" (pid {json.loads(home.node_file.read_text())['pid']})"
        raise HomeLocked(
            f"another p2prl daemon{pid} holds {home.state}. Stop it (p2prl stop), or use another --home"
        ) from None
    return lock


def write_node_file(home: Home, url: str) -> None:
    staged = home.node_file.with_suffix(".staged")
    started = SystemClock().unix()
    staged.write_text(json.dumps({"pid": os.getpid(), "url": url, "started_at": started, "version": __version__}))
    staged.rename(home.node_file)
