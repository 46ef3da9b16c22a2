"""A node's real loops beside a peer that drips, lies about sizes or answers nothing, in virtual time."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import async_solipsism
import pytest

from p2prl import codec
from p2prl.buffer.claims import Claims
from p2prl.clock import LoopClock
from p2prl.node import manifests
from p2prl.node.receive_loop import PULL_S
from p2prl.records import Announcement, GroupHeader, Lease, Verdict, Version
from p2prl.simulate.life import Life, Place, World, identity_of
from p2prl.simulate.scenarios import Learning, Pace, Scenario
from p2prl.simulate.scripted_ports import WEIGHTS_BYTES, write_version
from p2prl.simulate.swarm import recipe_of
from p2prl.simulate.trace import Recorder
from p2prl.swarm.memory_transport import MemoryNetwork, MemoryTransport
from p2prl.weights import chain

Check = Callable[[list[Place], list[Life], "Attacker"], Awaitable[None]]


class Attacker:
    """A peer of the same network without any honest loop."""

    def __init__(self, world: World, number: int = 99) -> None:
        self.world, self.key = world, identity_of(99, number)
        self.transport: MemoryTransport = world.network.transport(self.key.peer_id)

    async def join(self, address: str) -> None:
        await self.transport.start()
        assert (await self.transport.join([address]))[0].peer

    async def gossip(self, topic: str, record: Lease | Announcement) -> None:
        await self.transport.publish(topic, codec.seal(record, self.key, self.world.recipe.swarm_id))


def beside_an_attacker(folder: Path, check: Check, *, step_s: float = 0.5) -> None:
    """Two honest nodes that learn, and an attacker in touch with both."""

    async def program() -> None:
        base_hash = write_version(folder / "base", bytes(WEIGHTS_BYTES))
        world = World(
            recipe=recipe_of(Scenario(2, 1.0, learning=Learning(groups_per_step=2, max_in_flight=4)), base_hash),
            base_path=folder / "base",
            pace=Pace(step_s=step_s),
            seed=1,
            clock=LoopClock(),
            network=MemoryNetwork(1),
            recorder=Recorder(),
            folder=folder,
        )
        places = [Place(world, number) for number in range(2)]
        lives = [Life(world, place, (places[0].address,)) for place in places]
        attacker = Attacker(world)
        try:
            await asyncio.sleep(15)
            await attacker.join(places[0].address)
            lives.sort(key=lambda life: not life.state.leads)
            assert lives[0].state.leads and lives[1].state.head.step > 0
            await check(places, lives, attacker)
            assert world.recorder.faults == []
        finally:
            for life, place in zip(lives, places, strict=True):
                await life.kill()
                place.database.close()

    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        runner.run(program())


def a_header(number: int, content_bytes: int) -> GroupHeader:
    return GroupHeader(codec.content_hash(b"never %d" % number), content_bytes, Version(1, 1, bytes(32)), 8, 1.0)


async def drip(peer: str, body: bytes) -> AsyncIterator[bytes]:
    while True:
        yield b"\x00"
        await asyncio.sleep(9.0)


def test_heads_that_never_come_keep_nobody_from_the_leaders(memory_path: Path) -> None:
    async def check(places: list[Place], lives: list[Life], attacker: Attacker) -> None:
        follower = lives[1].state
        sealed: list[bytes] = []

        async def endless_manifests(peer: str, body: bytes) -> AsyncIterator[bytes]:
            while True:  # each is well signed and the parent of the one before as far as anybody can tell
                yield sealed[0]
                await asyncio.sleep(9.0)

        real = follower.sealed_manifests[follower.head_id]
        sealed.append(real)
        attacker.transport.serve_stream("manifests", endless_manifests)
        before = follower.head.step
        for number in range(300):
            head = Version(1, 2**30 + number, codec.content_hash(b"%d" % number))
            lease = Lease(1, attacker.key.peer_id, number, head, codec.content_hash(b"fake %d" % number), 1000, 2**30)
            await attacker.gossip("lease", lease)
            await asyncio.sleep(0.2)
        assert follower.head.step > before + 20, "the follower did not follow its leader"
        assert lives[0].state.head.step - follower.head.step < 40

    beside_an_attacker(memory_path, check)


def test_a_drip_of_bodies_ends_and_so_do_its_tasks(memory_path: Path) -> None:
    async def check(places: list[Place], lives: list[Life], attacker: Attacker) -> None:
        attacker.transport.serve_stream("group", drip)
        receive = lives[0].loops.receive
        assert receive is not None
        await attacker.gossip("announce", Announcement(attacker.key.peer_id, (a_header(1, 1000),)))
        await asyncio.sleep(5)
        assert any(task.get_name().endswith(attacker.key.peer_id) for task in receive._pulls)
        before = lives[0].state.head.step
        await asyncio.sleep(8 * (PULL_S + 40))  # all attempts
        assert not any(task.get_name().endswith(attacker.key.peer_id) for task in receive._pulls)
        assert lives[0].state.head.step > before

    beside_an_attacker(memory_path, check, step_s=10.0)  # many minutes go by


def test_a_body_larger_than_the_recipe_allows_is_not_asked_for(memory_path: Path) -> None:
    async def check(places: list[Place], lives: list[Life], attacker: Attacker) -> None:
        served = 0

        async def endless(peer: str, body: bytes) -> AsyncIterator[bytes]:
            nonlocal served
            while True:
                served += 2**20
                yield bytes(2**20)

        attacker.transport.serve_stream("group", endless)
        await attacker.gossip("announce", Announcement(attacker.key.peer_id, (a_header(1, 2**50),)))
        await asyncio.sleep(15)
        assert served == 0
        await attacker.gossip("announce", Announcement(attacker.key.peer_id, (a_header(2, 1000),)))
        await asyncio.sleep(30)
        assert 0 < served <= 32 * 2**20
        assert lives[0].state.faults.of(attacker.key.peer_id) > 0

    beside_an_attacker(memory_path, check)


def test_makers_that_answer_nothing_do_not_hold_up_the_receive_loop(memory_path: Path) -> None:
    async def check(places: list[Place], lives: list[Life], attacker: Attacker) -> None:
        async def silence(peer: str, body: bytes) -> bytes:
            await asyncio.Event().wait()
            return b""

        silent = [Attacker(attacker.world, number) for number in range(6)]
        for peer in silent:
            peer.transport.serve("verdicts", silence)
            await peer.join(places[0].address)
        receive = lives[0].loops.receive
        assert receive is not None
        asked = []
        to_pull = lives[0].state.wanted.to_pull
        lives[0].state.wanted.to_pull = lambda *args: asked.append(args[0]) or to_pull(*args)  # pyright: ignore
        for peer in silent:
            receive.verdicts.judged(peer.key.peer_id, Verdict(bytes(32), False, "wrong_reward"))
        await asyncio.sleep(20)
        assert len(asked) > 10
        assert max(after - before for before, after in itertools.pairwise(asked)) < 2.0

    beside_an_attacker(memory_path, check)


def test_a_chain_longer_than_one_stream_is_followed_from_its_beginning(
    memory_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifests, "MAX_MANIFESTS", 4)

    async def check(places: list[Place], lives: list[Life], attacker: Attacker) -> None:
        leader = lives[0].state
        assert leader.head.step > 12
        late = Place(attacker.world, 7)
        life = Life(attacker.world, late, (places[0].address,))
        try:
            await asyncio.sleep(15)
            assert life.state.head.step >= leader.head.step - 4
            assert life.state.chain.common_ancestor(life.state.head_id, leader.head_id) == life.state.head_id
        finally:
            await life.kill()
            late.database.close()

    beside_an_attacker(memory_path, check)


def test_files_of_old_versions_go_also_where_versions_were_skipped(memory_path: Path) -> None:
    async def check(places: list[Place], lives: list[Life], attacker: Attacker) -> None:
        network = attacker.world.network
        for _ in range(8):  # the follower hears of no version for a moment, then of the newest
            network.partition([lives[1].state.me], [lives[0].state.me])
            await asyncio.sleep(2)
            network.heal()
            await asyncio.sleep(6)
        for life in lives:
            state = life.state
            assert state.head.step > 60
            states = [path for path in state.home.states.rglob("*") if path.is_file()]
            assert len(states) <= chain.KEEP_ANCHORS + 2  # the head, and one that was read or made just now
            named = {c.content_hash.hex() for manifest in state.manifests.values() for c in manifest.contents}
            contents = {path.name: path.stat().st_size for path in state.home.blobs.rglob("*/[!.]*") if path.is_file()}
            assert contents.keys() <= named
            assert sum(contents.values()) <= 2 * WEIGHTS_BYTES

    beside_an_attacker(memory_path, check)


class Suspicious(Claims):
    """As if a learner had found that one maker's answers are far likelier than it says."""

    def __init__(self, liar: str) -> None:
        super().__init__()
        self._liar = liar

    def drew(self, maker: str, log_ratios: Sequence[float]) -> bool:
        return super().drew(maker, [log_ratio + 12.0 * (maker == self._liar) for log_ratio in log_ratios])


def test_who_claims_what_nobody_draws_is_out_for_hours_and_hears_it(memory_path: Path) -> None:
    async def check(places: list[Place], lives: list[Life], attacker: Attacker) -> None:
        leader, maker = lives[0].state, lives[1].state
        loop = lives[0].loops.train
        assert loop is not None
        loop._claims = Suspicious(maker.me)
        await asyncio.sleep(20)
        assert leader.standings.quarantined(maker.me, leader.clock.unix())
        assert not [row for row in leader.store.admitted_untrained() if row.maker == maker.me]
        assert maker.counts.refused["unlikely_draws"] >= 1
        before = leader.head.step
        await asyncio.sleep(20)
        assert leader.head.step > before, "the others train on"
        newest = [row for row in leader.store.newest_groups(1000) if row.version.step > before]
        assert {row.maker for row in newest} == {leader.me}
        assert not leader.standings.quarantined(maker.me, leader.clock.unix() + 12 * 3600)

    beside_an_attacker(memory_path, check)
