"""Groups to padded tensors, and those to micro-batches.

In: a `StepInput`. Out: `Rows` (prompts with answers, and the objective's batch) and lists of row numbers.

Invariants: a token's age is that of the version that drew it; tokens over the recipe's age are masked, and so is what the
environment gave between turns: it is context; an answer whose parts contradict each other is left out, never the group or
the step; every row is in exactly one micro-batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from p2prl.objectives.batch import Batch
from p2prl.records import Completion, Group, StepInput

# A shorter row than this share of its micro-batch's longest starts a new one, once the batch is worth a forward pass.
_LEAST_FILL = 0.75
_WORTH_TOKENS = 2048


@dataclass(frozen=True)
class Rows:
    """B answers: `ids` [B, T] prompt and answer padded on the right; the batch's tensors [B, A] start at the answer."""

    ids: Tensor
    prompt_length: Tensor  # long [B]
    length: Tensor  # long [B], prompt and answer
    temperature: Tensor  # float [B]
    batch: Batch
    num_dropped: int  # answers that contradict themselves


@dataclass(frozen=True)
class _Row:
    group: int
    prompt: Sequence[int]
    answer: Sequence[int]
    logprobs: numpy.ndarray
    ages: list[int]
    drawn: list[bool]
    reward: float
    temperature: float


def collate(step: StepInput, max_age: int) -> Rows:
    rows: list[_Row] = []
    num_dropped = 0
    for number, (group, ages) in enumerate(zip(step.groups, step.ages, strict=True)):
        made = list(_rows(number, group, ages))
        num_dropped += len(group.trajectories) - len(made)
        rows += made
    return _tensors(rows, max_age, num_dropped)


def micro_batches(length: Sequence[int], budget: int) -> list[list[int]]:
    """Row numbers, sorted by length, of at most `budget` padded tokens each (a row longer than that goes alone)."""
    order = sorted(range(len(length)), key=lambda row: (-length[row], row))
    batches: list[list[int]] = []
    longest = 0
    for row in order:
        current = batches[-1] if batches else []
        full = (len(current) + 1) * longest > budget
        uneven = length[row] < _LEAST_FILL * longest and len(current) * longest >= _WORTH_TOKENS
        if not current or full or uneven:
            longest = max(length[row], 1)
            batches.append([row])
        else:
            current.append(row)
    return batches


def _rows(number: int, group: Group, ages: Sequence[int]) -> Iterator[_Row]:
    for trajectory in group.trajectories:
        completion = trajectory.completion
        spread = _token_ages(completion, ages)
        logprobs = completion.logprobs
        if spread is None or len(logprobs) != 4 * len(completion.token_ids) or not group.prompt_ids:
            continue
        values = numpy.frombuffer(logprobs, "<f4").astype(numpy.float32)
        yield _Row(
            number,
            group.prompt_ids,
            completion.token_ids,
            values,
            spread,
            [part.drawn for part in completion.segments for _ in range(part.num_tokens)],
            trajectory.reward,
            group.sampling.temperature,
        )


def _token_ages(completion: Completion, ages: Sequence[int]) -> list[int] | None:
    spread: list[int] = []
    for segment in completion.segments:
        if segment.version >= len(ages):
            return None
        spread += [ages[segment.version]] * segment.num_tokens
    return spread if len(spread) == len(completion.token_ids) else None


def _tensors(rows: list[_Row], max_age: int, num_dropped: int) -> Rows:
    widest = max((len(row.prompt) + len(row.answer) for row in rows), default=1)
    longest = max((len(row.answer) for row in rows), default=1)
    ids = torch.zeros(len(rows), widest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    age = torch.zeros(len(rows), longest, dtype=torch.long)
    behavior = torch.zeros(len(rows), longest)
    for number, row in enumerate(rows):
        num = len(row.answer)
        ids[number, : len(row.prompt) + num] = torch.tensor([*row.prompt, *row.answer])
        age[number, :num] = torch.tensor(row.ages, dtype=torch.long)
        mask[number, :num] = (age[number, :num] <= max_age) & torch.tensor(row.drawn, dtype=torch.bool)
        behavior[number, :num] = torch.from_numpy(row.logprobs)
    batch = Batch(
        group=torch.tensor([row.group for row in rows], dtype=torch.long),
        mask=mask,
        behavior_logp=behavior,
        reward=torch.tensor([row.reward for row in rows], dtype=torch.float32),
        age=age,
    )
    return Rows(
        ids=ids,
        prompt_length=torch.tensor([len(row.prompt) for row in rows], dtype=torch.long),
        length=torch.tensor([len(row.prompt) + len(row.answer) for row in rows], dtype=torch.long),
        temperature=torch.tensor([row.temperature for row in rows], dtype=torch.float32),
        batch=batch.prepare(),
        num_dropped=num_dropped,
    )
