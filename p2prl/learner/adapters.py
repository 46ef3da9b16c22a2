"""LoRA in training: layers that run on merged weights, and gradients that go to A and B.

In: a module, the recipe's rank, alpha and targets. Out: the module with `Adapter`s, whose A and B are trained.

peft runs W x + s B A x; here a node runs the bf16 rounding of W + s B A (`models/lora.py`), made from the bf16 A and B
that are published. So the forward pass runs on that rounding too, and the gradient goes straight through it to A and B,
without the gradient of W ever being made: dB = s g (A a)^T, dA = s (B^T g) a^T, for input a and output gradient g.

Invariants: the module's parameters have the names, the shapes and the number they had; all but the adapted weights
stay as they were; with B = 0 an adapter changes nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from p2prl.models.lora import HALVES, Target, find_targets, merge
from p2prl.models.lora_rule import Lora


@dataclass
class Adapter:
    """Of one matrix: `base` + scale b a, rounded to bf16. a and b have bf16 values; their masters are the policy's."""

    target: Target
    a: nn.Parameter  # [rank, d_in]
    b: nn.Parameter  # [d_out, rank]
    scale: float
    base: Tensor  # bf16, of the weight's shape; never changes

    @property
    def halves(self) -> tuple[tuple[str, nn.Parameter], tuple[str, nn.Parameter]]:
        return (HALVES[0], self.a), (HALVES[1], self.b)

    def merged(self) -> Tensor:
        return merge(self.base, (self.a, self.b), self.scale, self.target.transposed)

    @torch.no_grad()
    def restart(self, source: torch.Generator) -> None:
        """Begin anew: B = 0, A drawn as torch draws a linear layer's."""
        drawn = torch.empty(self.a.shape)
        nn.init.kaiming_uniform_(drawn, a=5**0.5, generator=source)
        self.a.copy_(drawn)
        self.b.zero_()


class AdaptedLayer(nn.Module):
    """A linear layer, or GPT-2's transposed one. `weight` is merged; `adapter` is no part of the module's state."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    adapter: Adapter

    def forward(self, input: Tensor) -> Tensor:
        adapter = self.adapter
        weight = self.weight.t() if adapter.target.transposed else self.weight
        return _Merged.apply(input, weight, self.bias, adapter.a, adapter.b, adapter.scale)


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


def adapt(module: nn.Module, lora: Lora) -> dict[str, Adapter]:
    """Adapters by the name of their weight; everything else is frozen. ConfigError when a target fits no layer."""
    targets = find_targets(module, lora.targets)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    return {name: _adapt(target, lora) for name, target in targets.items()}


def _adapt(target: Target, lora: Lora) -> Adapter:
    weight = target.weight
    adapter = Adapter(
        target,
        nn.Parameter(torch.zeros(lora.rank, target.num_inputs, device=weight.device)),
        nn.Parameter(torch.zeros(target.num_outputs, lora.rank, device=weight.device)),
        lora.scale,
        weight.detach().bfloat16().clone(),
    )
    target.layer.__class__ = AdaptedLayer
    vars(target.layer)["adapter"] = adapter  # beside the module's state, not in it
    return adapter
