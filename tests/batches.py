"""Batches for tests of objectives: every objective with its settings, random answers, loss with gradient."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from p2prl.objectives import OBJECTIVES, Batch

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("gepo", {"clip": 0.2}),
    ("gepo", {"clip": None}),
    ("gepo", {"clip": 0.1, "age_band": True}),
    ("vcpo", {}),
    ("vcpo", {"length_norm": False, "leave_one_out": True, "cap": 1.5}),
    ("gepo_vcpo", {"baseline": "mean"}),
    ("gepo_vcpo", {"baseline": "min_variance"}),
    ("gepo_vcpo", {"clip": None, "leave_one_out": True}),
    ("a3po", {}),
    ("a3po", {"cap": 1.2, "cap_mode": "clamp", "dual_clip": 1.5}),
    ("decoupled_ppo", {}),
    ("reinforce", {}),
    ("grpo", {}),
    ("dr_grpo", {"max_length": 8}),
    ("dapo", {"clip": 0.1, "clip_high": 0.3}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.2}),
    ("tis", {}),
    ("mis", {"cap": 1.1}),
    ("cispo", {}),
    ("m2po", {}),
    ("vespo", {}),
    ("dppo", {}),
    ("dppo", {"divergence": "kl", "threshold": 0.05}),
    ("minpro", {}),
    ("r2vpo", {}),
]
NEEDS_WHOLE_GROUPS = {"vcpo", "gepo_vcpo"}


def label(setting: tuple[str, dict[str, Any]]) -> str:
    return "-".join([setting[0], *(f"{name}={value}" for name, value in setting[1].items())])


def draw(seed: int, num_groups: int = 3, size: int = 4, longest: int = 6) -> tuple[Batch, Tensor]:
    """A float64 batch with answers of any length (0 too) and its log-probs under a policy that moved on."""
    source = torch.Generator().manual_seed(seed)
    num = num_groups * size
    length = torch.randint(0, longest + 1, (num,), generator=source)
    q = -torch.rand(num, longest, generator=source, dtype=torch.float64) * 2
    batch = Batch(
        group=torch.arange(num) // size,
        mask=torch.arange(longest) < length[:, None],
        behavior_logp=q,
        reward=torch.randint(0, 2, (num,), generator=source).double(),
        age=torch.randint(0, 9, (num, longest), generator=source),
        score_norm=torch.rand(num, generator=source, dtype=torch.float64) + 0.1,
        prox_logp=q + torch.randn(num, longest, generator=source, dtype=torch.float64) * 0.1,
    )
    return batch, q + torch.randn(num, longest, generator=source, dtype=torch.float64) * 0.3


def solve(name: str, options: dict[str, Any], batch: Batch, logp: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and its gradient in logp."""
    logp = logp.detach().clone().requires_grad_()
    loss, metrics = OBJECTIVES[name](batch, logp, **options)
    loss.backward()
    assert logp.grad is not None
    assert all(isinstance(value, float) for value in metrics.values())
    return loss.detach(), logp.grad


def rows_of(batch: Batch, rows: Tensor) -> Batch:
    """The rows as a batch of their own, nothing prepared."""
    given = {field.name: getattr(batch, field.name) for field in fields(batch)[:7]}
    return Batch(**{name: None if value is None else value[rows] for name, value in given.items()})
