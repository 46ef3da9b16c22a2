"""Addition, answers written lowest digit first: the built-in environment.

In: a prompt index. Out: `47+85=`, and reward 1 for exactly `231`, else 0.

Both numbers have `digits` digits, none above `max_digit` (4 or less: no carries; an easier task). The prompt follows
from the index alone. A tenth of all pairs is held out: indices from `HELD_OUT_FROM` on draw only those, lower ones
never.
"""

import random
from hashlib import blake2b

from p2prl.environments.registry import HELD_OUT_FROM, checked_int

_HELD_OUT_SHARE = 0.1


class Addition:
    """Implements `registry.Environment`."""

    num_prompts: int | None = None

    def __init__(self, version: str, *, digits: int = 2, max_digit: int = 9) -> None:
        self.name = "addition"
        self.version = version
        self._digits = checked_int("addition", "digits", digits, 1, 8)
        self._max_digit = checked_int("addition", "max_digit", max_digit, 2, 9)

    def _number(self, source: random.Random) -> int:
        lowest = 0 if self._digits == 1 else 1
        value = source.randint(lowest, self._max_digit)
        for _ in range(self._digits - 1):
            value = value * 10 + source.randint(0, self._max_digit)
        return value

    def pair(self, index: int) -> tuple[int, int]:
        """The numbers to add, redrawn until they are on the index's side of the split: 1.1 or 10 draws on average."""
        source = random.Random(index)
        while True:
            pair = self._number(source), self._number(source)
            if _held_out(*pair) == (index >= HELD_OUT_FROM):
                return pair

    def prompt(self, index: int) -> str:
        first, second = self.pair(index)
        return f"{first}+{second}="

    def answer(self, index: int) -> str:
        """The right answer, for supervised steps and tests; the flow never sees it."""
        return str(sum(self.pair(index)))[::-1]

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        right = self.answer(index)
        if answer == right:
            return 1.0, "right"
        return 0.0, f"expected {right}"


def _held_out(first: int, second: int) -> bool:
    digest = blake2b(b"%d+%d" % (first, second), digest_size=4, person=b"p2prl held out").digest()
    return int.from_bytes(digest) < _HELD_OUT_SHARE * 2**32
