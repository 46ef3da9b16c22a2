"""The vLLM process beyond vLLM: what it says and when it ends, over a real socket pair."""

import asyncio
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from p2prl.errors import EngineError
from p2prl.pipes import AsyncPipe
from p2prl.records import Version
from p2prl.rollout import vllm_process
from p2prl.rollout.messages import Beat, Failed, Load, Loaded, Ready, Reply, Request, Stop
from p2prl.rollout.vllm_engine import EngineDead
from p2prl.rollout.vllm_process import Server
from tests import factories


class Engine:
    """Takes weights, or fails as it is told."""

    name, vocab_size, context, num_tokens, version = "fake", 16, 64, 0, None
    paused_at: float | None = None

    def __init__(self, failure: BaseException | None = None) -> None:
        self._failure = failure

    async def load(self, weights: Path, version: Version) -> float:
        if self._failure is not None:
            raise self._failure
        return 0.0


async def served(failure: BaseException | None, *requests: object) -> tuple[int, list[Any]]:
    """The exit code and what was said, once it ended or `Stop` was sent."""
    ours, theirs = socket.socketpair()
    pipe: AsyncPipe[Any] = await AsyncPipe.open(ours, Reply)
    server = Server(Engine(failure), await AsyncPipe.open(theirs, Request), 4)  # pyright: ignore[reportArgumentType]
    serving = asyncio.create_task(server.serve())
    said = [await pipe.receive()]
    for request in requests:
        await pipe.send(request)
        if isinstance(request, Load) and not isinstance(failure, RuntimeError):
            said.append(await pipe.receive())
    code = await asyncio.wait_for(serving, 10)
    pipe.close()
    server._pipe.close()
    return code, said


LOAD = Load(7, "weights", factories.version(1))


async def test_while_weights_are_read_it_gives_signs_of_life_for_as_long_as_that_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_process, "BEAT_S", 0.01)
    monkeypatch.setattr(vllm_process, "RELOAD_S", 0.2)
    ours, theirs = socket.socketpair()
    pipe: AsyncPipe[Any] = await AsyncPipe.open(ours, Reply)
    engine, read = Engine(), asyncio.Event()

    async def load(weights: Path, version: Version) -> float:
        engine.paused_at = time.monotonic()
        await read.wait()
        return 0.0

    monkeypatch.setattr(engine, "load", load)
    server = Server(engine, await AsyncPipe.open(theirs, Request), 4)  # pyright: ignore[reportArgumentType]
    serving = asyncio.create_task(server.serve())
    assert isinstance(await pipe.receive(), Ready)
    await pipe.send(LOAD)
    said = [await asyncio.wait_for(pipe.receive(), 10)]
    with suppress(TimeoutError):
        while len(said) < 1000:
            said.append(await asyncio.wait_for(pipe.receive(), 0.5))
    assert set(said) == {Beat(LOAD.id)} and len(said) < 1000, "then it counts as hung"
    read.set()
    assert await asyncio.wait_for(pipe.receive(), 10) == Loaded(LOAD.id, LOAD.version)
    await pipe.send(Stop())
    assert await asyncio.wait_for(serving, 10) == 0
    pipe.close()
    server._pipe.close()


async def test_it_loads_and_ends_when_it_is_told() -> None:
    assert await served(None, LOAD, Stop()) == (0, [Ready("fake", 16, 4, 64), Loaded(7, LOAD.version)])


async def test_weights_that_do_not_fit_are_told_of_and_it_goes_on() -> None:
    code, said = await served(EngineError("of another model"), LOAD, Stop())
    assert code == 0 and said[1] == Failed("of another model", 7)


async def test_a_dead_vllm_is_told_of_and_ends_it() -> None:
    code, said = await served(EngineDead("gone"), LOAD)
    assert code == 1 and said[1] == Failed("gone", 7, fatal=True)


async def test_what_nobody_expected_ends_it_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM tells of a reload that failed by a plain exception, and stays paused."""
    code, _ = await served(RuntimeError("Call to reload_weights failed"), LOAD)
    assert code == 1 and "Call to reload_weights failed" in capsys.readouterr().err
