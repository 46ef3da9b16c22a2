"""The engine process with vLLM in it: any number of requests at work together.

In: the daemon's socket, `Setup`, the plan. Out: `Ready`, then replies as each comes, and `Beat`s while tokens are drawn.

A `Load` is done at once, in mid-answer. It ends when the daemon closes the pipe, and its own children with it.
"""

import asyncio
import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from p2prl.errors import EngineError
from p2prl.models.load import ModelFiles
from p2prl.models.stop_strings import load_stop_strings
from p2prl.pipes import AsyncPipe, PipeClosed
from p2prl.rollout.messages import (
    Beat,
    Failed,
    Generate,
    Generated,
    Load,
    Loaded,
    Outdated,
    Ready,
    Request,
    Setup,
    Stop,
)
from p2prl.rollout.plan import Plan
from p2prl.rollout.vllm_engine import EngineDead, VllmEngine, set_environment
from p2prl.rollout.vllm_weights import Folders, scratch_folder

BEAT_S = 5.0
RELOAD_S = 100.0  # a large model from a slow disk; longer is a hang, and the daemon waits less for one that is silent


def run(
    sock: socket.socket,
    setup: Setup,
    plan: Plan,
    files: ModelFiles,
    server: "type[Server] | None" = None,
    requests: Any = Request,
) -> NoReturn:
    """Serve until the daemon closes the pipe, then end this process. What keeps it from starting is raised."""
    set_environment(setup.threads, Path(setup.models_cache))
    with scratch_folder(Path(setup.models_cache)) as scratch:
        code = asyncio.run(_run(sock, setup, plan, weights_of(setup, files, scratch), server or Server, requests))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to clear up, and Python takes seconds to take vLLM's modules down


def weights_of(setup: Setup, files: ModelFiles, scratch: Path) -> Folders:
    if setup.lora is None or setup.adapters == "merged":
        return Folders(files, scratch, setup.lora)
    from p2prl.rollout.vllm_adapters import Adapters

    return Adapters(files, scratch, setup.lora)


async def _run(
    sock: socket.socket,
    setup: Setup,
    plan: Plan,
    weights: Folders,
    server: "type[Server]",
    requests: Any,
) -> int:
    stops = load_stop_strings(setup.stop, setup.source, Path(setup.models_cache), setup.stop_ids)
    engine = VllmEngine.start(plan, setup.group_size, setup.stop_ids, stops, weights)
    try:
        num_answers = engine.most_answers(setup.max_new_tokens)
        return await server(engine, await AsyncPipe.open(sock, requests), num_answers).serve()
    finally:
        engine.stop()


class Server:
    def __init__(self, engine: VllmEngine, pipe: AsyncPipe[Request], num_answers: int) -> None:
        self.engine, self._pipe, self._num_answers = engine, pipe, num_answers
        self._working: dict[asyncio.Task, int] = {}
        self._dead = asyncio.Event()

    async def serve(self) -> int:
        """0 when the daemon has ended it, 1 when vLLM is dead."""
        await self._pipe.send(Ready(self.engine.name, self.engine.vocab_size, self._num_answers, self.engine.context))
        helpers = [asyncio.create_task(self._beat()), asyncio.create_task(self._dead.wait())]
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait([reading, helpers[1]], return_when=asyncio.FIRST_COMPLETED)
            return 1 if self._dead.is_set() else 0
        finally:
            for task in (*helpers, reading, *self._working):
                task.cancel()
            await asyncio.gather(*helpers, reading, *self._working, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while not isinstance(request := await self._pipe.receive(), Stop):
                task = asyncio.create_task(self._answer(request))
                self._working[task] = request.id if isinstance(request, Generate | Load) else -1
                task.add_done_callback(self._answered)
        except PipeClosed:
            return

    def _answered(self, task: asyncio.Task) -> None:
        """What nobody expected of vLLM (a reload that fails halfway leaves it paused) ends it: a new start helps."""
        self._working.pop(task, None)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, PipeClosed):
            traceback.print_exception(error)
            self._dead.set()

    async def _answer(self, request: Request) -> None:
        number = request.id if isinstance(request, Generate | Load) else -1
        try:
            reply = await self.reply(request)
        except EngineDead as error:
            await self._pipe.send(Failed(str(error), number, fatal=True))
            self._dead.set()
            return
        except EngineError as error:
            reply = Failed(str(error), number)
        await self._pipe.send(reply)

    async def reply(self, request: Request) -> Any:
        engine = self.engine
        match request:
            case Load(id, path, version):
                await engine.load(Path(path), version)
                return Loaded(id, version)
            case Generate(id, version, prompts, num_answers, sampling, seed):
                if engine.version is None:
                    raise EngineError("no weights are loaded yet; send Load first")
                if engine.version != version:
                    return Outdated(id, engine.version)
                started = time.monotonic()
                completions, versions = await engine.generate(version, prompts, num_answers, sampling, seed)
                num_tokens = sum(len(answer.token_ids) for answers in completions for answer in answers)
                wall_s = time.monotonic() - started
                return Generated(id, tuple(map(tuple, completions)), versions, num_tokens, wall_s)
            case _:
                return Failed(f"a {type(request).__name__} is out of place here")

    async def _beat(self) -> None:
        """A sign of life for as long as tokens come or new weights are read: a hung vLLM gives none."""
        before = 0
        while True:
            await asyncio.sleep(BEAT_S)
            paused_at = self.engine.paused_at
            is_reading = paused_at is not None and time.monotonic() - paused_at < RELOAD_S
            if self._working and (self.engine.num_tokens != before or is_reading):
                before = self.engine.num_tokens
                await self._pipe.send(Beat(next(iter(self._working.values()))))
