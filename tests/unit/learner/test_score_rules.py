import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm, Gemma3TextScaledWordEmbedding
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

from p2prl.learner.score_rules import find_rule


class Clipped(nn.Linear):
    """A linear map by name only."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).clamp(-1, 1)


class Noisy(nn.Embedding):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1.0


class ShiftedRMSNorm(nn.Module):
    """1 + 2 weight: no norm at a weight of 0 or 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * (2 + self.weight)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(4, 6),
        Conv1D(6, 4),
        nn.Embedding(9, 4, padding_idx=2),
        Gemma3TextScaledWordEmbedding(9, 4, padding_idx=0, embed_scale=2.5),
        nn.LayerNorm(6),
        nn.RMSNorm(6),
        LlamaRMSNorm(6),
        Gemma3RMSNorm(6),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_known_layers_are_known_by_what_they_compute(layer: nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    rule = find_rule(layer)
    assert rule is not None and rule.parameters == list(layer.parameters())


@pytest.mark.parametrize(
    "layer",
    [
        Clipped(4, 6),
        Noisy(9, 4),
        nn.Embedding(9, 4, max_norm=1.0),
        nn.Embedding(9, 4, scale_grad_by_freq=True),
        nn.Embedding(9, 4, sparse=True),
        nn.LayerNorm((2, 6)),
        ShiftedRMSNorm(),
        nn.Conv1d(4, 6, 3),
        nn.BatchNorm1d(6),
        nn.Bilinear(3, 4, 5),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_what_only_looks_like_one_is_not(layer: nn.Module) -> None:
    assert find_rule(layer) is None


def test_only_what_is_trained_counts() -> None:
    layer = nn.Linear(4, 6)
    layer.weight.requires_grad_(False)
    rule = find_rule(layer)
    assert rule is not None and rule.parameters == [layer.bias]
