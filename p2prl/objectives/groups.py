"""Statistics of prompt groups over flat tensors.

In: values [B], the group index of each answer. Out: one value a group, or one an answer.

Invariants: every answer belongs to exactly one group; nothing depends on the order of answers; log space where
probabilities are added.
"""

import torch
from torch import Tensor


def group_index(group: Tensor) -> tuple[int, Tensor]:
    """Any group numbers [B] to (how many groups, index [B] below that)."""
    values, index = torch.unique(group, return_inverse=True)
    return len(values), index


def group_sum(values: Tensor, index: Tensor, number: int) -> Tensor:
    """[number], the sum of the values [B] of each group."""
    return torch.zeros(number, dtype=values.dtype, device=values.device).index_add_(0, index, values)


def group_max(values: Tensor, index: Tensor, number: int) -> Tensor:
    start = torch.full((number,), -torch.inf, dtype=values.dtype, device=values.device)
    return start.scatter_reduce_(0, index, values, "amax")


def group_logsumexp(values: Tensor, live: Tensor, index: Tensor, number: int) -> Tensor:
    """[number], over live members; 0 for a group without any."""
    top = group_max(torch.where(live, values, -torch.inf), index, number)
    top = torch.where(top.isfinite(), top, 0.0)
    total = group_sum(torch.where(live, torch.exp(torch.where(live, values - top[index], 0.0)), 0.0), index, number)
    return top + torch.log(torch.where(total > 0, total, 1.0))


def all_equal(values: Tensor, live: Tensor, index: Tensor, number: int) -> Tensor:
    """bool [number]: every live member has the same value (true of a group without any)."""
    top = group_max(torch.where(live, values, -torch.inf), index, number)
    low = -group_max(torch.where(live, -values, -torch.inf), index, number)
    return top <= low


def group_sd(centred: Tensor, live: Tensor, index: Tensor, number: int) -> Tensor:
    """[number], standard deviation with n - 1 of values [B] whose group mean is 0; 0 for a group of one."""
    size = group_sum(live.to(centred.dtype), index, number)
    square = group_sum(torch.where(live, centred, 0.0).square(), index, number)
    return torch.sqrt(square / (size - 1).clamp(min=1))
