"""Who finds whom: a node whose bootstraps are dead has joined all the same once somebody dials it."""

import asyncio
from pathlib import Path

import async_solipsism

from p2prl.clock import LoopClock
from p2prl.simulate.life import Life, Place, World
from p2prl.simulate.scenarios import Pace, Scenario
from p2prl.simulate.scripted_ports import WEIGHTS_BYTES, write_version
from p2prl.simulate.swarm import recipe_of
from p2prl.simulate.trace import Recorder
from p2prl.swarm.memory_transport import MemoryNetwork

DEAD = "/memory/gone/p2p/12D3KooWEfY2TmhEWp1scTkNTgGcB6sBdaeicFJXJjeBmUpFMyg8"


def test_a_node_that_was_dialled_has_joined(memory_path: Path) -> None:
    async def program() -> None:
        base_hash = write_version(memory_path / "base", bytes(WEIGHTS_BYTES))
        world = World(
            recipe=recipe_of(Scenario(2, 1.0), base_hash), base_path=memory_path / "base", pace=Pace(), seed=1,
            clock=LoopClock(), network=MemoryNetwork(1), recorder=Recorder(), folder=memory_path,
        )  # fmt: skip
        first, second = Place(world, 0), Place(world, 1)
        lonely = Life(world, first, (DEAD,))
        await asyncio.sleep(10)
        assert not lonely.state.joined and "no_peers" in lonely.state.health
        caller = Life(world, second, (first.address,))
        await asyncio.sleep(10)
        try:
            assert lonely.state.joined and "no_peers" not in lonely.state.health
        finally:
            for life, place in ((lonely, first), (caller, second)):
                await life.kill()
                place.database.close()

    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        runner.run(program())
