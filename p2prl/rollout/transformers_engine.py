"""Generation with transformers and torch: its own decode loop over a key-value cache.

In: a torch module of the recipe's architecture, prompts. Out: completions with float32 log-probs of the distribution
that was sampled from (after temperature, top-k, top-p).

A prompt is run once and its cache repeated for its answers; finished rows leave the batch at once, so that a few long
answers don't cost a whole batch. The forward runs in the module's dtype (float32 here: its weights are bf16-valued).
One seed, one batch, one torch version and one number of threads give one result.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache

from p2prl.errors import BadRecord, EngineError, StoreError
from p2prl.models.tensors import load_into
from p2prl.records import Completion, Sampling, Segment, Version

MAX_BATCH_TOKENS = 2**16  # cache positions of one batch: rows x (longest prompt + longest answer)


class TransformersEngine:
    """Implements `engine.Engine` for a causal language model of transformers."""

    def __init__(
        self, module: torch.nn.Module, stop_ids: Sequence[int], pad_id: int, *, max_batch_tokens: int = MAX_BATCH_TOKENS
    ) -> None:
        self._module: Any = module.eval().requires_grad_(False)
        self._device = next(module.parameters()).device
        self._stop_ids = torch.tensor(sorted(stop_ids), dtype=torch.long, device=self._device)
        self._pad_id, self._max_batch_tokens = pad_id, max_batch_tokens
        self._version: Version | None = None
        dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        self.name = f"transformers {transformers.__version__} torch {torch.__version__} {dtype}"
        self.vocab_size: int | None = self._module.config.vocab_size

    @property
    def version(self) -> Version | None:
        return self._version

    def load(self, weights: Path, version: Version) -> None:
        try:
            load_into(self._module, weights)
        except (BadRecord, StoreError) as error:  # checked before the first tensor is copied
            raise EngineError(f"can't load {version}: {error}") from error
        self._version = version

    def generate(
        self, prompts: Sequence[Sequence[int]], num_answers: int, sampling: Sampling, seed: int
    ) -> list[list[Completion]]:
        if self._version is None:
            raise EngineError("no weights are loaded yet; send Load first")
        if not all(prompts) or num_answers < 1:
            raise EngineError("every prompt needs at least one token, and one answer at least is to be drawn")
        generator = torch.Generator(self._device).manual_seed(seed)
        completions: list[list[Completion]] = [[] for _ in prompts]
        try:
            with torch.inference_mode():
                for chosen in self._batches(prompts, num_answers, sampling.max_new_tokens):
                    batch = [prompts[position] for position in chosen]
                    rows = self._decode(batch, num_answers, sampling, generator)
                    for order, position in enumerate(chosen):
                        completions[position] = rows[order * num_answers : (order + 1) * num_answers]
        except (RuntimeError, MemoryError, IndexError) as error:  # torch: out of memory, an id outside the vocabulary
            raise EngineError(
                f"generating {len(prompts)} x {num_answers} answers failed: {str(error)[:300]}; "
                "if memory ran out, set fewer groups a batch"
            ) from error
        return completions

    def _batches(self, prompts: Sequence[Sequence[int]], num_answers: int, max_new: int) -> Iterator[list[int]]:
        """Positions of prompts, those of like length together, within the bound on cache positions."""
        chosen: list[int] = []
        for position in sorted(range(len(prompts)), key=lambda position: len(prompts[position])):
            row_tokens = len(prompts[position]) + max_new
            if chosen and (len(chosen) + 1) * num_answers * row_tokens > self._max_batch_tokens:
                yield chosen
                chosen = []
            chosen.append(position)
        if chosen:
            yield chosen

    def _decode(
        self, prompts: list[Sequence[int]], num_answers: int, sampling: Sampling, generator: torch.Generator
    ) -> list[Completion]:
        """Completions in the order prompt 0 answer 0, prompt 0 answer 1, ..."""
        ids, mask = self._padded(prompts)
        padded = not bool(mask.all())
        cache = DynamicCache(config=self._module.config)
        lengths = mask.sum(1)  # [P]
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # [P, T]
        logits = self._forward(ids, mask if padded else None, positions, cache)
        cache.batch_repeat_interleave(num_answers)
        logits, lengths, mask = (part.repeat_interleave(num_answers, 0) for part in (logits, lengths, mask))
        rows = torch.arange(len(logits), device=self._device)
        draw = make_draw(sampling, generator)
        steps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for step in range(sampling.max_new_tokens):
            tokens, logprobs = draw(logits)  # [R], [R]
            steps.append((rows, tokens, logprobs))
            going = (~torch.isin(tokens, self._stop_ids)).nonzero()[:, 0]
            if not len(going) or step + 1 == sampling.max_new_tokens:
                break
            if len(going) < len(rows):
                cache.batch_select_indices(going)
                rows, tokens, lengths, mask = (part[going] for part in (rows, tokens, lengths, mask))
            if padded:
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
            logits = self._forward(tokens[:, None], mask if padded else None, lengths[:, None] + step, cache)
        return _collect(steps, len(prompts) * num_answers, set(self._stop_ids.tolist()))

    def _padded(self, prompts: list[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        longest = max(map(len, prompts))
        ids = [[self._pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(ids, device=self._device), torch.tensor(mask, device=self._device)

    def _forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor, cache: DynamicCache
    ) -> torch.Tensor:
        output = self._module(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


def make_draw(
    sampling: Sampling, generator: torch.Generator
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """logits [R, V] -> tokens [R] and their log-probs [R] under the very distribution they are drawn from."""

    def draw(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = filtered_logprobs(logits, sampling)
        tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
        return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]

    return draw


def filtered_logprobs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Float32 log-probs [R, V] after temperature, top-k and top-p; -inf for what the filters exclude."""
    logprobs = torch.log_softmax(logits.float() / sampling.temperature, -1)
    if 0 < sampling.top_k < logprobs.shape[-1]:
        floor = logprobs.topk(sampling.top_k, -1).values[:, -1:]
        logprobs = torch.log_softmax(logprobs.masked_fill(logprobs < floor, float("-inf")), -1)
    if sampling.top_p < 1.0:
        ordered, order = logprobs.sort(-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()  # the most likely token has 0 before it: always kept
        excluded = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= sampling.top_p)
        logprobs = torch.log_softmax(logprobs.masked_fill(excluded, float("-inf")), -1)
    return logprobs


def _collect(
    steps: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], num_rows: int, stop_ids: set[int]
) -> list[Completion]:
    tokens: list[list[int]] = [[] for _ in range(num_rows)]
    logprobs: list[bytearray] = [bytearray() for _ in range(num_rows)]
    for rows, drawn, values in steps:
        if not bool(torch.isfinite(values).all()):
            raise EngineError("the weights give log-probs that are no finite numbers; load another version")
        raw = values.to("cpu").numpy().astype("<f4").tobytes()
        for order, (row, token) in enumerate(zip(rows.tolist(), drawn.tolist(), strict=True)):
            tokens[row].append(token)
            logprobs[row] += raw[4 * order : 4 * order + 4]
    return [
        Completion(tuple(ids), bytes(values), (Segment(0, len(ids)),), "stop" if ids[-1] in stop_ids else "length")
        for ids, values in zip(tokens, logprobs, strict=True)
    ]
