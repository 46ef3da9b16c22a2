import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.environments.judge import MAX_DETAIL_CHARACTERS, MAX_SLOW_ANSWERS, Judge, RanTooLong, RewardFailed
from p2prl.environments.messages import (
    Failed,
    JudgeItem,
    Judgement,
    JudgeReply,
    JudgeRequest,
    PromptsReply,
    PromptsRequest,
    Ready,
    Reply,
    Request,
)
from p2prl.environments.registry import HELD_OUT_FROM
from p2prl.models.stop_strings import StopStrings
from p2prl.records import Prompt

T = TypeVar("T")


class CodePoints:
    def encode_prompt(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def encode_turn(self, text: str, last: int) -> list[int]:
        return self.encode_prompt(text)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


class Scripted:
    """Gives what it was told to; its answers' texts are the keys."""

    name = "scripted"
    version = "scripted==1"

    def __init__(self, rewards: dict[str, tuple], num_prompts: int | None = None) -> None:
        self.rewards = rewards
        self.num_prompts = num_prompts

    def prompt(self, index: int) -> str:
        if index == 13:
            raise LookupError("no thirteenth prompt")
        return f"prompt {index}"

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        return self.rewards[answer]


def guard(work: Callable[[], T]) -> T:
    try:
        return work()
    except LookupError as error:
        raise RewardFailed(f"raised {error!r}") from error


def judge(rewards: dict[str, tuple], num_prompts: int | None = None) -> Judge:
    return Judge(Scripted(rewards, num_prompts), CodePoints(), guard)


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def test_a_prompt_comes_as_text_and_tokens() -> None:
    assert judge({}).prompt(7) == Prompt(7, "prompt 7", ids("prompt 7"))


def test_indices_wrap_round_a_finite_environment() -> None:
    assert judge({}, num_prompts=5).prompt(7) == Prompt(7, "prompt 2", ids("prompt 2"))


def test_a_held_out_index_reaches_a_finite_environment_as_it_is() -> None:
    index = HELD_OUT_FROM + 7
    assert judge({}, num_prompts=5).prompt(index) == Prompt(index, f"prompt {index}", ids(f"prompt {index}"))


def test_after_two_slow_answers_the_rest_of_a_group_is_not_judged() -> None:
    tried = []

    def slow(work: Callable[[], T]) -> T:
        made = work()
        if made == (1.0, "slow"):
            tried.append(made)
            raise RanTooLong("ran too long")
        return made

    answers = tuple(map(ids, "asbsab"))
    environment = Scripted({"a": (0.5, "a"), "b": (0.25, "b"), "s": (1.0, "slow")})
    judged = Judge(environment, CodePoints(), slow).check(JudgeItem(3, ids("prompt 3"), answers))
    assert judged.rewards == (0.5, 0.0, 0.25, 0.0, 0.0, 0.0)
    assert judged.details[1] == "ran too long"
    assert judged.details[4] == "not judged: 2 answers of this group ran too long"
    assert len(tried) == MAX_SLOW_ANSWERS


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.01, 1.01])
def test_a_reward_out_of_range_is_0_with_a_reason(value: float) -> None:
    reward, detail = judge({"a": (value, "well done")}).reward(0, ids("a"))
    assert reward == 0.0
    assert str(value) in detail


def test_a_reward_that_raises_is_0_with_a_reason() -> None:
    assert judge({}).reward(0, ids("a")) == (0.0, "raised KeyError('a')")


def test_a_detail_is_short_and_can_be_written() -> None:
    reward, detail = judge({"a": (1, "\ud800" * 1000)}).reward(0, ids("a"))
    assert (reward, detail) == (1.0, "?" * MAX_DETAIL_CHARACTERS)
    assert isinstance(reward, float)


def test_a_group_is_judged_answer_by_answer() -> None:
    item = JudgeItem(3, ids("prompt 3"), (ids("a"), ids("b"), ()))
    judged = judge({"a": (1.0, "right"), "b": (0.25, "near"), "": (0.0, "empty")}).check(item)
    assert judged == Judgement(True, (1.0, 0.25, 0.0), ("right", "near", "empty"))


def test_another_prompts_answers_are_not_judged() -> None:
    judged = judge({"a": (1.0, "right")}).check(JudgeItem(3, ids("prompt 4"), (ids("a"), ids("a"))))
    assert judged == Judgement(False, (0.0, 0.0), ("the prompt has other tokens",) * 2)


def test_a_prompt_that_cannot_be_made_is_not_ok() -> None:
    judged = judge({}).check(JudgeItem(13, ids("prompt 13"), (ids("a"),)))
    assert not judged.prompt_ok
    assert "thirteenth" in judged.details[0]


@given(st.lists(st.lists(st.integers(0, 255).map(int), max_size=4).map(tuple), max_size=4).map(tuple), st.floats())
def test_every_answer_gets_one_reward_in_range(answers: tuple, value: float) -> None:
    texts = {"".join(map(chr, answer)) for answer in answers}
    judged = judge(dict.fromkeys(texts, (value, ""))).check(JudgeItem(1, ids("prompt 1"), answers))
    assert len(judged.rewards) == len(judged.details) == len(answers)
    assert all(0.0 <= reward <= 1.0 for reward in judged.rewards)


MESSAGES = [
    (PromptsRequest(1, (2, 3)), Request),
    (JudgeRequest(2, (JudgeItem(3, (4, 5), ((6,), ())),)), Request),
    (Ready(bytes(32), "a==1", None, (1,), 0), Reply),
    (PromptsReply(1, (Prompt(2, "x", (3,)),)), Reply),
    (JudgeReply(2, (Judgement(True, (1.0,), ("right",)),)), Reply),
    (Failed("no", 3), Reply),
]


@pytest.mark.parametrize(("message", "kind"), MESSAGES)
def test_messages_survive_the_pipe(message: msgspec.Struct, kind: type) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind) == message


def test_a_stop_string_ends_an_answer_and_its_text() -> None:
    stops = StopStrings(("</a>",), CodePoints().decode, (0,))
    judging = Judge(Scripted({"x</a>": (1.0, "right"), "y": (0.5, "half")}), CodePoints(), guard, stops)
    prompt = ids("prompt 3")
    good = judging.check(JudgeItem(3, prompt, (ids("x</a>"), ids("y")), ("stop", "length")))
    assert (good.rewards, good.bad_finish) == ((1.0, 0.5), -1)
    for text, reason in (("x</a>", "length"), ("x</a>y", "length"), ("y", "stop")):
        bad = judging.check(JudgeItem(3, prompt, (ids("y"), ids(text)), ("length", reason)))
        assert (bad.rewards, bad.bad_finish) == ((0.0, 0.0), 1)
    assert judging.text(ids("x</a>y")) == "x</a>"
    assert judge({}).text(ids("x</a>y")) == "x</a>y"
