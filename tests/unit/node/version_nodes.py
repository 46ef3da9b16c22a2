"""A learner's home with a chain of versions, and nodes that want them: real files over the memory transport."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from p2prl import codec
from p2prl.buffer.store import Store
from p2prl.clock import Clock, SystemClock
from p2prl.config import NodeConfig
from p2prl.events import Ring
from p2prl.learner.publish import Folders, publish
from p2prl.models.state import state_hash
from p2prl.node.restore import restore
from p2prl.node.state import NodeState
from p2prl.node.versions import Versions
from p2prl.node.weights_loop import WeightsLoop
from p2prl.paths import Home
from p2prl.recipe import find
from p2prl.records import Content, DeltaBase, Manifest, Version
from p2prl.simulate.scripted_ports import write_version
from p2prl.swarm import election
from p2prl.swarm.head import Chain
from p2prl.swarm.membership import Membership
from p2prl.swarm.memory_transport import Conditions, MemoryNetwork
from p2prl.swarm.metered_transport import MeteredTransport
from p2prl.weights.store import path_of
from tests import factories

NUM_WORDS = 20_000
Tell = Callable[[int, Version, Version, list[Content]], list[Content]]


def words(step: int) -> bytes:
    """Weights of a version: each step changes 50 words."""
    values = np.random.default_rng(0).integers(0, 2**16, NUM_WORDS, dtype="<u2")
    for number in range(1, step + 1):
        source = np.random.default_rng(number)
        values[source.integers(0, NUM_WORDS, 50)] ^= 1
    return values.tobytes()


@dataclasses.dataclass
class Node:
    state: NodeState
    loop: WeightsLoop

    @property
    def versions(self) -> Versions:
        return self.loop.versions

    def contents(self) -> set[bytes]:
        return set(self.state.weights.held.contents)

    def steps(self) -> list[int]:
        held = self.state.weights.held.states
        return sorted(m.version.step for m in self.state.manifests.values() if m.version.hash in held)


class Swarm:
    """A learner's home with a chain of versions, and nodes that want them."""

    def __init__(self, folder: Path, clock: Clock | None = None, max_age: int | None = None) -> None:
        self._clock = clock or SystemClock()
        self.folder, self.network = folder, MemoryNetwork(0, Conditions(latency_s=1e-3, jitter_s=0.0))
        folder.mkdir(exist_ok=True)
        base_hash = write_version(folder / "base", words(0))
        recipe, _ = find("addition")
        self.recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"hash": base_hash.hex()})})
        if max_age is not None:
            learner = self.recipe.learner.model_copy(update={"max_age": max_age})
            self.recipe = self.recipe.model_copy(update={"learner": learner})
        self.base = Version(0, 0, base_hash)
        self.manifests: list[tuple[bytes, bytes, Manifest]] = []  # id, sealed
        self._stores: list[Store] = []
        self.learner = self.node(0)

    def node(self, number: int, config: NodeConfig | None = None) -> Node:
        """Each call with a number is another life of that node."""
        key, clock = factories.identity(number), self._clock
        home = Home.locate(self.folder / f"n{number}")
        home.create()
        self._stores.append(Store.open(home.database, clock.unix(), self.recipe.swarm_id))
        state = NodeState(
            home=home,
            config=config or NodeConfig(),
            recipe=self.recipe,
            identity=key,
            boot_id=b"bootboot",
            clock=clock,
            transport=MeteredTransport(self.network.transport(key.peer_id), clock),
            store=self._stores[-1],
            events=Ring(),
            base=self.base,
            base_path=self.folder / "base",
            chain=Chain(self.base),
            membership=Membership(key.peer_id, b"bootboot"),
            election=election.ElectionState(key.peer_id, self.recipe.swarm_id),
            name=f"n{number}",
            started_at=clock.unix(),
            log=lambda level, event, values: None,
        )
        restore(state)
        return Node(state, WeightsLoop(state))

    def grow(
        self, num: int, anchors: Sequence[int] = (), since: dict[int, int] | None = None, tell: Tell | None = None
    ):
        """Versions by the learner; `tell` may replace what a manifest says of its contents."""
        state, folders = self.learner.state, Folders(self.learner.state.home.states, self.learner.state.home.blobs)
        for _ in range(num):
            parent, step = state.head, state.head.step + 1
            froms = [parent, *([self.version((since or {})[step])] if step in (since or {}) else [])]
            bases = [DeltaBase(version, str(state.state_path(version))) for version in froms]
            made = publish(lambda path, step=step: write_version(path, words(step)), folders, bases, step in anchors)
            version, contents = Version(1, step, made.hash), list(made.contents)
            contents = tell(step, parent, version, contents) if tell is not None else contents
            plain = factories.manifest(step, version=version, parent=parent, parent_id=state.head_id)
            manifest = msgspec.structs.replace(plain, contents=tuple(contents))
            sealed = codec.seal(manifest, state.identity, state.swarm)
            self.manifests.append((codec.sealed_id(sealed), sealed, manifest))
            self.teach(self.learner, len(self.manifests))
            state.head_id = self.manifests[-1][0]
            state.weights.open()

    def teach(self, node: Node, num: int | None = None) -> None:
        """Manifests of the chain, as if they had come."""
        for manifest_id, sealed, manifest in self.manifests[:num]:
            if node.state.chain.add(manifest_id, manifest):
                node.state.manifests[manifest_id], node.state.sealed_manifests[manifest_id] = manifest, sealed
                version = manifest.version
                node.state.store.save_manifest(manifest_id, sealed, version.term, version.step)

    def version(self, step: int) -> Version:
        return self.base if step == 0 else self.manifests[step - 1][2].version

    def content(self, step: int, kind: str = "delta") -> Content:
        return next(each for each in self.manifests[step - 1][2].contents if each.kind == kind)

    def file(self, content: Content) -> Path:
        return path_of(self.learner.state.home.blobs, content.content_hash)

    async def connect(self, *nodes: Node) -> None:
        for node in (self.learner, *nodes):
            await node.state.transport.start()
        for node in nodes:
            await node.state.transport.join(list(self.learner.state.transport.addresses()))

    async def newcomer(self, number: int) -> Node:
        """A node that reaches the learner and knows the chain, and has nothing of it."""
        node = self.node(number)
        await self.connect(node)
        self.teach(node)
        return node

    def close(self) -> None:
        for store in self._stores:
            store.close()


async def obtain(swarm: Swarm, node: Node, step: int, *others: Node) -> None:
    holders = tuple(each.state.me for each in (swarm.learner, *others))
    await asyncio.wait_for(node.versions.obtain(swarm.version(step), lambda: holders), 60)


def holds(swarm: Swarm, node: Node, step: int) -> bool:
    """Its file, byte for byte as the learner wrote it."""
    name = swarm.version(step).hash
    path = node.state.weights.state_path(name)
    same = path.is_file() and path.read_bytes() == swarm.learner.state.weights.state_path(name).read_bytes()
    return same and node.state.weights.has_state(name) and state_hash(path) == name
