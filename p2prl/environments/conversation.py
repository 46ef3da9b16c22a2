"""Answers in several turns: which tokens the policy drew, and which the environment gave between them.

In: segments, token ids. Out: runs: the lengths of what was drawn, given, drawn, ... in the order of the tokens.

An environment that answers back is asked with all answers so far, and says the same to the same: what it gave can be
made again by anybody, and nothing is kept between two questions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from p2prl.records import Segment


class TurnRules(msgspec.Struct, frozen=True):
    """Of one answer: turns that the policy has at most, and tokens that it is given between them, all together."""

    max_turns: int = 1
    max_given_tokens: int = 0


ONE_TURN = TurnRules()


class Parts(NamedTuple):
    """What was drawn, turn by turn, and what was given after each but the last."""

    drawn: list[tuple[int, ...]]
    given: list[tuple[int, ...]]


def runs_of(segments: Sequence[Segment]) -> tuple[int, ...]:
    """The first is of drawn tokens, 0 where given ones come first."""
    runs, drawn = [0], True
    for segment in segments:
        if segment.drawn != drawn:
            drawn = segment.drawn
            runs.append(0)
        runs[-1] += segment.num_tokens
    return tuple(runs)


def parts_of(token_ids: Sequence[int], runs: Sequence[int] = ()) -> Parts:
    """`runs` (): all of it was drawn, in one turn."""
    parts, begin = Parts([], []), 0
    for number, length in enumerate(runs or (len(token_ids),)):
        (parts.given if number % 2 else parts.drawn).append(tuple(token_ids[begin : begin + length]))
        begin += length
    return parts
