"""The judge plays a conversation again: what was given is what the environment says, and an answer ends where it does."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.environments.conversation import TurnRules
from p2prl.environments.judge import CHARACTERS_A_TOKEN, MAX_SLOW_ANSWERS, Judge, RanTooLong, RewardFailed
from p2prl.environments.messages import JudgeItem, TurnItem, TurnsReply, TurnsRequest
from p2prl.environments.mixture import Mixture
from p2prl.environments.registry import Conversing
from p2prl.environments.rewarder import answer
from p2prl.errors import ConfigError

T = TypeVar("T")
END = ord(".")


class CodePoints:
    """An answer ends with a full stop, which is no text; a turn begins with a bar."""

    def encode_prompt(self, text: str) -> list[int]:
        return list(map(ord, text))

    def encode_turn(self, text: str, last: int) -> list[int]:
        if "%" in text:
            raise ConfigError("it can't read %")
        return list(map(ord, f"{'' if last == END else '.'}|{text}")) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids)).replace(".", "")


class Counts:
    """Says how many answers there were until somebody says stop; what it says to some words is a fault."""

    name, version, num_prompts = "counts", "counts==1", 10

    def prompt(self, index: int) -> str:
        return f"p{index}"

    def respond(self, index: int, answers: Sequence[str]) -> str | None:
        if answers[-1] == "slow":
            raise TimeoutError
        if answers[-1] == "raise":
            raise LookupError("broken")
        return {"stop": None, "silence": "", "percent": "%"}.get(answers[-1], f"{index}:{len(answers)}")

    def reward_turns(self, index: int, answers: Sequence[str]) -> tuple[float, str]:
        return len(answers) / 10, "/".join(answers)

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        return self.reward_turns(index, [answer])

    def reference(self, index: int) -> Sequence[str]:
        return ("a", "stop")


class Silent:
    name, version, num_prompts = "silent", "silent==1", None

    def prompt(self, index: int) -> str:
        return f"s{index}"

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        return 0.5, answer


def guard(work: Callable[[], T]) -> T:
    try:
        return work()
    except TimeoutError as error:
        raise RanTooLong("too slow") from error
    except LookupError as error:
        raise RewardFailed(f"raised {error!r}") from error


def judge(max_turns: int = 3, max_given_tokens: int = 100) -> Judge:
    return Judge(Counts(), CodePoints(), guard, rules=TurnRules(max_turns, max_given_tokens))


def played(made: Judge, index: int, *texts: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(tokens, runs) of a conversation in which these are the answers, as far as it gets."""
    token_ids: tuple[int, ...] = ()
    runs: tuple[int, ...] = ()
    for number, text in enumerate(texts, 1):
        token_ids, runs = (*token_ids, *map(ord, text)), (*runs, len(text))
        said = made.turn(TurnItem(index, token_ids, runs))
        if not said or number == len(texts):
            break
        token_ids, runs = token_ids + said, (*runs, len(said))
    return token_ids, runs


def item(index: int, *answers: tuple[tuple[int, ...], tuple[int, ...]], finish: str = "stop") -> JudgeItem:
    token_ids, runs = tuple(a for a, _ in answers), tuple(r for _, r in answers)
    return JudgeItem(index, tuple(map(ord, f"p{index}")), token_ids, (finish,) * len(answers), runs)


def test_what_is_said_is_what_was_given() -> None:
    made = judge()
    token_ids, runs = played(made, 4, "a.", "b.", "stop.")
    assert "".join(map(chr, token_ids)) == "a.|4:1b.|4:2stop." and runs == (2, 4, 2, 4, 5)
    judged = made.check(item(4, (token_ids, runs)))
    assert (judged.rewards, judged.details, judged.bad_turns) == ((0.3,), ("a/b/stop",), -1)


@given(st.lists(st.sampled_from(["a.", "b.", "stop.", "raise.", "silence.", "percent."]), min_size=1, max_size=5))
def test_every_honest_conversation_passes(texts: list[str]) -> None:
    made = judge()
    judged = made.check(item(7, played(made, 7, *texts, "stop.")))
    assert judged.bad_turns == -1


def test_an_answer_without_an_end_token_is_given_its_end() -> None:
    assert "".join(map(chr, played(judge(), 1, "a", "stop.")[0])) == "a.|1:1stop."


@pytest.mark.parametrize(
    ("text", "runs", "why"),
    [
        ("a.|4:2stop.", (2, 4, 5), "after turn 1"),
        ("a.|4:1b.|4:1stop.", (2, 4, 2, 4, 5), "after turn 2"),
        ("a.|4:1b.", (2, 4, 2), "ends after turn 2, and the environment has more"),
        ("stop.|4:1b.", (5, 4, 2), "after turn 1"),
        ("raise.", (6,), ""),
        ("a.|4:1raise.", (2, 4, 6), ""),
    ],
)
def test_other_words_and_an_early_end_are_found(text: str, runs: tuple[int, ...], why: str) -> None:
    made, whole = judge(), played(judge(), 4, "stop.")
    judged = made.check(item(4, whole, (tuple(map(ord, text)), runs)))
    assert judged.bad_turns == (1 if why else -1)
    if why:
        assert why in judged.details[0] and judged.details[0].startswith("answer 1: ")


def test_a_fault_of_the_environment_ends_it_and_is_worth_nothing_with_a_reason() -> None:
    made = judge()
    faults = {"raise.": "broken", "silence.": "said nothing", "percent.": "can't read %"}
    judged = made.check(item(4, *(played(made, 4, "a.", text) for text in faults)))
    assert judged.rewards == (0.0,) * 3 and judged.bad_turns == -1
    for detail, why in zip(judged.details, faults.values(), strict=True):
        assert why in detail


def test_slow_words_count_as_slow_answers() -> None:
    made = judge()
    slow = [played(made, 4, "slow.")] * MAX_SLOW_ANSWERS
    judged = made.check(item(4, *slow, played(made, 4, "stop.")))
    assert "not judged" in judged.details[-1] and judged.rewards == (0.0,) * (MAX_SLOW_ANSWERS + 1)


def test_it_is_over_after_the_last_turn_or_when_too_much_was_said() -> None:
    two = played(judge(max_turns=2), 4, "a.", "b.", "c.")
    assert two[1] == (2, 4, 2) and judge(max_turns=2).check(item(4, two)).rewards == (0.2,)
    little = played(judge(max_given_tokens=7), 4, "a.", "b.", "c.")
    assert little[1] == (2, 4, 2) and judge(max_given_tokens=7).check(item(4, little)).bad_turns == -1
    assert judge(max_given_tokens=8).check(item(4, little)).bad_turns == 0


def test_far_too_many_words_are_never_encoded_and_a_turn_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = judge(max_turns=3, max_given_tokens=4)
    monkeypatch.setattr(Counts, "respond", lambda *_: "x" * (CHARACTERS_A_TOKEN * 4 + 1))
    monkeypatch.setattr(CodePoints, "encode_turn", None)
    assert played(made, 4, "a.", "b.")[1] == (2,)
    monkeypatch.undo()
    whole, read = played(judge(), 4, "a.", "b.", "stop."), []
    monkeypatch.setattr(CodePoints, "decode", lambda self, ids: read.append(ids) or "".join(map(chr, ids))[:-1])
    assert judge().check(item(4, whole)).rewards == (0.3,) and len(read) == 3


def test_an_answer_cut_at_its_length_is_over() -> None:
    assert judge().check(item(4, (tuple(map(ord, "aa")), (2,)), finish="length")).bad_turns == -1


def test_one_turn_asks_for_no_words() -> None:
    made = Judge(Counts(), CodePoints(), guard)
    assert made.turn(TurnItem(4, (97, END), (2,))) == ()
    assert made.check(item(4, ((97, END), (2,)))).rewards == (0.1,)


def test_members_of_a_mixture_may_differ() -> None:
    mixed = Mixture([Counts(), Silent()], [1.0, 1.0])
    made = Judge(mixed, CodePoints(), guard, rules=TurnRules(3, 100))
    index = {mixed.member(number).name: number for number in range(20)}
    assert isinstance(mixed, Conversing)
    assert made.turn(TurnItem(index["silent"], (97, END), (2,))) == ()
    assert made.turn(TurnItem(index["counts"], (97, END), (2,))) == tuple(map(ord, f"|{index['counts'] % 10}:1"))
    assert made.reward(index["counts"], (97, END)) == (0.1, "counts: a")
    assert made.reward(index["silent"], (97, END)) == (0.5, "silent: a")
    assert (mixed.reference(index["counts"]), mixed.reference(index["silent"])) == (("a", "stop"), None)


def test_the_process_answers_for_many_at_once() -> None:
    request = TurnsRequest(5, (TurnItem(4, (97, END), (2,)), TurnItem(4, tuple(map(ord, "stop.")), (5,))))
    assert answer(judge(), request) == TurnsReply(5, (tuple(map(ord, "|4:1")), ()))
