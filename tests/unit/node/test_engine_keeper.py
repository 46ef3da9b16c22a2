"""What the engine's memory allowed is remembered; a lost GPU is not replaced by the CPU."""

import msgspec
import pytest

from p2prl.errors import P2prlError
from p2prl.exits import KILLED
from p2prl.node.children import ChildDied
from p2prl.node.engine_keeper import MODULE, EngineKeeper
from p2prl.paths import Home
from p2prl.rollout import messages
from p2prl.rollout.plan import GIB, Plan
from tests.unit.node.test_rollout_loop import HeldEngine, make_loop

PLAN = Plan("transformers", "cpu", "float32", GIB, 2 * GIB, 65536, 4096, 8 * GIB)


class Starting(HeldEngine):
    """Says its plan, then is ready, or dies as told."""

    def __init__(self, *plans: Plan, dies: ChildDied | None = None) -> None:
        super().__init__(0.0)
        self.plans, self.dies, self.setups = plans, dies, list[messages.Setup]()

    async def start(self, setup, *, timeout_s: float = 0.0) -> messages.Ready:
        self.setups.append(setup)
        for plan in self.plans:
            self.on_notice(messages.Planned(plan))
        if self.dies:
            raise self.dies
        return messages.Ready("scripted")


@pytest.fixture
async def keeper_of(tmp_path):
    _, state = await make_loop(tmp_path, HeldEngine(0.0), 8)
    yield lambda engine: EngineKeeper(state, engine, 1)
    await state.transport.stop()
    state.store.close()


def bounds(tmp_path) -> dict[str, int]:
    path = Home.locate(tmp_path).state / "engine.json"
    return msgspec.json.decode(path.read_bytes(), type=dict[str, int]) if path.exists() else {}


async def test_config_and_recipe_are_what_the_engine_is_started_with(keeper_of, tmp_path) -> None:
    engine = Starting(PLAN)
    await keeper_of(engine).start((1,), 0)
    (setup,) = engine.setups
    assert (setup.engine, setup.dtype, setup.device, setup.group_size) == ("auto", "auto", "auto", 8)
    assert setup.most_batch_tokens == 0 and bounds(tmp_path) == {}


async def test_a_bound_that_memory_forced_is_kept_over_restarts(keeper_of, tmp_path) -> None:
    less = msgspec.structs.replace(PLAN, batch_tokens=8192)
    await keeper_of(Starting(PLAN, less)).start((1,), 0)
    assert bounds(tmp_path) == {"builtin:addition transformers cpu float32": 8192}
    engine = Starting(PLAN)
    await keeper_of(engine).start((1,), 0)
    assert engine.setups[0].most_batch_tokens == 8192


async def test_a_kill_by_the_system_asks_for_less_and_another_death_does_not(keeper_of, tmp_path) -> None:
    for died in (
        ChildDied("it died (exit code 1)", MODULE),
        ChildDied("it did not start: no answer (it did not end by itself, so it was ended by force)", MODULE),
    ):
        with pytest.raises(ChildDied):
            await keeper_of(Starting(PLAN, dies=died)).start((1,), 0)
        assert bounds(tmp_path) == {}
    with pytest.raises(ChildDied):
        await keeper_of(Starting(PLAN, dies=ChildDied(KILLED, MODULE, killed=True))).start((1,), 0)
    assert set(bounds(tmp_path).values()) == {32768}


async def test_a_kill_of_another_child_says_nothing_of_the_engine(keeper_of, tmp_path) -> None:
    keeper = keeper_of(Starting(PLAN))
    await keeper.start((1,), 0)
    keeper.failed(ChildDied(KILLED, "p2prl.node.environment_process", killed=True))
    keeper.failed(P2prlError(f"a grader's process was {KILLED}"))
    assert bounds(tmp_path) == {}
    keeper.failed(ChildDied(KILLED, MODULE, killed=True))
    assert set(bounds(tmp_path).values()) == {32768}


async def test_a_gpu_that_was_used_must_still_be_there(keeper_of) -> None:
    engine = Starting(msgspec.structs.replace(PLAN, device="cuda"))
    keeper = keeper_of(engine)
    await keeper.start((1,), 0)
    await keeper.start((1,), 0)
    assert [setup.device for setup in engine.setups] == ["auto", "cuda"]


async def test_a_damaged_memory_is_no_obstacle(keeper_of, tmp_path) -> None:
    path = Home.locate(tmp_path).state / "engine.json"
    path.write_bytes(b"{")
    engine = Starting(PLAN, msgspec.structs.replace(PLAN, batch_tokens=4096))
    await keeper_of(engine).start((1,), 0)
    assert engine.setups[0].most_batch_tokens == 0
    assert set(bounds(tmp_path).values()) == {4096}
