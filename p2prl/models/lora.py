"""LoRA as a version's content: low-rank updates in a state file, and their sum with the base model's matrices.

In: a module with the recipe's rank, alpha and targets; a state file of tensors `<weight>.lora_a`, `<weight>.lora_b`.
Out: which weights are adapted, the file's pairs, a merged weight.

Invariants: a file counts only when it has both halves of each adapted weight and nothing else, in bf16, finite, of the
recipe's rank. A merged weight is the bf16 rounding of W + s B A, made from bf16 W, B and A in float64, where such sums
of products are exact or nearly so: learner, engine and export have the same bits, whatever their device and threads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from p2prl.errors import BadRecord, ConfigError
from p2prl.models.state import BF16, TensorPlace, open_state
from p2prl.models.tensors import read_state

HALVES = (".lora_a", ".lora_b")
_BLOCK = 2**22  # elements of a float64 temporary

Pair = tuple[Tensor, Tensor]  # A [rank, d_in], B [d_out, rank]


@dataclass(frozen=True)
class Target:
    """A linear layer to adapt; `transposed`: its weight is [d_in, d_out]."""

    layer: nn.Module
    transposed: bool

    @property
    def weight(self) -> nn.Parameter:
        return self.layer.get_parameter("weight")

    @property
    def num_inputs(self) -> int:
        return self.weight.shape[0 if self.transposed else 1]

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[1 if self.transposed else 0]


def find_targets(module: nn.Module, names: Sequence[str]) -> dict[str, Target]:
    """The layers whose last name is one of `names`, by their weight's name. ConfigError when one of them fits none."""
    found: dict[str, Target] = {}
    left = set(names)
    shared = _shared(module)
    for name, layer in module.named_modules():
        last = name.rpartition(".")[2]
        if last not in names or not (type(layer) is nn.Linear or is_conv1d(layer)):
            continue
        left.discard(last)
        target = Target(layer, is_conv1d(layer))
        if id(target.weight) in shared:
            raise ConfigError(f"{name} shares its weight with another layer; take it out of learner.lora.targets")
        found[f"{name}.weight"] = target
    if left:
        raise ConfigError(
            f"this model has no linear layer named {sorted(left)[0]!r}; name its layers in learner.lora.targets"
        )
    return found


def is_conv1d(layer: nn.Module) -> bool:
    """transformers' linear map with a [d_in, d_out] weight."""
    if type(layer).__name__ != "Conv1D":
        return False
    from transformers.pytorch_utils import Conv1D  # only where a model of transformers is there

    return type(layer) is Conv1D


def _shared(module: nn.Module) -> set[int]:
    seen: set[int] = set()
    twice: set[int] = set()
    for _, parameter in module.named_parameters(remove_duplicate=False):
        (twice if id(parameter) in seen else seen).add(id(parameter))
    return twice


# -- the file -------------------------------------------------------------------------------------------------------


def is_adapter_file(path: Path) -> bool:
    """Whether all of its tensors are halves of adapters. Raises BadRecord or StoreError as `open_state` does."""
    with open_state(path) as (places, _):
        return bool(places) and all(place.name.endswith(HALVES) for place in places)


def read_pairs(path: Path, targets: Mapping[str, Target], rank: int) -> dict[str, Pair]:
    """The adapters of a file, bf16 on the CPU, by the name of their weight. Raises BadRecord when it isn't theirs."""
    with open_state(path) as (places, _):
        _check(places, targets, rank)
    tensors = read_state(path)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BadRecord(f"these adapters can't be used: {name!r} has values that are no finite numbers")
    return {name: (tensors[name + HALVES[0]], tensors[name + HALVES[1]]) for name in targets}


def _check(places: Sequence[TensorPlace], targets: Mapping[str, Target], rank: int) -> None:
    wanted: dict[str, tuple[int, int]] = {}
    for name, target in targets.items():
        wanted[name + HALVES[0]] = rank, target.num_inputs
        wanted[name + HALVES[1]] = target.num_outputs, rank
    held = {place.name for place in places}
    missing, unexpected = sorted(wanted.keys() - held), sorted(held - wanted.keys())
    if missing or unexpected:
        kind = "lacks" if missing else "has an unknown"
        raise BadRecord(
            f"these adapters are of another recipe: the file {kind} {(missing or unexpected)[0][:64]!r} "
            f"({len(missing)} missing, {len(unexpected)} unexpected); check learner.lora and the model"
        )
    for place in places:
        if place.shape != wanted[place.name] or place.dtype != BF16:
            raise BadRecord(
                f"these adapters are of another recipe: {place.name!r} is {place.dtype} {list(place.shape)}, "
                f"not {BF16} {list(wanted[place.name])}; check learner.lora and the model"
            )


# -- the sum --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def merge(base: Tensor, pair: Pair, scale: float, transposed: bool = False) -> Tensor:
    """The bf16 rounding of base + scale B A, on base's device; all three are taken as bf16."""
    result = base.detach().bfloat16().clone()
    rows = result.t() if transposed else result  # [d_out, d_in]
    a, b = (half.detach().to(result.device, torch.bfloat16).double() for half in pair)
    height = max(1, _BLOCK // max(1, rows.shape[1]))
    for begin in range(0, len(rows), height):
        part = rows[begin : begin + height]
        part.copy_((part.double() + scale * (b[begin : begin + height] @ a)).float())
    return result
