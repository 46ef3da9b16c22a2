"""The decode loop of the transformers engine: one batch, token by token, over a key-value cache.

In: a module, prompts, sampling, where weights may change between two tokens. Out: completions with float32 log-probs of
the distribution that was sampled from (after temperature, top-k, top-p), each token stamped with its version.

A prompt is run once and its cache repeated for its answers; finished rows leave the batch at once. When the weights
have changed, the cache is made anew by a forward over prompts and tokens so far, so that each further token is drawn
from the new version alone.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from p2prl.errors import EngineError
from p2prl.models.stop_strings import StopStrings
from p2prl.records import Completion, Sampling, Version
from p2prl.rollout.engine import Between
from p2prl.rollout.stamps import MAX_VERSIONS, Stamps

FILL_FLOPS = {"cpu": 2**40, "cuda": 2**46}  # of one forward over prompts: some seconds, then a sign of life
FILL_POSITIONS = 2**13  # at most in one such forward: bounds what its layers hold at once

Draw = Callable[[Tensor], tuple[Tensor, Tensor]]


class Step(NamedTuple):
    """One token each of `rows` [R]."""

    rows: Tensor
    tokens: Tensor
    logprobs: Tensor


class Decoder:
    """`version` tells what the module's weights are now; `versions` gathers what a request was drawn under."""

    def __init__(
        self, module: Any, stop_ids: Tensor, pad_id: int, version: Callable[[], Version | None], stops: StopStrings
    ) -> None:
        self._module, self._stop_ids, self._pad_id, self._version = module, stop_ids, pad_id, version
        self._stops = stops
        flops = 2 * sum(parameter.numel() for parameter in module.parameters())  # of one position
        most = FILL_FLOPS.get(stop_ids.device.type, FILL_FLOPS["cpu"]) // max(flops, 1)
        self._fill_positions = max(1, min(FILL_POSITIONS, most))

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        num_answers: int,
        sampling: Sampling,
        generator: torch.Generator,
        versions: list[Version],
        between: Between,
    ) -> list[Completion]:
        """Completions in the order prompt 0 answer 0, prompt 0 answer 1, ..."""
        ids, mask = self._padded(prompts)
        padded = not bool(mask.all())
        cache, logits = self._fill(ids, mask, padded, between)
        cache.batch_repeat_interleave(num_answers)
        ids, mask, logits = (part.repeat_interleave(num_answers, 0) for part in (ids, mask, logits))
        running, lengths = mask, mask.sum(1)  # of the rows that go on: [R, T + tokens so far], [R]
        rows = torch.arange(len(ids), device=ids.device)
        draw, stamps, steps = make_draw(sampling, generator), Stamps(versions), list[Step]()
        endings = Endings(self._stop_ids, self._stops, len(ids))
        while True:
            version = self._version()
            assert version is not None
            tokens, logprobs = draw(logits)  # [R], [R]
            stamps.add(version)
            steps.append(Step(rows, tokens, logprobs))
            going = endings.going(rows, tokens)
            if not len(going) or len(steps) == sampling.max_new_tokens:
                break
            if len(going) < len(rows):
                cache.batch_select_indices(going)
                rows, tokens, lengths, running = (part[going] for part in (rows, tokens, lengths, running))
            if padded:
                running = torch.cat([running, running.new_ones(len(rows), 1)], 1)
            between(len(versions) < MAX_VERSIONS)
            if self._version() == version:
                positions = lengths[:, None] + len(steps) - 1
                logits = self._forward(tokens[:, None], running if padded else None, positions, cache)
            else:
                del cache  # before the next one is made
                so_far = torch.cat([ids[rows], _tokens_of(rows, steps)], 1)
                whole = torch.cat([mask[rows], mask.new_ones(len(rows), len(steps))], 1)
                cache, logits = self._fill(so_far, whole, padded, between)
        return _collect(steps, stamps, len(ids), endings.stopped)

    def _padded(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        longest, device = max(map(len, prompts)), self._stop_ids.device
        ids = [[self._pad_id] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _fill(self, ids: Tensor, mask: Tensor, padded: bool, between: Between) -> tuple[DynamicCache, Tensor]:
        """The cache of these tokens [R, T], and the logits [R, V] after the last."""
        cache = DynamicCache(config=self._module.config)
        positions = (mask.cumsum(1) - 1).clamp(min=0)  # [R, T]
        width = max(1, self._fill_positions // len(ids))
        logits = ids  # never empty
        for begin in range(0, ids.shape[1], width):
            if begin:
                between(False)
            end = begin + width
            seen = mask[:, :end] if padded else None
            logits = self._forward(ids[:, begin:end], seen, positions[:, begin:end], cache)
        return cache, logits

    def _forward(self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: DynamicCache) -> Tensor:
        output = self._module(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]


class Endings:
    """Which rows end with the token just drawn, by an end token or a stop string; `stopped`: all that did."""

    def __init__(self, stop_ids: Tensor, stops: StopStrings, num_rows: int) -> None:
        self._stop_ids, self._stops = stop_ids, stops
        self._drawn: list[list[int]] = [[] for _ in range(num_rows)]  # only where there are stop strings
        self.stopped: set[int] = set()

    def going(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """The places in `rows` [R] of those that go on after `tokens` [R]."""
        ended = torch.isin(tokens, self._stop_ids)
        if self._stops.strings:
            completed = [self._completes(row, token) for row, token in zip(rows.tolist(), tokens.tolist(), strict=True)]
            ended |= torch.tensor(completed, device=ended.device)
        self.stopped.update(rows[ended].tolist())
        return (~ended).nonzero()[:, 0]

    def _completes(self, row: int, token: int) -> bool:
        self._drawn[row].append(token)
        return self._stops.complete(self._drawn[row])


def make_draw(sampling: Sampling, generator: torch.Generator) -> Draw:
    """logits [R, V] -> tokens [R] and their log-probs [R] under the very distribution they are drawn from."""

    def draw(logits: Tensor) -> tuple[Tensor, Tensor]:
        logprobs = filtered_logprobs(logits, sampling)
        tokens = torch.multinomial(logprobs.exp(), 1, generator=generator)
        return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]

    return draw


def filtered_logprobs(logits: Tensor, sampling: Sampling) -> Tensor:
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


def _tokens_of(rows: Tensor, steps: Sequence[Step]) -> Tensor:
    """What was drawn for `rows` [R], all of which are in every step: [R, steps]. Rows of a step are in order."""
    return torch.stack([step.tokens[torch.searchsorted(step.rows, rows)] for step in steps], 1)


def _collect(steps: Sequence[Step], stamps: Stamps, num_rows: int, stopped: set[int]) -> list[Completion]:
    tokens: list[list[int]] = [[] for _ in range(num_rows)]
    logprobs: list[bytearray] = [bytearray() for _ in range(num_rows)]
    for rows, drawn, values in steps:
        if not bool(torch.isfinite(values).all()):
            raise EngineError("the weights give log-probs that are no finite numbers; load another version")
        raw = values.to("cpu").numpy().astype("<f4").tobytes()
        for order, (row, token) in enumerate(zip(rows.tolist(), drawn.tolist(), strict=True)):
            tokens[row].append(token)
            logprobs[row] += raw[4 * order : 4 * order + 4]
    segments = {length: stamps.segments(length) for length in {len(ids) for ids in tokens}}
    return [
        Completion(tuple(ids), bytes(values), segments[len(ids)], "stop" if row in stopped else "length")
        for row, (ids, values) in enumerate(zip(tokens, logprobs, strict=True))
    ]
