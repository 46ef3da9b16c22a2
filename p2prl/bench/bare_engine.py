"""The engine with no worker around it: what generation through the worker is measured against.

In: an inherited socket; the very `Setup` of the engine process, then rounds. Out: `Ready`, then tokens and seconds.

    python -m p2prl.bench.bare_engine FD

A round is generated here in one go: no request crosses a pipe inside it, no reply is encoded.
"""

import os
import signal
import sys
import time
from pathlib import Path

import msgspec

from p2prl.pipes import BlockingPipe, PipeClosed
from p2prl.records import Sampling, Tokens
from p2prl.rollout.engine_process import NICENESS, make_engine
from p2prl.rollout.messages import Load, Loaded, Ready, Setup


class Round(msgspec.Struct, frozen=True, tag=True):
    """Batches of prompts, each with its seed."""

    id: int
    batches: tuple[tuple[Tokens, ...], ...]
    seeds: tuple[int, ...]
    num_answers: int
    sampling: Sampling


class RoundDone(msgspec.Struct, frozen=True, tag=True):
    id: int
    num_tokens: int
    wall_s: float


Request = Setup | Load | Round
Reply = Ready | Loaded | RoundDone


def main(fd: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark closes the pipe
    os.nice(NICENESS)  # as the engine process does
    pipe: BlockingPipe[Request] = BlockingPipe.inherited(fd, Request)
    try:
        setup = pipe.receive()
        assert isinstance(setup, Setup)
        engine = make_engine(setup)
        pipe.send(Ready(engine.name))
        while True:
            request = pipe.receive()
            if isinstance(request, Load):
                engine.load(Path(request.path), request.version)
                pipe.send(Loaded(request.id, request.version))
            elif isinstance(request, Round):
                started = time.monotonic()
                num_tokens = 0
                for prompts, seed in zip(request.batches, request.seeds, strict=True):
                    answers = engine.generate(prompts, request.num_answers, request.sampling, seed)
                    num_tokens += sum(len(answer.token_ids) for group in answers for answer in group)
                pipe.send(RoundDone(request.id, num_tokens, time.monotonic() - started))
    except PipeClosed:
        return 0


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
