"""Several environments as one, drawn by weight.

In: environments with weights, a prompt index. Out: the prompt and reward of the member that the index falls to; the
reward's reason begins with the member's name.

Which member follows from the index alone, by a hash, so anybody can tell; a held-out index stays one for its member.
"""

from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate

from p2prl.environments.registry import HELD_OUT_FROM, Answered, Conversing, Environment
from p2prl.recipe import MIXTURE

_MAX_VERSION_CHARACTERS = 128  # `records.Name`


class Mixture:
    """Implements `registry.Environment`, `registry.Answered` and `registry.Conversing`, whatever its members do."""

    name = MIXTURE
    num_prompts: int | None = None

    def __init__(self, members: Sequence[Environment], weights: Sequence[float]) -> None:
        self.members = tuple(members)
        self._bounds = list(accumulate(weights))
        text = "+".join(sorted({member.version for member in members}))
        digest = blake2b(text.encode(), digest_size=16).hexdigest()
        self.version = text if len(text) <= _MAX_VERSION_CHARACTERS else f"mixture=={digest}"

    def member(self, index: int) -> Environment:
        digest = blake2b(b"%d" % index, digest_size=6, person=b"p2prl mixture").digest()
        drawn = int.from_bytes(digest) / 2**48 * self._bounds[-1]
        return self.members[min(bisect_right(self._bounds, drawn), len(self.members) - 1)]

    def _of(self, index: int) -> tuple[Environment, int]:
        member = self.member(index)
        return member, own_index(member, index)

    def prompt(self, index: int) -> str:
        member, own = self._of(index)
        return member.prompt(own)

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        member, own = self._of(index)
        return member.reward(own, answer)

    def answer(self, index: int) -> str | None:
        member, own = self._of(index)
        return member.answer(own) if isinstance(member, Answered) else None

    def respond(self, index: int, answers: Sequence[str]) -> str | None:
        member, own = self._of(index)
        return member.respond(own, answers) if isinstance(member, Conversing) else None

    def reward_turns(self, index: int, answers: Sequence[str]) -> tuple[float, str]:
        member, own = self._of(index)
        return member.reward_turns(own, answers) if isinstance(member, Conversing) else member.reward(own, answers[-1])

    def reference(self, index: int) -> Sequence[str] | None:
        member, own = self._of(index)
        if isinstance(member, Conversing):
            return member.reference(own)
        known = member.answer(own) if isinstance(member, Answered) else None
        return None if known is None else (known,)


def converses(environment: Environment) -> bool:
    """Whether any of its tasks may have several turns."""
    if isinstance(environment, Mixture):
        return any(map(converses, environment.members))
    return isinstance(environment, Conversing)


def own_index(environment: Environment, index: int) -> int:
    """The index as the environment knows it: training indices wrap round a finite one, held-out ones it places."""
    count = environment.num_prompts
    return index if count is None or index >= HELD_OUT_FROM else index % count
