"""What waits at its maker: said again while nobody trains on it, given up when who trains refuses it."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import async_solipsism

from p2prl import codec
from p2prl.clock import LoopClock
from p2prl.node.verdicts import VerdictBatch
from p2prl.records import Verdict
from p2prl.simulate.life import Life, Place, World
from p2prl.simulate.scenarios import Learning, Pace, Scenario
from p2prl.simulate.scripted_ports import WEIGHTS_BYTES, write_version
from p2prl.simulate.swarm import recipe_of
from p2prl.simulate.trace import Recorder
from p2prl.swarm.memory_transport import MemoryNetwork

Check = Callable[[list[Place], list[Life], Counter], Awaitable[None]]


def three_nodes_that_wait(folder: Path, check: Check) -> None:
    """Three nodes of which each has made its two groups; the learner takes for ever."""

    async def program() -> None:
        heard: Counter[tuple[str, str]] = Counter()

        def observe(at: float, event: str, source: str, target: str, kind: str) -> None:
            if event == "gossip":
                heard[source, kind] += 1

        base_hash = write_version(folder / "base", bytes(WEIGHTS_BYTES))
        world = World(
            recipe=recipe_of(Scenario(3, 1.0, learning=Learning(groups_per_step=2, max_in_flight=2)), base_hash),
            base_path=folder / "base",
            pace=Pace(step_s=600.0),
            seed=1,
            clock=LoopClock(),
            network=MemoryNetwork(1, observer=observe),
            recorder=Recorder(),
            folder=folder,
        )
        places = [Place(world, number) for number in range(3)]
        lives = [Life(world, place, (places[0].address,)) for place in places]
        try:
            await asyncio.sleep(30)
            assert [len(life.state.store.own_waiting()) for life in lives] == [2, 2, 2]
            assert world.recorder.faults == []
            await check(places, lives, heard)
        finally:
            for life, place in zip(lives, places, strict=True):
                await life.kill()
                place.database.close()

    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        runner.run(program())


def test_what_waits_is_announced_again(memory_path: Path) -> None:
    async def check(places: list[Place], lives: list[Life], heard: Counter) -> None:
        made = [life.state.counts.groups for life in lives]
        heard.clear()
        await asyncio.sleep(60)
        assert [life.state.counts.groups for life in lives] == made
        for place in places:
            # Each of the two others hears it every 11 to 19 s.
            assert 2 * 3 <= heard[place.peer, "announce"] <= 2 * 6

    three_nodes_that_wait(memory_path, check)


def test_only_the_leaders_refusal_makes_a_node_give_its_group_up(memory_path: Path) -> None:
    async def check(places: list[Place], lives: list[Life], heard: Counter) -> None:
        leader = lives[0].state.election.leader
        led = next(life for life, place in zip(lives, places, strict=True) if place.peer == leader)
        maker, bystander = (life for life in lives if life is not led)
        kept, refused = maker.state.store.own_waiting()

        async def tell(sender: Life, group_id: bytes, reason: str) -> None:
            batch = codec.encode(VerdictBatch((Verdict(group_id, False, reason),)))
            await sender.state.transport.call(maker.state.me, "verdicts", batch)

        await tell(bystander, kept.id, "wrong_reward")
        await tell(led, kept.id, "quarantined")
        assert [row.id for row in maker.state.store.own_waiting()] == [kept.id, refused.id]
        await tell(led, refused.id, "unknown_version")
        assert [row.id for row in maker.state.store.own_waiting()] == [kept.id]
        made = maker.state.counts.groups
        await asyncio.sleep(5)
        assert maker.state.counts.groups == made + 1, "the place that became free was not used"

    three_nodes_that_wait(memory_path, check)


def test_a_new_leader_asks_everybody_what_it_missed(memory_path: Path) -> None:
    async def check(places: list[Place], lives: list[Life], heard: Counter) -> None:
        leader = next(life for life in lives if life.state.leads)
        waiting = {row.id for life in lives for row in life.state.store.own_waiting()}
        await leader.kill()
        followers = [life for life in lives if life is not leader]
        await asyncio.sleep(12)
        new = next(life for life in followers if life.state.leads)
        known = {header.id for _, header in new.state.wanted.known()}
        assert waiting <= known

    three_nodes_that_wait(memory_path, check)
