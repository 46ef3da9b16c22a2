"""One node of a simulated swarm: its place (home, key, store), which outlives it, and its lives, one after the other.

In: the swarm's recipe, clock and network. Out: the node's real loops (`node/loops.py`) over scripted ports.

Invariant: a killed life writes nothing more and says nothing more; the next one finds only what was written.
"""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from p2prl.buffer.database import MEMORY, Database
from p2prl.buffer.standings import Standings
from p2prl.buffer.store import Store
from p2prl.clock import Clock
from p2prl.config import NodeConfig, NodeSection, SwarmSection
from p2prl.errors import P2prlError
from p2prl.events import Ring
from p2prl.identity import Identity
from p2prl.node.loops import Loops
from p2prl.node.ports import Ports
from p2prl.node.restore import restore
from p2prl.node.state import NodeState
from p2prl.paths import Home
from p2prl.recipe import Recipe
from p2prl.records import Hello, Version
from p2prl.simulate.scenarios import Pace
from p2prl.simulate.scripted_ports import EngineScript, LearnerScript, ScriptedChild, ScriptedEnvironment
from p2prl.simulate.trace import Fault, Recorder
from p2prl.swarm import election
from p2prl.swarm.head import Chain
from p2prl.swarm.membership import Membership
from p2prl.swarm.memory_transport import MemoryNetwork
from p2prl.swarm.metered_transport import MeteredTransport

DRAIN_S = 30.0
RING_EVENTS = 64


@dataclass(frozen=True)
class World:
    """What all nodes of a swarm share."""

    recipe: Recipe
    base_path: Path
    pace: Pace
    seed: int
    clock: Clock
    network: MemoryNetwork
    recorder: Recorder
    folder: Path


class Place:
    """What a node keeps between its lives."""

    def __init__(self, world: World, number: int) -> None:
        self.number = number
        self.identity = identity_of(world.seed, number)
        self.home = Home.locate(world.folder / f"node{number}")
        self.home.states.mkdir(parents=True)
        self.home.blobs.mkdir(parents=True)
        self.database = Database(MEMORY)
        self.num_lives = 0
        self.past = Totals()  # of the lives that ended
        self.life: Life | None = None

    @property
    def peer(self) -> str:
        return self.identity.peer_id

    @property
    def address(self) -> str:
        return address_of(self.peer)

    def totals(self) -> "Totals":
        """Over all lives."""
        return self.past if self.life is None else self.past.plus(self.life.state)

    def end_life(self) -> None:
        self.past, self.life = self.totals(), None


@dataclass(frozen=True)
class Totals:
    made: int = 0
    refused: tuple[tuple[str, int], ...] = ()
    sent: tuple[tuple[str, int], ...] = ()

    def plus(self, state: NodeState) -> "Totals":
        return Totals(
            self.made + state.counts.groups,
            added(self.refused, state.counts.refused_here),
            added(self.sent, state.transport.traffic().sent),
        )


class Life:
    """From a start to a kill or a stop."""

    def __init__(self, world: World, place: Place, bootstraps: tuple[str, ...]) -> None:
        self._world, self._place = world, place
        place.num_lives += 1
        config = NodeConfig(
            node=NodeSection(name=f"node {place.number}"),
            swarm=SwarmSection(join=tuple(address for address in bootstraps if address != place.address)),
        )
        boot = blake3(b"boot %d %d %d" % (world.seed, place.number, place.num_lives)).digest(length=8)
        store = Store(place.database)
        now, base = world.clock.unix(), Version(0, 0, bytes.fromhex(world.recipe.model.hash))
        peer, swarm = place.peer, world.recipe.swarm_id
        self.state = NodeState(
            home=place.home,
            config=config,
            recipe=world.recipe,
            identity=place.identity,
            boot_id=boot,
            clock=world.clock,
            transport=MeteredTransport(world.network.transport(peer), world.clock),
            store=store,
            events=Ring(RING_EVENTS),
            base=base,
            base_path=world.base_path,
            chain=Chain(base),
            membership=Membership(peer, boot),
            election=election.ElectionState(peer, swarm, voted_term=store.voted_term()),
            name=config.node.name,
            started_at=now,
            log=self._log,
            standings=Standings(store.standings()),
        )
        restore(self.state)
        pace = world.pace
        self.engine = ScriptedChild("engine", lambda setup: EngineScript(setup, pace))
        self.learner = ScriptedChild("learner", lambda setup: LearnerScript(setup, pace, base))
        ports = Ports(self.engine, self.learner, ScriptedEnvironment(pace))
        self.loops = Loops(self.state, ports, 1, self._probe, self._on_fatal)
        self._starting = asyncio.create_task(self._start(), name=f"start node {place.number}")

    async def kill(self) -> None:
        """At once, in the middle of whatever it does."""
        self._world.network.crash(self._place.peer)
        await self._end()

    async def leave(self) -> None:
        """As on SIGTERM: the batch in hand is announced, then it stops."""
        self.state.draining = True
        deadline = self.state.now() + DRAIN_S
        while not self.loops.is_drained:
            if self.state.now() >= deadline:
                break
            await asyncio.sleep(0.05)
        await self._end()
        await self.state.transport.stop()

    def freeze(self) -> None:
        self.engine.freeze()
        self.learner.freeze()

    def thaw(self) -> None:
        self.engine.thaw()
        self.learner.thaw()

    async def _start(self) -> None:
        try:
            await self.loops.start()
        except P2prlError as error:
            self._log("error", "the node could not start", {"why": str(error)})

    async def _end(self) -> None:
        self._starting.cancel()
        await asyncio.gather(self._starting, return_exceptions=True)
        await self.loops.stop()

    async def _probe(self, address: str) -> Hello | None:
        return None  # nobody in a simulation runs a second node with the same key

    def _on_fatal(self, error: P2prlError) -> None:
        self._log("error", "the node wants to end", {"why": str(error)})

    def _log(self, level: str, event: str, values: dict[str, object]) -> None:
        if level in ("error", "critical"):
            why = str(values.get("why", ""))
            self._world.recorder.faults.append(Fault(self.state.now(), self._place.number, event, why))
        elif level == "warning":
            self._world.recorder.warned(str(values.get("code", event)))


def identity_of(seed: int, number: int) -> Identity:
    return Identity.from_seed(blake3(b"simulated node %d %d" % (seed, number)).digest())


def address_of(peer: str) -> str:
    return f"/memory/{peer}/p2p/{peer}"


def added(totals: tuple[tuple[str, int], ...], more: dict[str, int]) -> tuple[tuple[str, int], ...]:
    table = dict(totals)
    for name, count in more.items():
        table[name] = table.get(name, 0) + count
    return tuple(sorted(table.items()))
