"""The policy in training: float32 masters, and the module that runs on their bf16 rounding.

In: the recipe, weights of a version, a gradient. Out: log-probs, the next weights.

With LoRA the masters are the A and B of each adapter, their roundings are what is published, and the module runs on
the base model plus those (`adapters`).

Invariants: what the module runs on is at all times exactly what follows from what is (or would be) published, so what
is trained is what was sampled from; gradients go straight through the rounding to the masters; the learning rate of
one step never outlives that step.
"""

import contextlib
import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from p2prl.errors import LearnerError
from p2prl.learner.adapters import Adapter, adapt
from p2prl.learner.shared_prompt import continue_prompts, distinct_prompts
from p2prl.models.load import load_module
from p2prl.models.lora import read_pairs
from p2prl.models.lora_rule import lora_of
from p2prl.models.tensors import load_into, write_tensors
from p2prl.recipe import LearnerSection, Recipe
from p2prl.records import Version

Gradient = list[Tensor]


class Policy:
    """Module, masters and optimiser, in the order of `named_parameters`."""

    def __init__(self, module: torch.nn.Module, learner: LearnerSection, version: Version) -> None:
        self.module, self.version, self._learner = module, version, learner
        # False where layers are to see whole answers, one a row, as score norms must, or may keep no keys and values.
        self.shares_prompts = not learner.gradient_checkpointing
        if learner.gradient_checkpointing:
            _checkpoint_layers(module)
        self._takes_positions = "logits_to_keep" in inspect.signature(module.forward).parameters
        self.adapters: dict[str, Adapter] = {}
        # The roundings of the masters, under the names they are published by; backward passes leave gradients there.
        self._trained: dict[str, torch.nn.Parameter] = dict(module.named_parameters())
        lora = lora_of(learner)
        if lora is not None:
            with torch.no_grad():
                for value in module.parameters():
                    value.copy_(value.bfloat16())  # once: the base never changes again
            self.adapters = adapt(module, lora)
            halves = [(name + half, value) for name, each in self.adapters.items() for half, value in each.halves]
            self._trained = dict(halves)
            self._restart_adapters()
        self.masters = {name: value.detach().float().clone() for name, value in self._trained.items()}
        self.optimiser = self._new_optimiser()
        self._round()

    @classmethod
    def load(cls, recipe: Recipe, cache: Path, device: str = "cpu") -> "Policy":
        """Version 0."""
        module = load_module(recipe.model.source, cache, torch.float32).to(device)
        return cls(module, recipe.learner, Version(0, 0, bytes.fromhex(recipe.model.hash)))

    @property
    def device(self) -> torch.device:
        return next(iter(self.masters.values())).device

    def follow(self, weights: Path, version: Version) -> None:
        """Masters become the published bf16 values; the optimiser starts anew. All or nothing.

        With LoRA version 0 is the model itself, from which adapters begin anew.
        """
        if not self.adapters:
            load_into(self.module, weights)
        elif version.step == 0:
            self._restart_adapters()
        else:
            self._take_adapters(weights)
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(self._trained[name])
        self.optimiser = self._new_optimiser()
        self.version = version
        self._round()

    def restore(self, masters: dict[str, Tensor], moments: dict[int, dict[str, Any]], version: Version) -> None:
        """Take up masters and Adam's state as a checkpoint gives them."""
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(masters[name])
        self.optimiser = self._new_optimiser()
        if moments:
            groups = self.optimiser.state_dict()["param_groups"]
            self.optimiser.load_state_dict({"state": moments, "param_groups": groups})
        self.version = version
        self._round()

    def publish(self, path: Path) -> bytes:
        """Write the version's file, all weights or the adapters; returns its state hash."""
        tensors: dict[str, Tensor] = dict(self._trained)
        return write_tensors(tensors, path)

    def answer_logits(self, ids: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """float32 logits [N, V] that predict the tokens at (rows[n], positions[n]) of ids [B, T], padded on the right.

        Causal attention never looks at padding on the right, so no attention mask is needed. What answers to one
        prompt have in common is run once where that pays.
        """
        first, last = int(positions.min()), int(positions.max())
        low = self._learner.compute == "bfloat16"
        with torch.autocast(ids.device.type, torch.bfloat16) if low else contextlib.nullcontext():
            if not self._takes_positions:
                return self.module(input_ids=ids[:, :last], use_cache=False).logits[rows, positions - 1].float()
            shared = distinct_prompts(ids[:, :last], first - 1) if self.shares_prompts else None
            if shared is not None:
                logits = continue_prompts(self.module, *shared, ids[:, first - 1 : last])
            else:
                wanted = torch.arange(first - 1, last, device=ids.device)
                logits = self.module(input_ids=ids[:, :last], use_cache=False, logits_to_keep=wanted).logits
        return logits[rows, positions - first].float()

    def zero_gradient(self) -> None:
        for value in self._trained.values():
            value.grad = None

    def take_gradient(self) -> Gradient:
        """What the backward passes since `zero_gradient` left, float32; the module keeps none of it."""
        found = [value.grad for value in self._trained.values()]
        self.zero_gradient()
        masters = self.masters.values()
        return [
            torch.zeros_like(master) if value is None else value.float()
            for value, master in zip(found, masters, strict=True)
        ]

    def apply(self, gradient: Gradient, learning_rate: float) -> None:
        """One optimiser step of the masters with this rate, then the rounding that is the next version."""
        group = self.optimiser.param_groups[0]
        usual, group["lr"] = group["lr"], learning_rate
        try:
            for master, value in zip(self.masters.values(), gradient, strict=True):
                master.grad = value
            self.optimiser.step()
        finally:
            group["lr"] = usual
            self.optimiser.zero_grad(set_to_none=True)
        self._round()

    def _restart_adapters(self) -> None:
        source = torch.Generator().manual_seed(0)
        for adapter in self.adapters.values():
            adapter.restart(source)

    @torch.no_grad()
    def _take_adapters(self, weights: Path) -> None:
        targets = {name: adapter.target for name, adapter in self.adapters.items()}
        for name, pair in read_pairs(weights, targets, self._learner.lora.rank).items():
            self.adapters[name].a.copy_(pair[0])
            self.adapters[name].b.copy_(pair[1])

    def _new_optimiser(self) -> torch.optim.AdamW:
        learner = self._learner
        return torch.optim.AdamW(
            list(self.masters.values()),
            lr=learner.learning_rate,
            betas=learner.betas,
            weight_decay=learner.weight_decay,
        )

    @torch.no_grad()
    def _round(self) -> None:
        for name, master in self.masters.items():
            self._trained[name].copy_(master.bfloat16())
        for adapter in self.adapters.values():
            adapter.target.weight.copy_(adapter.merged())


def _checkpoint_layers(module: torch.nn.Module) -> None:
    """Layers keep their input alone and run again in the backward pass.

    transformers does so only in training mode; the mode is set on the layers that checkpoint and on nothing inside
    them, so that dropout stays off: what is trained is what was sampled from.
    """
    model: Any = module
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise LearnerError("this model has no gradient checkpointing; set learner.gradient_checkpointing = false")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in module.modules():
        if getattr(layer, "gradient_checkpointing", False):
            layer.training = True
