"""Prompts as tokens, and rewards of answers given as tokens.

In: an environment, a tokenizer, indices, token ids (maybe a peer's). Out: `Prompt`s, rewards with details, judgements.

Invariant: a reward is a finite number in [0, 1] and its detail a short text, whatever the environment's code does; it
runs inside a `Guard`, which turns a raise, a hang or a hunger for memory into `RewardFailed`. What an answer was given
between its turns is compared with what the environment says here, or its group is refused: an honest maker's answer is
over where the environment fails, so that nothing was given after it.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from p2prl.environments.conversation import ONE_TURN, TurnRules, parts_of
from p2prl.environments.messages import JudgeItem, Judgement, TurnItem
from p2prl.environments.mixture import Mixture, own_index
from p2prl.environments.registry import Conversing, Environment, Replaying
from p2prl.errors import ConfigError, P2prlError
from p2prl.records import Prompt

MAX_DETAIL_CHARACTERS = 256
CHARACTERS_A_TOKEN = 32  # on average, at most: a longer text than that of all given tokens isn't even encoded
MAX_SLOW_ANSWERS = 2  # of one group; the others then cost nothing more, and its maker gives them the same 0
ANSWER_S = 5.0  # all its turns and its reward together
MEAN_ANSWER_S = 2.0  # of a group's answers, beside its slow ones; a program that never ends is stopped after that
T = TypeVar("T")


class RewardFailed(P2prlError):
    """The environment's code raised, ran too long or wanted too much memory."""


class RanTooLong(RewardFailed):
    """It passed its limit of time."""


class OtherTurns(P2prlError):
    """Between an answer's turns, or after them, the environment says something else here, or fails."""


class Guard(Protocol):
    def __call__(self, work: Callable[[], T]) -> T:
        """What `work` returns; raises RewardFailed when it fails or passes its limits."""
        ...


class Within(Protocol):
    def __call__(self, seconds: float) -> AbstractContextManager[object]:
        """All work that is guarded in it has so long together; what goes on is RanTooLong."""
        ...


class TextTokenizer(Protocol):
    """What is needed here of `models.tokenizer.Tokenizer`."""

    def encode_prompt(self, text: str) -> list[int]: ...
    def encode_turn(self, text: str, last: int) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Stops(Protocol):
    """What is needed here of `models.stop_strings.StopStrings`."""

    def text(self, token_ids: Sequence[int]) -> str: ...
    def ends_as_said(self, token_ids: Sequence[int], finish_reason: str) -> bool: ...


def group_s(num_answers: int) -> float:
    """What judging a group may take, whatever its answers are."""
    return MAX_SLOW_ANSWERS * ANSWER_S + num_answers * MEAN_ANSWER_S


def too_slow(num_answers: int) -> Judgement:
    """How fast a machine is must not decide what an answer is worth: such a group is worth nothing, to nobody."""
    why = f"not judged: its answers took longer than {group_s(num_answers):g} s together"
    return Judgement(True, (0.0,) * num_answers, (why,) * num_answers, too_slow=True)


class Judge:
    def __init__(
        self,
        environment: Environment,
        tokenizer: TextTokenizer,
        guard: Guard,
        stops: Stops | None = None,
        rules: TurnRules = ONE_TURN,
        within: Within = lambda seconds: nullcontext(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`stops` None: the recipe has no stop strings, and an answer's text is all of it. `within` usual: no hurry."""
        self._environment = environment
        self._tokenizer = tokenizer
        self._guard = guard
        self._stops = stops
        self._rules = rules
        self._within, self._clock = within, clock

    def prompt(self, index: int) -> Prompt:
        """Raises RewardFailed when the environment can't make it, ConfigError when the model can't read it."""
        text = _clean(self._guard(lambda: self._environment.prompt(own_index(self._environment, index))))
        return Prompt(index, text, tuple(self._tokenizer.encode_prompt(text)))

    def text(self, token_ids: Sequence[int]) -> str:
        """What rewards see of an answer."""
        text = self._tokenizer.decode(token_ids) if self._stops is None else self._stops.text(token_ids)
        return _clean(text)

    def texts(self, parts: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """Of an answer's parts, drawn, given, drawn, ...: a stop string ends those that were drawn alone."""
        return tuple(
            _clean(self._tokenizer.decode(part)) if number % 2 else self.text(part) for number, part in enumerate(parts)
        )

    def turn(self, item: TurnItem) -> tuple[int, ...]:
        """What it is given before its next turn; () where it is over."""
        drawn, given = parts_of(item.token_ids, item.runs)
        try:
            return self._next(item.index, self._texts(drawn), drawn[-1][-1], sum(map(len, given)))
        except RewardFailed:
            return ()  # whoever judges it runs into the same, and says so

    def _member(self, index: int) -> tuple[Environment, int]:
        """The environment that the index falls to, and the index as it knows it."""
        known = self._environment
        member = known.member(index) if isinstance(known, Mixture) else known
        return member, own_index(member, index)

    def _texts(self, drawn: Sequence[Sequence[int]]) -> list[str]:
        return self._guard(lambda: list(map(self.text, drawn)))

    def _next(self, index: int, texts: Sequence[str], last: int, num_given: int) -> tuple[int, ...]:
        """What the environment says after these turns, the last token of which is `last`; () where it is over."""
        environment, own = self._member(index)
        if len(texts) >= self._rules.max_turns or not isinstance(environment, Conversing):
            return ()
        return self._tokens(self._guard(lambda: environment.respond(own, list(texts))), last, num_given)

    def _each(self, index: int, texts: Sequence[str]) -> Iterator[str | None]:
        """What it says after each of these turns, in one go where it can."""
        environment, own = self._member(index)
        if isinstance(environment, Replaying):
            said = self._guard(lambda: list(environment.responses(own, list(texts))))
            yield from (said[number] if number < len(said) else None for number in range(len(texts)))
        elif isinstance(environment, Conversing):
            for number in range(1, len(texts) + 1):
                yield self._guard(lambda number=number: environment.respond(own, list(texts[:number])))

    def _tokens(self, said: str | None, last: int, num_given: int) -> tuple[int, ...]:
        if said is None or len(said) > CHARACTERS_A_TOKEN * self._rules.max_given_tokens:
            return ()
        try:
            given = tuple(self._tokenizer.encode_turn(_clean(said), last))
        except ConfigError as error:
            raise RewardFailed(f"the model can't read what the environment said: {error}") from error
        if not given:
            raise RewardFailed("the environment said nothing; None ends a conversation")
        return given if num_given + len(given) <= self._rules.max_given_tokens else ()

    def reward(self, index: int, token_ids: Sequence[int]) -> tuple[float, str]:
        return self._judged(JudgeItem(index, (), (tuple(token_ids),)))[0][0]

    def _judged(self, item: JudgeItem) -> tuple[list[tuple[float, str]], int]:
        """Reward and detail of each answer, a mixture's with its member's name; the first of other turns, or -1."""
        name = f"{self._environment.member(item.index).name}: " if isinstance(self._environment, Mixture) else ""
        judged, num_slow = [], 0
        for place in range(len(item.answers)):
            try:
                with self._within(ANSWER_S):
                    given, detail = self._worth(item, place, num_slow)
            except RewardFailed as error:
                given, detail = 0.0, str(error)
                num_slow += isinstance(error, RanTooLong)
            except OtherTurns as error:
                why = f"answer {place}: {error}"[:MAX_DETAIL_CHARACTERS]
                return [(0.0, why)] * len(item.answers), place
            judged.append((given, _clean(name + detail)[:MAX_DETAIL_CHARACTERS]))
        return judged, -1

    def _worth(self, item: JudgeItem, place: int, num_slow: int) -> tuple[float, str]:
        """After `num_slow` answers that ran too long."""
        drawn, given = parts_of(item.answers[place], item.runs[place] if item.runs else ())
        try:
            if num_slow >= MAX_SLOW_ANSWERS:
                raise RewardFailed(f"not judged: {num_slow} answers of this group ran too long")
            texts = self._texts(drawn)
            self._compare(item.index, drawn, given, texts)
        except RewardFailed as error:
            if not given:
                raise
            raise OtherTurns(f"what it was given can't be what the environment says: {error}") from error
        stopped = item.finishes[place : place + 1] == ("stop",)
        if stopped and self._next(item.index, texts, drawn[-1][-1], sum(map(len, given))):
            raise OtherTurns(f"it ends after turn {len(drawn)}, and the environment has more to say")
        worth, detail = self._reward(item.index, texts)
        if not math.isfinite(worth) or not 0.0 <= worth <= 1.0:
            raise RewardFailed(f"the environment gave {worth}, which is not in 0 to 1")
        return worth, detail

    def _compare(
        self, index: int, drawn: Sequence[tuple[int, ...]], given: Sequence[tuple[int, ...]], texts: Sequence[str]
    ) -> None:
        """Raises OtherTurns where the environment doesn't say between these turns what was given there."""
        num_given, said = 0, self._each(index, texts[: len(given)])
        for number, tokens in enumerate(given, 1):
            goes_on = number < self._rules.max_turns
            if not goes_on or self._tokens(next(said, None), drawn[number - 1][-1], num_given) != tokens:
                raise OtherTurns(f"what it was given after turn {number} is not what the environment says")
            num_given += len(tokens)

    def _reward(self, index: int, texts: Sequence[str]) -> tuple[float, str]:
        environment, own = self._member(index)

        def work() -> tuple[float, str]:
            if isinstance(environment, Conversing):
                given, detail = environment.reward_turns(own, texts)
            else:
                given, detail = environment.reward(own, texts[-1])
            return float(given), str(detail)

        return self._guard(work)

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
        count, bad_finish = len(item.answers), self._bad_finish(item)
        if bad_finish >= 0:  # refused anyhow
            return Judgement(
                True, (0.0,) * count, ("not judged: an answer doesn't end as it says",) * count, bad_finish
            )
        ends_at = self._clock() + group_s(count)
        with self._within(group_s(count)):
            judged, bad_turns = self._judged(item)
        if self._clock() >= ends_at:
            return too_slow(count)
        rewards, details = tuple(reward for reward, _ in judged), tuple(detail for _, detail in judged)
        return Judgement(True, rewards, details, bad_turns=bad_turns)

    def _bad_finish(self, item: JudgeItem) -> int:
        """The first answer that goes on past a stop string, or says that it ends by one and does not; -1: none."""
        if self._stops is not None:
            for place, (token_ids, reason) in enumerate(zip(item.answers, item.finishes, strict=False)):
                *before, last = parts_of(token_ids, item.runs[place] if item.runs else ()).drawn
                ends = [(turn, "stop") for turn in before] + [(last, reason)]
                if not all(self._stops.ends_as_said(turn, how) for turn, how in ends):
                    return place
        return -1


def _clean(text: str) -> str:
    """Without lone surrogates, which can't be written as UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")
