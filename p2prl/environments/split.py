"""Which items of a finite environment are for training and which are held out.

In: a number of items, or what tells them apart. Out: for an index of the flow (from HELD_OUT_FROM on: held out) an item's
place.

A tenth is held out. By text: items with equal texts are on one side, whatever their order. By tail: the last ones. Of
rows of a file, each prompt counts as the first row that it was made from, so that a row is on one side in all
environments over that file, whatever their templates make of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from p2prl.environments.registry import HELD_OUT_FROM

HELD_OUT_SHARE = 10  # one in so many


def held_out(text: str) -> bool:
    """Whether a question is on the held-out side, told by its text alone."""
    digest = blake2b(text.encode("utf-8", "replace"), digest_size=4, person=b"p2prl held out").digest()
    return int.from_bytes(digest) < 2**32 // HELD_OUT_SHARE


@dataclass(frozen=True)
class Split:
    """Places of items. Where one side would be empty both sides have all items."""

    training: Sequence[int]
    evaluation: Sequence[int]

    @classmethod
    def by_text(cls, texts: Sequence[str]) -> "Split":
        sides: tuple[list[int], list[int]] = ([], [])
        for place, text in enumerate(texts):
            sides[held_out(text)].append(place)
        return cls(sides[0] or sides[1], sides[1] or sides[0])

    @classmethod
    def by_row(cls, file_hash: str, prompts: Sequence[str]) -> "Split":
        """Of a file whose rows give these prompts."""
        first: dict[str, int] = {}
        for place, prompt in enumerate(prompts):
            first.setdefault(prompt, place)
        return cls.by_text([f"{file_hash} {first[prompt]}" for prompt in prompts])

    @classmethod
    def tail(cls, num_items: int) -> "Split":
        first = num_items - num_items // HELD_OUT_SHARE
        return cls(range(first), range(first, num_items) or range(num_items))

    @property
    def num_training(self) -> int:
        return len(self.training)

    def place(self, index: int) -> int:
        if index >= HELD_OUT_FROM:
            return self.evaluation[(index - HELD_OUT_FROM) % len(self.evaluation)]
        return self.training[index % len(self.training)]
