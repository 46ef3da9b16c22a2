"""Tokens per second through the worker, beside the bare engine: what lottery, pipe and engine process cost.

In: the recipe `addition`. Out: tokens per second of paired rounds: [through the worker, bare].

    python -m p2prl.bench.generation FD FOLDER

The built-in policy is the hardest case: a batch takes milliseconds, so each millisecond beside it counts. Both sides run
the same batches with the same seeds, threads and niceness, and take turns; who begins alternates.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

from p2prl.bench import bare_engine
from p2prl.bench.measuring import run, say
from p2prl.environments.mixture import own_index
from p2prl.environments.spec import open_environment, spec_of
from p2prl.models.load import load_tokenizer, prepare
from p2prl.node.children import Child
from p2prl.node.rollout_loop import GROUPS_PER_BATCH
from p2prl.recipe import Recipe, data_folders, find
from p2prl.records import Prompt, Version
from p2prl.rollout import messages, worker

NUM_BATCHES = 40  # of a round: a third of a second on a free core
MIN_ROUNDS, MAX_ROUNDS, LONGEST_S = 5, 25, 40.0
THREADS = 1
TIMEOUT_S = 120.0
MAKER = "12D3KooWBench"
Batches = list[tuple[list[Prompt], int]]  # (prompts, seed) of each
ENVIRON = {"OMP_NUM_THREADS": str(THREADS), "TOKENIZERS_PARALLELISM": "false"}


async def measure(folder: Path) -> dict[str, Any]:
    recipe, _ = find("addition")
    setup, load = _prepare(recipe, folder / "models")
    source = Prompts(recipe, folder / "models")
    engine = Child("p2prl.rollout.engine_process", (), messages.Reply, environ=ENVIRON)
    bare = Child("p2prl.bench.bare_engine", (), bare_engine.Reply, environ=ENVIRON)
    try:
        for child in (engine, bare):
            await child.start(setup)
            await child.request(load, timeout_s=TIMEOUT_S)
        version = load(0).version
        pairs: list[list[float]] = []
        shares: list[float] = []
        until = time.monotonic() + LONGEST_S
        for number in range(1 + MAX_ROUNDS):
            batches = source.batches(version, number)
            if number % 2:
                ours, busy = await through_worker(engine, recipe, version, batches)
                reference = await without(bare, recipe, batches)
            else:
                reference = await without(bare, recipe, batches)
                ours, busy = await through_worker(engine, recipe, version, batches)
            if number > 0:  # the first warms both up
                pairs.append([ours, reference])
                shares.append(busy)
            if time.monotonic() > until and len(pairs) >= MIN_ROUNDS:
                break
        say(f"{len(pairs)} paired rounds of {NUM_BATCHES} batches done")
        return {"pairs": pairs, "busy_shares": shares, "num_batches": NUM_BATCHES, "threads": THREADS}
    finally:
        await engine.stop()
        await bare.stop()


class Prompts:
    """The lottery's prompts, encoded before any clock runs."""

    def __init__(self, recipe: Recipe, cache: Path) -> None:
        self._environment = open_environment(spec_of(recipe.environment, data_folders()))
        self._tokenizer = load_tokenizer(recipe.model.source, cache)

    def batches(
        self, version: Version, number: int, num_batches: int = NUM_BATCHES, num_groups: int = GROUPS_PER_BATCH
    ) -> Batches:
        """Those of a round."""
        made = []
        for batch in range(number * num_batches, (number + 1) * num_batches):
            first = batch * num_groups
            draws = worker.next_batch(MAKER, version, range(first, first + num_groups), self._environment.num_prompts)
            prompts = [self._prompt(draw.prompt_index) for draw in draws]
            made.append((prompts, worker.call_seed(bytes(8), first)))
        return made

    def _prompt(self, index: int) -> Prompt:
        text = self._environment.prompt(own_index(self._environment, index))
        return Prompt(index, text, tuple(self._tokenizer.encode_prompt(text)))


async def through_worker(engine: Child, recipe: Recipe, version: Version, batches: Batches) -> tuple[float, float]:
    """(tokens a second, share of the time that the engine generated), by our own clock.

    From the first request until the last batch is ready to be judged; as many batches at once as the rollout loop has in
    work when they are so short.
    """
    sampling, num_answers = recipe.sampling.record(), recipe.sampling.group_size
    waiting = iter(batches)
    num_tokens, busy_s = 0, 0.0

    async def draw() -> None:
        nonlocal num_tokens, busy_s
        for prompts, seed in waiting:
            ids = tuple(prompt.token_ids for prompt in prompts)
            drawn: messages.Generated = await engine.request(
                lambda number, ids=ids, seed=seed: messages.Generate(number, version, ids, num_answers, sampling, seed),
                timeout_s=TIMEOUT_S,
            )
            items = tuple(map(worker.judge_item, prompts, drawn.completions))
            busy_s += drawn.wall_s
            num_tokens += sum(len(answer) for item in items for answer in item.answers)

    started = time.monotonic()
    await asyncio.gather(*(draw() for _ in range(worker.draws_at_once(batch_s=0.0))))
    elapsed_s = time.monotonic() - started
    return num_tokens / elapsed_s, busy_s / elapsed_s


async def without(bare: Child, recipe: Recipe, batches: Batches) -> float:
    """Tokens a second by the bare engine's clock."""
    ids = tuple(tuple(prompt.token_ids for prompt in prompts) for prompts, _ in batches)
    seeds = tuple(seed for _, seed in batches)
    sampling, num_answers = recipe.sampling.record(), recipe.sampling.group_size
    done: bare_engine.RoundDone = await bare.request(
        lambda number: bare_engine.Round(number, ids, seeds, num_answers, sampling), timeout_s=TIMEOUT_S
    )
    return done.num_tokens / done.wall_s


def _prepare(recipe: Recipe, cache: Path) -> tuple[messages.Setup, Any]:
    files = prepare(recipe.model.source, cache, say)
    tokenizer = load_tokenizer(recipe.model.source, cache)
    setup = messages.Setup(
        source=recipe.model.source,
        models_cache=str(cache),
        stop_ids=tuple(tokenizer.stop_ids),
        pad_id=tokenizer.pad_id,
        threads=THREADS,
        stop=recipe.sampling.stop,
    )
    version = Version(0, 0, files.hash)
    return setup, lambda number: messages.Load(number, str(files.weights), version)


if __name__ == "__main__":
    raise SystemExit(run(measure))
