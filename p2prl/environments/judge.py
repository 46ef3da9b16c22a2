"""Prompts as tokens, and rewards of answers given as tokens.

In: an environment, a tokenizer, indices, token ids (maybe a peer's). Out: `Prompt`s, rewards with details, judgements.

Invariant: a reward is a finite number in [0, 1] and its detail a short text, whatever the environment's code does; it
runs inside a `Guard`, which turns a raise, a hang or a hunger for memory into `RewardFailed`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from p2prl.environments.messages import JudgeItem, Judgement
from p2prl.environments.mixture import Mixture, own_index
from p2prl.environments.registry import Environment
from p2prl.errors import ConfigError, P2prlError
from p2prl.records import Prompt

MAX_DETAIL_CHARACTERS = 256
MAX_SLOW_ANSWERS = 2  # of one group; the others then cost nothing more, and its maker gives them the same 0
T = TypeVar("T")


class RewardFailed(P2prlError):
    """The environment's code raised, ran too long or wanted too much memory."""


class RanTooLong(RewardFailed):
    """It passed its limit of time."""


class Guard(Protocol):
    def __call__(self, work: Callable[[], T]) -> T:
        """What `work` returns; raises RewardFailed when it fails or passes its limits."""
        ...


class TextTokenizer(Protocol):
    """What is needed here of `models.tokenizer.Tokenizer`."""

    def encode_prompt(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Judge:
    def __init__(self, environment: Environment, tokenizer: TextTokenizer, guard: Guard) -> None:
        self._environment = environment
        self._tokenizer = tokenizer
        self._guard = guard

    def prompt(self, index: int) -> Prompt:
        """Raises RewardFailed when the environment can't make it, ConfigError when the model can't read it."""
        text = _clean(self._guard(lambda: self._environment.prompt(own_index(self._environment, index))))
        return Prompt(index, text, tuple(self._tokenizer.encode_prompt(text)))

    def reward(self, index: int, token_ids: Sequence[int]) -> tuple[float, str]:
        return self._rewards(index, [token_ids])[0]

    def _rewards(self, index: int, answers: Sequence[Sequence[int]]) -> list[tuple[float, str]]:
        """One each. A mixture's name their member."""
        member = f"{self._environment.member(index).name}: " if isinstance(self._environment, Mixture) else ""
        judged, num_slow = [], 0
        for answer in answers:
            try:
                if num_slow >= MAX_SLOW_ANSWERS:
                    raise RewardFailed(f"not judged: {num_slow} answers of this group ran too long")
                given, detail = self._guard(partial(self._judged, index, answer))
                if not math.isfinite(given) or not 0.0 <= given <= 1.0:
                    raise RewardFailed(f"the environment gave {given}, which is not in 0 to 1")
            except RewardFailed as error:
                given, detail = 0.0, str(error)
                num_slow += isinstance(error, RanTooLong)
            judged.append((given, _clean(member + detail)[:MAX_DETAIL_CHARACTERS]))
        return judged

    def _judged(self, index: int, token_ids: Sequence[int]) -> tuple[float, str]:
        answer = self._tokenizer.decode(token_ids)
        given, detail = self._environment.reward(own_index(self._environment, index), answer)
        return float(given), str(detail)

    def check(self, item: JudgeItem) -> Judgement:
        """For admission: does the prompt have these tokens, and what is each answer worth?"""
        try:
            prompt_ok = self.prompt(item.index).token_ids == item.prompt_ids
            reason = "" if prompt_ok else "the prompt has other tokens"
        except (RewardFailed, ConfigError) as error:
            prompt_ok, reason = False, f"no such prompt: {error}"[:MAX_DETAIL_CHARACTERS]
        if not prompt_ok:
            # Rewards of another prompt's answers mean nothing and cost time, which a peer must not make us spend.
            return Judgement(False, (0.0,) * len(item.answers), (_clean(reason),) * len(item.answers))
        judged = self._rewards(item.index, item.answers)
        return Judgement(True, tuple(reward for reward, _ in judged), tuple(detail for _, detail in judged))


def _clean(text: str) -> str:
    """Without lone surrogates, which can't be written as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
