"""An environment inside a node's limits, as `p2prl env` tries it.

In: what a recipe or a user says of it, indices, answers turn by turn. Out: prompts, what it says, rewards; RewardFailed
where its code raises, hangs or is hungry for memory.
"""

import math
from collections.abc import Sequence
from pathlib import Path

from p2prl.environments.judge import RanTooLong, RewardFailed
from p2prl.environments.mixture import own_index
from p2prl.environments.registry import Answered, Conversing, Environment, load_environment
from p2prl.environments.rewarder import LimitGuard, Limits
from p2prl.environments.spec import Spec, open_environment
from p2prl.errors import ConfigError

OPENING = Limits(call_s=60.0, memory_bytes=2**36)  # another package's imports, a large data file


class Guarded:
    """Implements nothing of the flow: it is for looking at an environment. Indices wrap round a finite one."""

    def __init__(self, spec: Spec, *, strict: bool) -> None:
        """`strict`: as a node would open it, with versions and hashes."""
        self._guard = LimitGuard(Limits())
        try:
            self.environment = LimitGuard(OPENING)(lambda: _opened(spec, strict))
        except RanTooLong:
            names = ", ".join(member.name for member in spec.members)
            raise ConfigError(
                f"{names} was not loaded within {OPENING.call_s:g} s: its package may wait for a network, or for a lock; "
                "ask its author, or take another environment"
            ) from None

    def prompt(self, index: int) -> str:
        return self._guard(lambda: self.environment.prompt(own_index(self.environment, index)))

    def answers(self, index: int) -> tuple[str, ...]:
        """Right ones, a text a turn; () where none is known."""
        known = self.environment
        own = own_index(known, index)
        if isinstance(known, Conversing):
            return tuple(self._guard(lambda: known.reference(own)) or ())
        right = self._guard(lambda: known.answer(own)) if isinstance(known, Answered) else None
        return () if right is None else (right,)

    def respond(self, index: int, answers: Sequence[str]) -> str | None:
        known = self.environment
        if not isinstance(known, Conversing):
            return None
        return self._guard(lambda: known.respond(own_index(known, index), answers))

    def said(self, index: int, answers: Sequence[str]) -> tuple[str, ...]:
        """After each of the answers. Raises ConfigError where it is over before the last."""
        found: list[str] = []
        for number in range(1, len(answers) + 1):
            response = self.respond(index, answers[:number])
            if response is None:
                if number < len(answers):
                    raise ConfigError(
                        f"it is over after {number} of the {len(answers)} answers; give no more than that"
                    )
                break
            found.append(response)
        return tuple(found)

    def repeated(self, index: int, answer: str, max_turns: int) -> list[str]:
        """The same answer in every turn that there is."""
        answers = [answer]
        while len(answers) < max_turns and self.respond(index, answers) is not None:
            answers.append(answer)
        return answers

    def reward(self, index: int, answers: Sequence[str]) -> tuple[float, str]:
        known = self.environment
        own = own_index(known, index)

        def work() -> tuple[float, str]:
            return known.reward_turns(own, answers) if isinstance(known, Conversing) else known.reward(own, answers[-1])

        given, detail = self._guard(work)
        if not math.isfinite(given) or not 0.0 <= given <= 1.0:
            raise RewardFailed(f"the environment gave {given}, which is not in 0 to 1")
        return float(given), str(detail)


def _opened(spec: Spec, strict: bool) -> Environment:
    if strict:
        return open_environment(spec)
    member = spec.members[0]
    return load_environment(member.name, member.params, [Path(folder) for folder in spec.folders])
