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


def test_a_loop_that_swallows_a_cancellation_ends_all_the_same(virtual_time) -> None:
    """As `wait_for` does in Python 3.11 when its result comes in the same round as the cancellation."""

    async def scenario() -> None:
        supervisor, swallowed = Supervisor(LoopClock(), lambda *_, **__: None), []

        async def loop() -> None:
            while True:
                try:
                    await asyncio.sleep(1e9)
                except asyncio.CancelledError:
                    if swallowed:
                        raise
                    swallowed.append(True)

        supervisor.start("one", loop)
        await asyncio.sleep(0)
        await asyncio.wait_for(supervisor.stop(), 60)
        assert swallowed == [True]

    virtual_time.run(scenario())


def test_a_loop_is_well_again_only_when_it_outlives_its_last_failure(virtual_time) -> None:
    async def scenario() -> None:
        clock = LoopClock()
        supervisor = Supervisor(clock, lambda *_, **__: None)
        broken = True

        async def slow_to_fail() -> None:
            await asyncio.sleep(10)
            if broken:
                raise ValueError("broken")
            await asyncio.Event().wait()

        supervisor.start("slow", slow_to_fail)
        health = supervisor.health["slow"]
        await asyncio.sleep(5)
        assert health.ok
        await asyncio.sleep(5.5)  # failed after 10 s
        failed_at = health.failed_at
        assert not health.ok and abs(clock.unix() - failed_at - 0.5) < 0.01
        await asyncio.sleep(100)  # failed again and again: never well in between
        assert not health.ok and health.restarts > 3 and health.failed_at > failed_at
        broken = False
        await asyncio.sleep(60 + 10 + 12.1)
        assert health.ok
        await supervisor.stop()

    virtual_time.run(scenario())
