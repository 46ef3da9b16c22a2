"""What the recipe says of adapters, for the processes that load them. No torch.

In: the recipe's learner section. Out: a `Lora`, or None where all weights are trained.
"""

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from p2prl.recipe import LearnerSection


class Lora(msgspec.Struct, frozen=True):
    """`targets`: names of linear layers. The update of a weight is `scale` times B A."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def lora_of(learner: "LearnerSection") -> Lora | None:
    if learner.training != "lora":
        return None
    return Lora(learner.lora.rank, learner.lora.alpha, learner.lora.targets)
