"""A loop that fails is started again, alone, and says why."""

import asyncio
import itertools

import async_solipsism
import pytest

from p2prl.clock import LoopClock
from p2prl.node.supervisor import Supervisor


@pytest.fixture
def virtual_time():
    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        yield runner


def test_a_failing_loop_restarts_with_back_off_and_leaves_the_others_alone(virtual_time) -> None:
    async def scenario() -> None:
        starts: list[float] = []
        clock = LoopClock()
        supervisor = Supervisor(clock, lambda *_, **__: None)

        async def failing() -> None:
            starts.append(clock.monotonic())
            raise ValueError("broken")

        async def steady() -> None:
            await asyncio.Event().wait()

        supervisor.start("failing", failing)
        supervisor.start("steady", steady)
        await asyncio.sleep(8)
        gaps = [round(later - earlier) for earlier, later in itertools.pairwise(starts)]
        assert gaps == [1, 2, 4]
        assert supervisor.health["failing"].error == "ValueError: broken"
        assert supervisor.health["steady"].restarts == 0
        await supervisor.stop()

    virtual_time.run(scenario())


def test_stop_ends_every_loop(virtual_time) -> None:
    async def scenario() -> None:
        ended = []
        supervisor = Supervisor(LoopClock(), lambda *_, **__: None)

        async def loop() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        supervisor.start("one", loop)
        supervisor.start("two", loop)
        await asyncio.sleep(0)
        await supervisor.stop()
        assert ended == [True, True]

    virtual_time.run(scenario())
