"""How a parameter's gradient follows, answer by answer, from what its layers saw and what came back to them.

In: inputs and output gradients of the layers that use a parameter, [B, ...]. Out: squared norms [B] of each answer's
gradient, and any weighted sum of those gradients; no answer's gradient of a matrix is ever held for all answers.

For a matrix used as y = W a the answer's gradient is sum_t g_t a_t^T, whose squared norm is the sum over t, t' of
<a_t, a_t'> <g_t, g_t'>: two Gram matrices, T^2 (d_in + d_out) operations, against T d_in d_out for the product itself;
each layer takes the cheaper. A parameter used several times (tied embeddings) needs the cross terms, which are exact
here too. Known from private training as ghost norms and book-keeping (arXiv 2110.05679, 2210.00038).

Invariants: exact up to rounding; temporary memory is bounded by `_BUDGET` elements or one answer, whichever is more.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

_BUDGET = 2**24  # elements of a temporary


@dataclass
class ParameterUse:
    """All uses of one parameter in one forward pass. Lists: one entry a use; T differs between them."""

    parameter: torch.nn.Parameter
    transposed: bool = False  # the matrix is [d_in, d_out]
    inputs: list[Tensor] = field(default_factory=list)  # [B, T, d_in]
    returned: list[Tensor] = field(default_factory=list)  # [B, T, d_out]
    ids: list[Tensor] = field(default_factory=list)  # long [B, T], rows of an embedding that were looked up
    row_returned: list[Tensor] = field(default_factory=list)  # [B, T, d]
    vector: Tensor | None = None  # [B, d], the gradient itself: biases and scales are small

    def add_vector(self, value: Tensor) -> None:
        self.vector = value if self.vector is None else self.vector + value

    def square(self, grams: "Grams") -> Tensor | float:
        """[B], the squared norm of each answer's gradient."""
        if self.vector is not None:
            return _wide(self.vector).square().sum(1)
        total: Tensor | float = 0.0
        if self.inputs:
            total = grams.square(_join(self.inputs), _join(self.returned))
        if self.ids:
            ids, back = _join(self.ids), _join(self.row_returned)
            total = total + _rows_square(ids, back)
            if self.inputs:
                total = total + 2 * _cross(_join(self.inputs), _join(self.returned), ids, back)
        return total

    def accumulate(self, weighted: "Weighted") -> None:
        """Add the weighted sum of the answers' gradients to `.grad`."""
        for value, back in zip(self.inputs, self.returned, strict=True):
            self._add(weighted.product(value, back, self.transposed))
        if self.vector is not None:
            self._add(weighted.weights.to(self.vector.dtype) @ self.vector)
        for ids, back in zip(self.ids, self.row_returned, strict=True):
            if self.parameter.grad is None:
                self.parameter.grad = torch.zeros_like(self.parameter)
            scaled = (back * weighted.like(back)).flatten(0, 1)
            self.parameter.grad.index_add_(0, ids.flatten(), scaled.to(self.parameter.dtype))

    def _add(self, value: Tensor) -> None:
        value = value.to(self.parameter.dtype)
        if self.parameter.grad is None:
            self.parameter.grad = value
        else:
            self.parameter.grad += value


class Grams:
    """Squared norms of sum_t g_t a_t^T. Layers with the same input (query, key, value) share its Gram matrix."""

    def __init__(self) -> None:
        self._input: Tensor | None = None
        self._gram: Tensor | None = None

    def square(self, value: Tensor, back: Tensor) -> Tensor:
        """value a [B, T, d_in], back g [B, T, d_out] to [B]."""
        length, wide, high = value.shape[1], value.shape[2], back.shape[2]
        if length * (wide + high) > wide * high:
            return _product_square(value, back)
        if length * length * len(value) > _BUDGET:
            rows = max(1, _BUDGET // (length * length))
            parts = zip(value.split(rows), back.split(rows), strict=True)
            return torch.cat([_gram(a).flatten(1).mul_(_gram(g).flatten(1)).sum(1) for a, g in parts])
        if self._input is not value or self._gram is None:
            self._input, self._gram = value, _gram(value).flatten(1)
        return torch.linalg.vecdot(self._gram, _gram(back).flatten(1)).clamp(min=0.0)


class Weighted:
    """Sums over answers of weights [B] times sum_t g_t a_t^T. Layers with the same input share its scaled copy."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights
        self._input: Tensor | None = None
        self._scaled: Tensor | None = None

    def like(self, back: Tensor) -> Tensor:
        return self.weights[:, None, None].to(back.dtype)

    def product(self, value: Tensor, back: Tensor, transposed: bool) -> Tensor:
        """One product, as in an ordinary backward pass; the narrower side is scaled."""
        if value.shape[2] > back.shape[2] and self._input is not value:
            back = back * self.like(back)
            scaled = value.to(back.dtype)
        elif self._input is value and self._scaled is not None:
            scaled = self._scaled
        else:
            scaled = value.to(back.dtype) * self.like(back)
            self._input, self._scaled = value, scaled
        flat_value, flat_back = scaled.flatten(0, 1), back.flatten(0, 1)
        return flat_value.t() @ flat_back if transposed else flat_back.t() @ flat_value


def _gram(value: Tensor) -> Tensor:
    """[B, T, d] to [B, T, T]."""
    value = _wide(value)
    return torch.bmm(value, value.transpose(1, 2))


def _product_square(value: Tensor, back: Tensor) -> Tensor:
    rows = max(1, _BUDGET // (value.shape[2] * back.shape[2]))
    parts = zip(value.split(rows), back.split(rows), strict=True)
    return torch.cat([torch.bmm(_wide(g).transpose(1, 2), _wide(a)).square().sum((1, 2)) for a, g in parts])


def _rows_square(ids: Tensor, back: Tensor) -> Tensor:
    """[B]: equal ids [B, T] of an answer add up their gradients [B, T, d] before they are squared."""
    number, width = back.shape[0], back.shape[2]
    span = int(ids.max()) + 1 if ids.numel() else 1
    keys = (ids + torch.arange(number, device=ids.device)[:, None] * span).flatten()
    distinct, place = torch.unique(keys, return_inverse=True)
    sums = torch.zeros(len(distinct), width, dtype=_wide(back).dtype, device=back.device)
    sums.index_add_(0, place, _wide(back).flatten(0, 1))
    squares = torch.zeros(number, dtype=sums.dtype, device=back.device)
    return squares.index_add_(0, distinct // span, sums.square().sum(1))


def _cross(value: Tensor, back: Tensor, ids: Tensor, row_back: Tensor) -> Tensor:
    """[B]: inner product of a matrix use's gradient, sum_t g_t a_t^T, with an embedding use's of the same matrix.

    The latter has row_back_s in row ids_s, so it is sum over t, s of g_t[ids_s] <a_t, row_back_s>.
    """
    picked = torch.gather(back, 2, ids[:, None, :].expand(-1, back.shape[1], -1))
    return (_wide(picked) * torch.bmm(_wide(value), _wide(row_back).transpose(1, 2))).sum((1, 2))


def _join(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(values, 1)


def _wide(value: Tensor) -> Tensor:
    """At least float32: sums of many products."""
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
