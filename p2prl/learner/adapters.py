"""LoRA inside the published weights: a low-rank update is trained, its sum with the base is what runs and is published.

In: a module, rank, alpha, names of linear layers. Out: the module with `Adapter`s, whose A and B are trained.

peft runs W x + s B A x; no peer has those numbers, since a version is the bf16 rounding of W + s B A. So here the
forward pass runs on that rounding itself, as in full training, and the gradient goes straight through it to A and B,
without the gradient of W ever being made: dB = s g (A a)^T, dA = s (B^T g) a^T, for input a and output gradient g.

Invariants: the module's parameters have the names, the shapes and the number they had; all but the adapted weights
stay as they were; with B = 0 an adapter changes nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2prl.errors import LearnerError


@dataclass
class Adapter:
    """Of one matrix W [d_out, d_in]: `base` + scale b a, rounded to bf16."""

    a: nn.Parameter  # float32 [rank, d_in]
    b: nn.Parameter  # float32 [d_out, rank]
    scale: float
    base: Tensor  # bf16 [d_out, d_in]

    @property
    def parts(self) -> tuple[tuple[str, nn.Parameter], tuple[str, nn.Parameter]]:
        return ("lora_a", self.a), ("lora_b", self.b)

    @torch.no_grad()
    def merged(self) -> Tensor:
        return (self.base.float() + self.scale * (self.b @ self.a)).bfloat16()

    @torch.no_grad()
    def restart(self, base: Tensor, source: torch.Generator) -> None:
        """Begin anew on other weights: B = 0, A drawn as torch draws a linear layer's."""
        self.base = base.detach().bfloat16().clone()
        drawn = torch.empty(self.a.shape)
        nn.init.kaiming_uniform_(drawn, a=5**0.5, generator=source)
        self.a.copy_(drawn)
        self.b.zero_()


class AdaptedLinear(nn.Linear):
    """`weight` is the merged rounding; `adapter` is no part of the module's state."""

    adapter: Adapter

    def forward(self, input: Tensor) -> Tensor:
        adapter = self.adapter
        return _Merged.apply(input, self.weight, self.bias, adapter.a, adapter.b, adapter.scale)


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float):
        ctx.save_for_backward(value, weight, a, b)
        ctx.scale = scale
        return nn.functional.linear(value, weight, bias)

    @staticmethod
    def backward(ctx: Any, *returned: Tensor) -> tuple[Tensor | None, ...]:
        value, weight, a, b = ctx.saved_tensors
        back = returned[0]
        down = (back @ b.to(back.dtype)).flatten(0, -2) * ctx.scale  # s B^T g
        up = (value.to(back.dtype) @ a.to(back.dtype).t()).flatten(0, -2) * ctx.scale  # s A a
        grad_a = down.t() @ value.to(back.dtype).flatten(0, -2)
        grad_b = back.flatten(0, -2).t() @ up
        grad_value = (back @ weight.to(back.dtype)).to(value.dtype) if ctx.needs_input_grad[0] else None
        return grad_value, None, None, grad_a.to(a.dtype), grad_b.to(b.dtype), None


def adapt(module: nn.Module, rank: int, alpha: float, targets: Sequence[str]) -> dict[str, Adapter]:
    """Adapters by the name of their weight; everything else is frozen. LearnerError when a target fits no layer."""
    found: dict[str, Adapter] = {}
    left = set(targets)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    for name, layer in module.named_modules():
        last = name.rpartition(".")[2]
        if last not in targets or type(layer) is not nn.Linear:
            continue
        left.discard(last)
        device = layer.weight.device
        adapter = Adapter(
            nn.Parameter(torch.zeros(rank, layer.in_features, device=device)),
            nn.Parameter(torch.zeros(layer.out_features, rank, device=device)),
            alpha / rank,
            layer.weight.detach().bfloat16().clone(),
        )
        layer.__class__ = AdaptedLinear
        vars(layer)["adapter"] = adapter  # beside the module's state, not in it
        found[f"{name}.weight"] = adapter
    if left:
        raise LearnerError(
            f"this model has no linear layer named {sorted(left)[0]!r}; name its layers in learner.lora.targets"
        )
    return found
