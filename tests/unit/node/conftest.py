"""A NodeState over an empty home and the memory transport, without a process or a loop."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2prl.buffer.store import Store
from p2prl.clock import SystemClock
from p2prl.config import NodeConfig
from p2prl.events import Ring
from p2prl.node.state import NodeState
from p2prl.paths import Home
from p2prl.recipe import find
from p2prl.records import Version
from p2prl.swarm import election
from p2prl.swarm.head import Chain
from p2prl.swarm.membership import Membership
from p2prl.swarm.memory_transport import MemoryNetwork
from p2prl.swarm.metered_transport import MeteredTransport
from tests import factories
from tests.unit.node.version_nodes import Swarm

Told = list[tuple[str, str, dict[str, object]]]


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A folder in memory where there is one: for nodes under virtual time, who write more in a second than disks like."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="p2prl-", dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    made = Swarm(tmp_path / "swarm")
    yield made
    made.close()


@pytest.fixture
def told() -> Told:
    """What was logged: level, event, values."""
    return []


@pytest.fixture
def make_state(tmp_path: Path, told: Told) -> Iterator[Callable[[], NodeState]]:
    """Each call is another life of one node."""
    stores: list[Store] = []
    home = Home.locate(tmp_path / "home")
    home.create()
    recipe, _ = find("addition")
    key, clock = factories.identity(0), SystemClock()

    def make() -> NodeState:
        for store in stores:
            store.close()
        stores.append(Store.open(home.database, clock.unix(), recipe.swarm_id))
        base = Version(0, 0, bytes.fromhex(recipe.model.hash))
        return NodeState(
            home=home,
            config=NodeConfig(),
            recipe=recipe,
            identity=key,
            boot_id=b"bootboot",
            clock=clock,
            transport=MeteredTransport(MemoryNetwork(0).transport(key.peer_id), clock),
            store=stores[-1],
            events=Ring(),
            base=base,
            base_path=tmp_path / "base",
            chain=Chain(base),
            membership=Membership(key.peer_id, b"bootboot"),
            election=election.ElectionState(key.peer_id, recipe.swarm_id),
            name="tested",
            started_at=clock.unix(),
            log=lambda level, event, values: told.append((level, event, values)),
        )

    yield make
    for store in stores:
        store.close()
