"""Who finds whom: a node whose bootstraps are dead says so, and has joined all the same once somebody dials it."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import async_solipsism
import pytest

from p2prl import codec
from p2prl.clock import LoopClock
from p2prl.errors import P2prlError
from p2prl.node.membership_loop import MembershipLoop, is_due
from p2prl.node.state import NodeState
from p2prl.records import Hello, PeerInfo
from p2prl.simulate.life import Life, Place, World
from p2prl.simulate.scenarios import Pace, Scenario
from p2prl.simulate.scripted_ports import WEIGHTS_BYTES, write_version
from p2prl.simulate.swarm import recipe_of
from p2prl.simulate.trace import Recorder
from p2prl.swarm.memory_transport import MemoryNetwork
from tests.unit.node.conftest import Told

DEAD = "/memory/gone/p2p/12D3KooWEfY2TmhEWp1scTkNTgGcB6sBdaeicFJXJjeBmUpFMyg8"


@pytest.mark.parametrize(
    ("age_s", "is_news", "due"),
    [(float("inf"), False, True), (4.9, True, False), (5.0, True, True), (14.9, False, False), (15.0, False, True)],
)
def test_our_record_is_renewed_before_it_ends_and_soon_with_a_new_version(
    age_s: float, is_news: bool, due: bool
) -> None:
    assert is_due(100.0, 100.0 - age_s, is_news) is due


async def test_a_record_that_nobody_took_is_put_again(
    make_state: Callable[[], NodeState], monkeypatch: pytest.MonkeyPatch
) -> None:
    state = make_state()
    loop = MembershipLoop(state, (), nobody, fail)
    answers, put = [False, True], list[int]()

    async def taken(key: str, value: bytes, *, ttl_s: float) -> bool:
        put.append(codec.unseal(value, PeerInfo, state.swarm, owner=lambda info: info.peer_id).record.sequence)
        return answers[len(put) - 1]

    monkeypatch.setattr(state.transport, "put", taken)
    assert is_due(state.now(), loop._published_at, False)
    await loop.publish()
    assert is_due(state.now(), loop._published_at, False)
    await loop.publish()
    assert not is_due(state.now(), loop._published_at, True) and put == [1, 2]


async def nobody(address: str) -> Hello | None:
    raise AssertionError(f"{address} is nobody's")


def fail(failure: P2prlError) -> None:
    raise failure


async def test_an_address_of_nobody_is_told_of_once_with_what_to_check(
    make_state: Callable[[], NodeState], told: Told
) -> None:
    state = make_state()
    loop = MembershipLoop(state, (DEAD, f"{DEAD}x", f"{DEAD}y"), nobody, fail)
    for _ in range(3):
        await loop.dial()
    ((level, event, values),) = told
    assert level == "warning" and not state.joined
    assert event == f"no peer answers at {DEAD} (no answer from this address), nor at 2 more addresses"
    assert values["fix"] == (
        "p2prl keeps dialling; check that a node runs there, that the address is right, and the firewalls between"
    )
    assert state.health["no_peers"][1] == event


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
