"""How large a content of a version may be, from the recipe: what is announced larger is refused before it is fetched.

In: the base model's tensors, the recipe's adapters. Out: bytes. Pure but for the base's header.

All versions have the base's tensors, or the recipe's adapters of them; a delta that is not smaller than its state is
never published.
"""

import json
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

from p2prl.models.lora_rule import Lora
from p2prl.models.state import TensorPlace, open_state

ENTRY_BYTES = 256  # of a tensor in a file's header, beside its name
SLACK_BYTES = 4 * 2**10
BF16_BYTES = 2
NUM_HALVES = 2
Shape = tuple[int, ...]


def most_bytes(base: Path, lora: Lora | None) -> int:
    """Of any content. Raises BadRecord or StoreError for a base that can't be read."""
    with open_state(base) as (places, _):
        shapes = [(place.name, place.shape) for place in places] if lora is None else list(_adapters(places, lora))
    header = sum(ENTRY_BYTES + len(json.dumps(name)) for name, _ in shapes)
    return SLACK_BYTES + header + sum(BF16_BYTES * prod(shape) for _, shape in shapes)


def _adapters(places: Sequence[TensorPlace], lora: Lora) -> Iterable[tuple[str, Shape]]:
    """Both halves of each matrix of a target; of all matrices where no tensor has a target's name."""
    matrices = [place for place in places if len(place.shape) == NUM_HALVES]
    targets = [place for place in matrices if _layer(place.name) in lora.targets]
    for place in targets or matrices:
        for side, half in zip(place.shape, ("lora_a", "lora_b"), strict=True):
            yield f"{place.name}.{half}", (side, lora.rank)


def _layer(name: str) -> str:
    """The last name of the layer whose weight it is."""
    return name.removesuffix(".weight").rpartition(".")[2]
