"""Baselines that make a group's gradient least variable (VCPO, arXiv 2602.17616).

In: a prepared batch with score norms, the weight omega that really multiplies each score in the loss. Out: R - b [B].

b_g = sum(W R) / sum(W) over the group's live members, W_i = (omega_i ||score_i||)^2: the constant that minimises the
second moment of the group's gradient. Leave-one-out takes the sums without answer i, so that b_i does not depend on it.

Invariants: equal rewards and groups of one give exactly 0; a group whose W sum to 0 or are not finite gets the plain
mean; W is divided by the group's largest before squaring, so that nothing under- or overflows.
"""

import torch
from torch import Tensor

from p2prl.objectives.batch import Batch, require_whole_groups
from p2prl.objectives.groups import group_index, group_max, group_sum


def least_variance_advantage(
    batch: Batch, omega: Tensor, *, leave_one_out: bool = False, length_norm: bool = True
) -> Tensor:
    """R - b [B]. `omega` [B]; the score is s_i / T_i, or s_i without `length_norm`; `batch.score_norm` is ||s_i||.

    BatchError when the batch is a part that cuts a group.
    """
    assert batch.score_norm is not None and batch.advantage is not None
    require_whole_groups(batch)
    live = batch.live
    number, index = group_index(batch.group)
    size = omega * batch.score_norm / (batch.length if length_norm else 1.0)
    size = torch.where(live, size, 0.0)
    # The advantage, not the reward, is averaged: the same baseline, and exactly 0 for equal rewards.
    shift = (_without_self if leave_one_out else _weighted_mean)(size, batch.advantage, index, number)
    return torch.where(live, batch.advantage - shift, 0.0)


def _weighted_mean(size: Tensor, value: Tensor, index: Tensor, number: int) -> Tensor:
    """[B], sum(size^2 value) / sum(size^2) over the answer's group; 0 where that is undefined."""
    square = _squares(size, index, number)
    total = group_sum(square, index, number)
    shift = group_sum(square * value, index, number) / torch.where(total > 0, total, 1.0)
    return torch.where((total > 0) & shift.isfinite(), shift, 0.0)[index]


def _without_self(size: Tensor, value: Tensor, index: Tensor, number: int) -> Tensor:
    """The same over the others of the group; 0 where that is undefined."""
    first = _first_largest(size, index, number)
    # Without its own share: exact for all but the largest, whose share may hide all others; for that one, sums anew.
    square = _squares(size, index, number)
    rest = group_sum(square, index, number)[index] - square
    shift = (group_sum(square * value, index, number)[index] - square * value) / torch.where(rest > 0, rest, 1.0)
    shift = torch.where((rest > 0) & shift.isfinite(), shift, 0.0)
    return torch.where(first, _weighted_mean(torch.where(first, 0.0, size), value, index, number), shift)


def _squares(size: Tensor, index: Tensor, number: int) -> Tensor:
    top = group_max(size, index, number)[index]
    return torch.where(top > 0, size / torch.where(top > 0, top, 1.0), 0.0).square()


def _first_largest(size: Tensor, index: Tensor, number: int) -> Tensor:
    """bool [B]: one answer in each group, of those with the largest size."""
    rows = torch.arange(len(size), device=size.device)
    candidates = torch.where(size == group_max(size, index, number)[index], rows, len(size))
    first = torch.full((number,), len(size), dtype=rows.dtype, device=size.device)
    first = first.scatter_reduce_(0, index, candidates, "amin")
    return rows == first[index]
