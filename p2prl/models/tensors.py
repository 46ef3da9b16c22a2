"""The bf16 state of a torch module: written to and read from state files, exactly.

In: a module or a state file. Out: a state file and its hash, tensors, or a module that carries the file's weights.

Invariants: parameters only, a tied one once, under the name `named_parameters` gives it; float32 masters are rounded to
bf16 (to nearest even) on the way out and never on the way in; `load_into` applies all of a file or none of it.
"""

from collections.abc import Iterator
from mmap import mmap
from pathlib import Path

import torch

from p2prl.errors import BadRecord
from p2prl.models.state import BF16, Payload, TensorPlace, open_state, write_payloads


def write_state(module: torch.nn.Module, path: Path) -> bytes:
    """Write the bf16 rounding of all parameters atomically; returns the state hash."""
    return write_payloads(path, [payload_of(name, parameter) for name, parameter in module.named_parameters()])


def write_tensors(tensors: dict[str, torch.Tensor], path: Path) -> bytes:
    """Like `write_state`, for tensors by name."""
    return write_payloads(path, [payload_of(name, tensor) for name, tensor in tensors.items()])


def payload_of(name: str, tensor: torch.Tensor) -> Payload:
    # Rounded only when it is written, so that at most one rounded tensor is in memory.
    def read() -> memoryview:
        rounded = tensor.detach().to("cpu", torch.bfloat16).contiguous()
        return rounded.view(torch.int16).reshape(-1).numpy().data

    return Payload(name, tuple(tensor.shape), read)


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the file, in bf16, by name; a copy, free of the file."""
    with open_state(path) as (places, data):
        return {place.name: tensor for place, tensor in _tensors(places, data)}


def _tensors(places: list[TensorPlace], data: mmap) -> Iterator[tuple[TensorPlace, torch.Tensor]]:
    for place in places:
        if place.dtype != BF16:
            raise BadRecord(f"weights are bf16, but {place.name!r} is {place.dtype}; fetch them from another peer")
        content = bytearray(data[place.begin : place.end])
        flat = torch.frombuffer(content, dtype=torch.bfloat16) if content else torch.empty(0, dtype=torch.bfloat16)
        yield place, flat.reshape(place.shape)


def load_into(module: torch.nn.Module, path: Path) -> None:
    """Copy the file's weights into the module (any dtype, any device). Refuses a file that doesn't fit it exactly."""
    parameters = dict(module.named_parameters())
    with open_state(path) as (places, data):
        held = {place.name for place in places}
        missing, unexpected = sorted(parameters.keys() - held), sorted(held - parameters.keys())
        if missing or unexpected:
            first = (missing or unexpected)[0]
            kind = "lacks" if missing else "has an unknown"
            raise BadRecord(
                f"these weights are of another model: the file {kind} {first[:64]!r} "
                f"({len(missing)} missing, {len(unexpected)} unexpected); check the recipe's model"
            )
        for place in places:
            wanted = tuple(parameters[place.name].shape)
            if place.shape != wanted or place.dtype != BF16:
                raise BadRecord(
                    f"these weights are of another model: {place.name!r} is {place.dtype} {list(place.shape)}, "
                    f"not {BF16} {list(wanted)}; check the recipe's model"
                )
        with torch.no_grad():
            for place, tensor in _tensors(places, data):
                parameters[place.name].copy_(tensor)
