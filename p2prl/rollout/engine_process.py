"""The engine process: generation, away from the daemon's loop and memory.

In: an inherited socket; `Setup`, then requests. Out: `Ready`, then a reply to each request. Started as

    python -m p2prl.rollout.engine_process FD

Requests are served in order, but a `Load` overtakes the `Generate`s that still wait, so that answers are drawn under
the newest version. It ends when the daemon closes the pipe.
"""

import os
import select
import signal
import sys
import time
from collections import deque
from pathlib import Path
from typing import Protocol

import msgspec

from p2prl.errors import EngineError, P2prlError
from p2prl.pipes import BlockingPipe, PipeClosed
from p2prl.rollout.engine import Engine
from p2prl.rollout.messages import Failed, Generate, Generated, Load, Loaded, Ready, Reply, Request, Setup, Stop

NICENESS = 5
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
            engine = make_engine(setup)
        except (P2prlError, ImportError, OSError, RuntimeError) as error:
            pipe.send(Failed(f"the engine can't start: {error}", fatal=True))
            return 1
        except MemoryError:
            pipe.send(Failed(f"the engine can't start: {NO_MEMORY}", fatal=True))
            return 1
        pipe.send(Ready(engine.name, getattr(engine, "vocab_size", None)))
        serve(engine, pipe)
    except PipeClosed:
        return 0
    except msgspec.DecodeError as error:
        sys.stderr.write(f"engine: the daemon speaks nonsense: {error}\n")
        return 1
    return 0


def make_engine(setup: Setup) -> Engine:
    """The engine that the setup names, without weights of a version yet."""
    if setup.engine == "scripted":
        from p2prl.rollout.scripted_engine import ScriptedEngine

        return ScriptedEngine()
    if setup.engine != "transformers":
        raise EngineError(f"there is no engine {setup.engine!r}; use transformers")
    import torch

    from p2prl.models.load import load_module
    from p2prl.rollout.transformers_engine import TransformersEngine

    torch.set_num_threads(setup.threads)
    module = load_module(setup.source, Path(setup.models_cache), torch.float32)
    if torch.cuda.is_available():
        module = module.to("cuda")
    return TransformersEngine(module, setup.stop_ids, setup.pad_id)


def serve(engine: Engine, pipe: Pipe) -> None:
    """Answer requests until `Stop` or the end of the pipe (PipeClosed)."""
    queue: deque[Request] = deque()
    while True:
        while not queue or _readable(pipe):
            queue.append(pipe.receive())
        request = take(queue)
        if isinstance(request, Stop):
            return
        pipe.send(answer(engine, request))


def take(queue: deque[Request]) -> Request:
    """Remove what is to be done next: a stop, then the first load, then whatever came first."""
    for urgent in (Stop, Load):
        for request in queue:
            if isinstance(request, urgent):
                queue.remove(request)
                return request
    return queue.popleft()


def answer(engine: Engine, request: Request) -> Reply:
    try:
        match request:
            case Load(id, path, version):
                engine.load(Path(path), version)
                return Loaded(id, version)
            case Generate(id, prompts, num_answers, sampling, seed):
                started = time.monotonic()
                completions = engine.generate(prompts, num_answers, sampling, seed)
                wall_s = time.monotonic() - started
                version = engine.version
                assert version is not None, "generate raises while nothing is loaded"
                num_tokens = sum(len(answer.token_ids) for answers in completions for answer in answers)
                return Generated(id, tuple(map(tuple, completions)), version, num_tokens, wall_s)
            case _:
                return Failed(f"a {type(request).__name__} is out of place here")
    except EngineError as error:
        return Failed(str(error), request.id if isinstance(request, Load | Generate) else -1)
    except MemoryError:
        return Failed(NO_MEMORY, request.id if isinstance(request, Load | Generate) else -1)


def _readable(pipe: Pipe) -> bool:
    return bool(select.select([pipe], [], [], 0)[0])


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
