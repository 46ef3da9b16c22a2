"""Squares and weighted sums of one parameter's uses, against the gradients written out."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from p2prl.learner import score_layers
from p2prl.learner.score_layers import Grams, ParameterUse, Weighted

ROWS, COLUMNS, ANSWERS = 7, 5, 3


def written_out(use: ParameterUse) -> Tensor:
    """[B, rows, columns], the gradient of each answer."""
    total = torch.zeros(ANSWERS, ROWS, COLUMNS, dtype=torch.float64)
    for value, back in zip(use.inputs, use.returned, strict=True):
        total += torch.einsum("bti,bto->boi", value, back)
    for ids, back in zip(use.ids, use.row_returned, strict=True):
        for answer, place in itertools.product(range(ANSWERS), range(ids.shape[1])):
            total[answer, ids[answer, place]] += back[answer, place]
    return total


def draw(lengths: list[int], lookups: list[int], seed: int) -> ParameterUse:
    source = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64)

    use = ParameterUse(nn.Parameter(normal(ROWS, COLUMNS)))
    for length in lengths:
        use.inputs.append(normal(ANSWERS, length, COLUMNS))
        use.returned.append(normal(ANSWERS, length, ROWS))
    for length in lookups:
        use.ids.append(torch.randint(0, ROWS, (ANSWERS, length), generator=source))
        use.row_returned.append(normal(ANSWERS, length, COLUMNS))
    return use


some = st.lists(st.integers(1, 9), max_size=3)


@settings(max_examples=60, deadline=None)
@given(some, some, st.integers(0, 10_000))
def test_any_mix_of_uses_has_its_cross_terms(lengths: list[int], lookups: list[int], seed: int) -> None:
    use = draw(lengths, lookups, seed)
    wanted = written_out(use)
    square = torch.as_tensor(use.square(Grams()), dtype=torch.float64).expand(ANSWERS)
    torch.testing.assert_close(square, wanted.square().sum((1, 2)))
    weights = torch.tensor([2.0, 0.0, -0.5], dtype=torch.float64)
    use.accumulate(Weighted(weights))
    if lengths or lookups:
        assert use.parameter.grad is not None
        torch.testing.assert_close(use.parameter.grad, torch.einsum("b,boi->oi", weights, wanted))


def test_a_transposed_matrix_gets_its_gradient_transposed() -> None:
    use, plain = draw([4], [], 1), draw([4], [], 1)
    use.parameter, use.transposed = nn.Parameter(torch.zeros(COLUMNS, ROWS, dtype=torch.float64)), True
    weights = torch.ones(ANSWERS, dtype=torch.float64)
    use.accumulate(Weighted(weights))
    plain.accumulate(Weighted(weights))
    assert use.parameter.grad is not None and plain.parameter.grad is not None
    torch.testing.assert_close(use.parameter.grad.t(), plain.parameter.grad)
    torch.testing.assert_close(use.square(Grams()), plain.square(Grams()))


@pytest.mark.parametrize("budget", [1, 30, 2**24])
@pytest.mark.parametrize("length", [2, 40])
def test_the_budget_changes_nothing(monkeypatch: pytest.MonkeyPatch, budget: int, length: int) -> None:
    monkeypatch.setattr(score_layers, "_BUDGET", budget)
    use = draw([length], [], 2)
    torch.testing.assert_close(use.square(Grams()), written_out(use).square().sum((1, 2)))


def test_layers_with_one_input_share_its_gram_matrix_and_its_scaled_copy() -> None:
    first, second, other = draw([4], [], 3), draw([4], [], 4), draw([4], [], 5)
    second.inputs[0] = first.inputs[0]
    grams, weighted = Grams(), Weighted(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    for use in (first, second, other, first):
        torch.testing.assert_close(use.square(grams), written_out(use).square().sum((1, 2)))
    for use in (first, second, other):
        use.accumulate(weighted)
        torch.testing.assert_close(use.parameter.grad, torch.einsum("b,boi->oi", weighted.weights, written_out(use)))
