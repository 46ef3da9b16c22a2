"""The engine with no worker around it: what generation through the worker is measured against.

In: an inherited socket; the very `Setup` of the engine process, then rounds. Out: `Ready`, then tokens and seconds.

    python -m p2prl.bench.bare_engine FD

A round is generated here in one go: no request crosses a pipe inside it, no reply is encoded. All other requests are
served as the engine process serves them, so that one process can be measured both ways.
"""

import asyncio
import os
import signal
import sys
import time
from typing import Any

import msgspec

from p2prl.pipes import BlockingPipe, PipeClosed
from p2prl.records import Sampling, Tokens
from p2prl.rollout import messages, vllm_process
from p2prl.rollout.engine_process import NICENESS, Server, make_engine, prepare_plan
from p2prl.rollout.vllm_engine import answer_seed


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


Request = messages.Request | Round
Reply = messages.Reply | RoundDone


class BareServer(Server):
    def answer(self, request: Any) -> Any:
        if not isinstance(request, Round):
            return super().answer(request)
        started, num_tokens = time.monotonic(), 0
        for prompts, seed in zip(request.batches, request.seeds, strict=True):
            answers = self.engine.generate(prompts, request.num_answers, request.sampling, seed).completions
            num_tokens += sum(len(answer.token_ids) for group in answers for answer in group)
        return RoundDone(request.id, num_tokens, time.monotonic() - started)


class BareVllmServer(vllm_process.Server):
    async def reply(self, request: Any) -> Any:
        if not isinstance(request, Round):
            return await super().reply(request)

        async def count(name: str, prompt: Tokens, seed: int) -> int:
            return sum([len(part.token_ids) async for part in self.engine.parts(name, prompt, request.sampling, seed)])

        started = time.monotonic()
        counts = [
            count(
                f"bare-{request.id}-{batch}-{row}-{answer}",
                prompt,
                answer_seed(seed + row * request.num_answers, answer),
            )
            for batch, (prompts, seed) in enumerate(zip(request.batches, request.seeds, strict=True))
            for row, prompt in enumerate(prompts)
            for answer in range(request.num_answers)
        ]
        num_tokens = sum(await asyncio.gather(*counts))
        return RoundDone(request.id, num_tokens, time.monotonic() - started)


def main(fd: int) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark closes the pipe
    os.nice(NICENESS)  # as the engine process does
    pipe: BlockingPipe[Any] = BlockingPipe.inherited(fd, Request)
    try:
        setup = pipe.receive()
        assert isinstance(setup, messages.Setup)
        found = prepare_plan(setup)
        assert found is not None
        plan, files = found
        pipe.send(messages.Planned(plan))
        if plan.engine == "vllm":
            return vllm_process.run(pipe.detach(), setup, plan, files, BareVllmServer, Request)
        engine = make_engine(setup, plan)
        pipe.send(messages.Ready(engine.name))
        BareServer(engine, pipe, plan).serve()
    except PipeClosed:
        return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1])))
