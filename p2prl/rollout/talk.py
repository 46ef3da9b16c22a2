"""Groups whose answers take several turns: what was drawn and given so far, and how it grows.

In: an engine's completions, what the environment says to each, completions of what follows. Out: prompts for the next
turn, at last completions whose segments tell drawn from given.

Invariants: tokens stay as they were drawn, none is ever encoded again; a given token has log-prob 0 and the version of
the token before it; a group that would name more versions than a record holds is left out.
"""

from collections.abc import Sequence

import msgspec

from p2prl.environments.conversation import runs_of
from p2prl.environments.messages import TurnItem
from p2prl.records import Completion, Segment, Tokens, Version
from p2prl.rollout.stamps import MAX_VERSIONS
from p2prl.rollout.worker import Begun

Place = tuple[int, int]  # group, answer


class Talk:
    def __init__(self, begun: Sequence[Begun], versions: Sequence[Version]) -> None:
        self._begun = begun
        self._answers = [list(answers) for _, _, answers in begun]
        self._versions = list(versions)
        self._going = [(group, answer) for group, answers in enumerate(self._answers) for answer in range(len(answers))]

    def asking(self) -> dict[Place, TurnItem]:
        """The answers that the environment may say something to: those that ended by themselves."""
        found = {}
        for group, answer in self._going:
            so_far = self._answers[group][answer]
            if so_far.finish_reason == "stop":
                index = self._begun[group][1].index
                found[group, answer] = TurnItem(index, so_far.token_ids, runs_of(so_far.segments))
        return found

    def told(self, given: dict[Place, tuple[int, ...]]) -> None:
        """The answers that go on, each with what it is given first; all others are over."""
        self._going = [place for place in self._going if given.get(place)]
        for group, answer in self._going:
            self._answers[group][answer] = with_given(self._answers[group][answer], given[group, answer])

    @property
    def going(self) -> list[Place]:
        return list(self._going)

    def prompts(self, places: Sequence[Place]) -> tuple[Tokens, ...]:
        return tuple(
            self._begun[group][1].token_ids + self._answers[group][answer].token_ids for group, answer in places
        )

    def drawn(self, place: Place, turn: Completion, versions: Sequence[Version]) -> None:
        """Its next turn, whose segments index `versions`."""
        for version in versions:
            if version not in self._versions:
                self._versions.append(version)
        group, answer = place
        places = [self._versions.index(version) for version in versions]
        self._answers[group][answer] = with_turn(self._answers[group][answer], turn, places)

    def ended(self) -> tuple[list[Begun], tuple[Version, ...]]:
        """The groups with their whole answers, whose segments index these versions."""
        groups: list[Begun] = [
            (draw, prompt, answers)
            for (draw, prompt, _), answers in zip(self._begun, self._answers, strict=True)
            if len({part.version for answer in answers for part in answer.segments}) <= MAX_VERSIONS
        ]
        return groups, tuple(self._versions)


def with_given(answer: Completion, token_ids: Sequence[int]) -> Completion:
    return msgspec.structs.replace(
        answer,
        token_ids=(*answer.token_ids, *token_ids),
        logprobs=answer.logprobs + bytes(4 * len(token_ids)),
        segments=(*answer.segments, Segment(answer.segments[-1].version, len(token_ids), drawn=False)),
    )


def with_turn(answer: Completion, turn: Completion, places: Sequence[int]) -> Completion:
    """`places[v]`: where the turn's version `v` is among the answer's."""
    segments = (Segment(places[part.version], part.num_tokens) for part in turn.segments)
    return Completion(
        answer.token_ids + turn.token_ids,
        answer.logprobs + turn.logprobs,
        (*answer.segments, *segments),
        turn.finish_reason,
    )
