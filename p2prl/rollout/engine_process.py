"""The engine process: generation, away from the daemon's loop and memory.

In: an inherited socket; `Setup`, then requests. Out: `Ready`, then a reply to each request. Started as

    python -m p2prl.rollout.engine_process FD

Requests are served in order, but a `Load` is done at once: before the `Generate`s that still wait, and between two tokens
of the one in work, so that tokens are drawn under the newest version. A `Generate` is begun only under the version it
names. It ends when the daemon closes the pipe, in mid-answer too.
"""

import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from p2prl.errors import EngineError, P2prlError
from p2prl.models.load import ModelFiles
from p2prl.pipes import BlockingPipe, PipeClosed
from p2prl.rollout.engine import Engine
from p2prl.rollout.messages import (
    Beat,
    Failed,
    Generate,
    Generated,
    Load,
    Loaded,
    Outdated,
    Planned,
    Ready,
    Reply,
    Request,
    Setup,
    Stop,
)
from p2prl.rollout.plan import Plan, Wish, decide

NICENESS = 5
ENGINES = ("auto", "transformers", "vllm")
BEAT_S = 5.0  # the daemon takes an engine for hung after some of these without one
NO_MEMORY = "memory ran out; free some, or run a recipe with a smaller model"


class Pipe(Protocol):
    def fileno(self) -> int: ...
    def send(self, record: object) -> None: ...
    def receive(self) -> Request: ...


def main(fd: int) -> int:
    """Serve until the daemon closes the pipe; 1 when it could not start (`Failed` says why)."""
    # Ctrl-C reaches the whole group; the daemon drains, then closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    pipe: BlockingPipe[Request] = BlockingPipe.inherited(fd, Request)
    try:
        setup = pipe.receive()
        if not isinstance(setup, Setup):
            pipe.send(Failed(f"the first message was a {type(setup).__name__}, not a Setup", fatal=True))
            return 1
        try:
            found = prepare_plan(setup)
            plan = found[0] if found else None
            if found:
                pipe.send(Planned(found[0]))
            if found and found[0].engine == "vllm":
                from p2prl.rollout import vllm_process

                return vllm_process.run(pipe.detach(), setup, *found)
            engine = make_engine(setup, plan)
        except (P2prlError, ImportError, OSError, RuntimeError, ValueError) as error:
            pipe.send(Failed(f"the engine can't start: {error}", fatal=True))
            return 1
        except MemoryError:
            pipe.send(Failed(f"the engine can't start: {NO_MEMORY}", fatal=True))
            return 1
        context = getattr(engine, "context", None)
        pipe.send(Ready(engine.name, getattr(engine, "vocab_size", None), context=context))
        Server(engine, pipe, plan).serve()
    except PipeClosed:
        return 0
    except msgspec.DecodeError as error:
        sys.stderr.write(f"engine: the daemon speaks nonsense: {error}\n")
        return 1
    return 0


def prepare_plan(setup: Setup) -> tuple[Plan, ModelFiles] | None:
    """What to load and how, and the model's files; None for an engine without a model. Raises ConfigError."""
    if setup.engine == "scripted":
        return None
    if setup.engine not in ENGINES:
        raise EngineError(f"there is no engine {setup.engine!r}; use one of {', '.join(ENGINES)}")
    from p2prl.models.load import prepare
    from p2prl.rollout.machine import describe, measure

    files = prepare(setup.source, Path(setup.models_cache), lambda _: None)
    wish = Wish(setup.engine, setup.dtype, setup.group_size, setup.max_new_tokens, setup.most_batch_tokens)
    return decide(wish, measure(setup.device), describe(files)), files


def make_engine(setup: Setup, plan: Plan | None) -> Engine:
    """The engine of the plan, in this process, without weights of a version yet."""
    if plan is None:
        from p2prl.rollout.scripted_engine import ScriptedEngine

        return ScriptedEngine()
    import torch

    from p2prl.models.load import load_module
    from p2prl.models.stop_strings import load_stop_strings
    from p2prl.rollout.transformers_engine import TransformersEngine

    torch.set_num_threads(setup.threads)
    cache = Path(setup.models_cache)
    module = load_module(setup.source, cache, getattr(torch, plan.dtype)).to(plan.device)
    stops = load_stop_strings(setup.stop, setup.source, cache, setup.stop_ids)
    return TransformersEngine(
        module, setup.stop_ids, setup.pad_id, lora=setup.lora, batch_tokens=plan.batch_tokens, stops=stops
    )


class _Stopped(Exception):
    """`Stop` came while the engine was at work."""


class Server:
    """Answers requests until `Stop` or the end of the pipe (PipeClosed)."""

    def __init__(
        self, engine: Engine, pipe: Pipe, plan: Plan | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.engine, self._pipe, self._plan, self._clock = engine, pipe, plan, clock
        self._queue: deque[Request] = deque()
        self._beaten_at = 0.0

    def serve(self) -> None:
        try:
            while True:
                while not self._queue or _readable(self._pipe):
                    self._queue.append(self._pipe.receive())
                request = take(self._queue)
                if isinstance(request, Stop):
                    return
                self._pipe.send(self.answer(request))
        except _Stopped:
            return

    def answer(self, request: Request) -> Reply:
        try:
            match request:
                case Load(id, path, version):
                    self.engine.load(Path(path), version)
                    return Loaded(id, version)
                case Generate():
                    return self._generate(request)
                case _:
                    return Failed(f"a {type(request).__name__} is out of place here")
        except EngineError as error:
            return Failed(str(error), request.id if isinstance(request, Load | Generate) else -1)
        except MemoryError:
            return Failed(NO_MEMORY, request.id if isinstance(request, Load | Generate) else -1)

    def _generate(self, request: Generate) -> Reply:
        loaded = self.engine.version
        if loaded is not None and loaded != request.version:
            return Outdated(request.id, loaded)
        started = self._beaten_at = self._clock()
        completions, versions = self.engine.generate(
            request.prompts,
            request.num_answers,
            request.sampling,
            request.seed,
            lambda may_load: self._between(request.id, may_load),
        )
        wall_s = self._clock() - started
        self._tell_of_less()
        num_tokens = sum(len(answer.token_ids) for answers in completions for answer in answers)
        return Generated(request.id, tuple(map(tuple, completions)), versions, num_tokens, wall_s)

    def _tell_of_less(self) -> None:
        """Memory ran out, and the engine went on with smaller batches: the daemon remembers their size."""
        plan, batch_tokens = self._plan, getattr(self.engine, "batch_tokens", None)
        if plan is not None and batch_tokens is not None and batch_tokens < plan.batch_tokens:
            self._plan = msgspec.structs.replace(plan, batch_tokens=batch_tokens, why="memory ran out with more")
            self._pipe.send(Planned(self._plan))

    def _between(self, number: int, may_load: bool) -> None:
        """Within a generation: a sign of life, and the loads that came meanwhile."""
        now = self._clock()
        if now - self._beaten_at >= BEAT_S:
            self._beaten_at = now
            self._pipe.send(Beat(number))
        while _readable(self._pipe):
            self._queue.append(self._pipe.receive())
        if any(isinstance(request, Stop) for request in self._queue):
            raise _Stopped
        while may_load and any(isinstance(request, Load) for request in self._queue):
            self._pipe.send(self.answer(take(self._queue)))


def take(queue: deque[Request]) -> Request:
    """Remove what is to be done next: a stop, then the first load, then whatever came first."""
    for urgent in (Stop, Load):
        for request in queue:
            if isinstance(request, urgent):
                queue.remove(request)
                return request
    return queue.popleft()


def _readable(pipe: Pipe) -> bool:
    return bool(select.select([pipe], [], [], 0)[0])


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
