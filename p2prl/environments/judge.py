"""Prompts as tokens, and rewards of answers given as tokens.

In: an environment, a tokenizer, indices, token ids (maybe a peer's). Out: `Prompt`s, rewards with details, judgements.

Invariant: a reward is a finite number in [0, 1] and its detail a short text, whatever the environment's code does; it
runs inside a `Guard`, which turns a raise, a hang or a hunger for memory into `RewardFailed`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from p2prl.environments.messages import JudgeItem, Judgement
from p2prl.environments.registry import Environment
from p2prl.errors import ConfigError, P2prlError
from p2prl.records import Prompt

MAX_DETAIL_CHARACTERS = 256
T = TypeVar("T")


class RewardFailed(P2prlError):
    """The environment's code raised, ran too long or wanted too much memory."""


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
        count = self._environment.num_prompts
        text = _clean(self._guard(lambda: self._environment.prompt(index if count is None else index % count)))
        return Prompt(index, text, tuple(self._tokenizer.encode_prompt(text)))

    def reward(self, index: int, token_ids: Sequence[int]) -> tuple[float, str]:
        try:
            given, detail = self._guard(lambda: self._judged(index, token_ids))
        except RewardFailed as error:
            return 0.0, _clean(str(error))[:MAX_DETAIL_CHARACTERS]
        if not math.isfinite(given) or not 0.0 <= given <= 1.0:
            return 0.0, f"the environment gave {given}, which is not in 0 to 1"
        return given, _clean(detail)[:MAX_DETAIL_CHARACTERS]

    def _judged(self, index: int, token_ids: Sequence[int]) -> tuple[float, str]:
        count = self._environment.num_prompts
        answer = self._tokenizer.decode(token_ids)
        given, detail = self._environment.reward(index if count is None else index % count, answer)
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
        judged = [self.reward(item.index, answer) for answer in item.answers]
        return Judgement(True, tuple(reward for reward, _ in judged), tuple(detail for _, detail in judged))


def _clean(text: str) -> str:
    """Without lone surrogates, which can't be written as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
