"""Measures one engine for `bench rollout`: speed beside the bare engine, loads, memory, agreement with the learner.

In: the plan in FOLDER. Out: a `rollout.Measured` as JSON.

    python -m p2prl.bench.rollout_run FD FOLDER

One process has the engine in it and serves both sides of a round, so that they share weights, threads and state; the
learner's forward runs once that process has ended.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import msgspec
import psutil

from p2prl.bench import bare_engine, rollout
from p2prl.bench.generation import TIMEOUT_S, Batches, Prompts, through_worker
from p2prl.bench.measuring import run, say
from p2prl.bench.rollout import LENGTHS, PLAN, Measured, Plan
from p2prl.models.load import ModelFiles, load_tokenizer, prepare
from p2prl.node.children import Child
from p2prl.recipe import Recipe, find
from p2prl.records import Sampling, Version
from p2prl.rollout import messages

START_S = 600.0
SETTLE_S = 0.3  # until a generation is well under way


async def measure(folder: Path) -> dict[str, Any]:
    plan = msgspec.json.decode((folder / PLAN).read_bytes(), type=Plan)
    recipe, _ = find(plan.recipe)
    sampling = recipe.sampling.model_copy(update={"max_new_tokens": plan.max_new_tokens})
    recipe = recipe.model_copy(update={"sampling": sampling})
    cache = Path(plan.models_cache) if plan.models_cache else folder / "models"
    files = prepare(recipe.model.source, cache, say)
    bench = Bench(plan, recipe, cache, files)
    try:
        await bench.start()
        pairs = await bench.rounds()
        loads_s = [await bench.load(number + 1) for number in range(plan.num_loads)]
        busy_loads_s, num_lost = await bench.busy_loads()
        scored = await bench.answers()
        pss_bytes = bench.memory()
    finally:
        await bench.engine.stop()
    say("the learner's forward over the same answers")
    from p2prl.bench.rollout_score import agreements

    return msgspec.to_builtins(
        Measured(
            bench.name, tuple(pairs), tuple(loads_s), tuple(busy_loads_s), num_lost, pss_bytes,
            agreements(recipe, cache, *scored, LENGTHS), bench.planned,
        )
    )  # fmt: skip


class Bench:
    def __init__(self, plan: Plan, recipe: Recipe, cache: Path, files: ModelFiles) -> None:
        (self._variant,) = plan.variants
        self._plan, self._recipe, self._cache, self._files = plan, recipe, cache, files
        self._prompts = Prompts(recipe, cache)
        self.name = self.planned = ""
        environ = {"OMP_NUM_THREADS": str(plan.threads), "TOKENIZERS_PARALLELISM": "false"}
        self.engine = Child(
            "p2prl.bench.bare_engine", (), bare_engine.Reply,
            environ=environ, stderr=sys.stderr.fileno(), patience_s=15.0,  # what vLLM logs is no part of our JSON
        )  # fmt: skip
        self.engine.on_notice = self._on_notice
        self.version = Version(0, 0, files.hash)

    def _on_notice(self, notice: Any) -> None:
        if isinstance(notice, messages.Planned):
            self.planned = str(notice.plan)

    async def start(self) -> None:
        tokenizer = load_tokenizer(self._recipe.model.source, self._cache)
        setup = messages.Setup(
            source=self._recipe.model.source,
            models_cache=str(self._cache),
            stop_ids=tuple(tokenizer.stop_ids),
            pad_id=tokenizer.pad_id,
            threads=self._plan.threads,
            engine=self._variant.engine,
            dtype=self._variant.dtype,
            group_size=self._recipe.sampling.group_size,
            max_new_tokens=max(self._plan.max_new_tokens, min(LENGTHS[-1], self._longest())),
            most_batch_tokens=2**15,
            stop=self._recipe.sampling.stop,
        )
        self.name = (await self.engine.start(setup, timeout_s=START_S)).name
        await self.load(0)

    def _longest(self) -> int:
        """Tokens of the answers that are scored: the built-in policy has no room for long ones."""
        return self._plan.max_new_tokens if self._recipe.model.source.startswith("builtin:") else LENGTHS[-1]

    async def rounds(self) -> list[rollout.Pair]:
        pairs = []
        for number in range(1 + self._plan.num_rounds):
            batches = self.batches(number, self._plan.num_batches)
            if number % 2:
                ours = await self.timed(self._worker(batches))
                bare = await self.timed(self.bare(batches))
            else:
                bare = await self.timed(self.bare(batches))
                ours = await self.timed(self._worker(batches))
            if number:  # the first warms up
                pairs.append(rollout.Pair(*ours, *bare))
                say(f"round {number}: {ours[0]:.1f} tokens/s, bare {bare[0]:.1f}")
        return pairs

    async def timed(self, side: Awaitable[float]) -> tuple[float, float]:
        """(tokens a second, tokens a second of CPU time): the CPUs of this process, the engine's and all it started."""
        started, before = time.monotonic(), self._cpu_s()
        rate = await side
        return rate, rate * (time.monotonic() - started) / (self._cpu_s() - before)

    def _cpu_s(self) -> float:
        here = psutil.Process()
        times = [one.cpu_times() for one in (here, *here.children(recursive=True))]
        return sum(one.user + one.system for one in times)

    async def _worker(self, batches: Batches) -> float:
        return (await through_worker(self.engine, self._recipe, self.version, batches))[0]

    def batches(self, number: int, count: int) -> Batches:
        return self._prompts.batches(self.version, number, count, self._plan.num_groups)

    async def bare(self, batches: Batches) -> float:
        sampling, num_answers = self._recipe.sampling.record(), self._recipe.sampling.group_size
        ids = tuple(tuple(prompt.token_ids for prompt in prompts) for prompts, _ in batches)
        seeds = tuple(seed for _, seed in batches)
        done: bare_engine.RoundDone = await self.engine.request(
            lambda number: bare_engine.Round(number, ids, seeds, num_answers, sampling), timeout_s=START_S
        )
        return done.num_tokens / done.wall_s

    async def load(self, step: int) -> float:
        """Seconds; the weights are always the base model's, under another version."""
        version = self.version = Version(0, step, self._files.hash)
        started = time.monotonic()
        await self.engine.request(
            lambda number: messages.Load(number, str(self._files.weights), version), timeout_s=TIMEOUT_S
        )
        return time.monotonic() - started

    async def busy_loads(self) -> tuple[list[float], int]:
        """Seconds of loads in mid-answer, and how many answers did not come."""
        seconds, lost = [], 0
        for number in range(self._plan.num_loads):
            ((prompts, seed),) = self.batches(100 + number, 1)
            drawing = asyncio.create_task(self._draw([prompt.token_ids for prompt in prompts], seed))
            await asyncio.sleep(SETTLE_S)
            seconds.append(await self.load(self.version.step + 1))
            drawn = await drawing
            lost += sum(self._recipe.sampling.group_size - len(answers) for answers in drawn.completions)
        return seconds, lost

    async def _draw(self, ids: list, seed: int, sampling: Sampling | None = None) -> messages.Generated:
        how, version = sampling or self._recipe.sampling.record(), self.version
        count = self._recipe.sampling.group_size
        return await self.engine.request(
            lambda number: messages.Generate(number, version, tuple(ids), count, how, seed), timeout_s=TIMEOUT_S
        )

    async def answers(self) -> tuple[list, list, Sampling]:
        """(prompts, their answers, sampling) to be scored by the learner."""
        count = max(1, self._plan.num_scored // self._recipe.sampling.group_size)
        ids = [p.token_ids for p in self._prompts.batches(self.version, 999, 1, count)[0][0]]
        sampling = msgspec.structs.replace(self._recipe.sampling.record(), max_new_tokens=self._longest())
        drawn = await self._draw(ids, 1, sampling)
        return ids, [list(answers) for answers in drawn.completions], sampling

    def memory(self) -> int:
        process = psutil.Process(self.engine.pid)
        return sum(one.memory_full_info().pss for one in (process, *process.children(recursive=True)))


if __name__ == "__main__":
    raise SystemExit(run(measure))
