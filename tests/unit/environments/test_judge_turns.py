"""The judge plays a conversation again: what was given is what the environment says, and an answer ends where it does."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.environments.conversation import TurnRules
from p2prl.environments.judge import (
    ANSWER_S,
    CHARACTERS_A_TOKEN,
    MAX_SLOW_ANSWERS,
    Judge,
    RanTooLong,
    RewardFailed,
    group_s,
)
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


@pytest.mark.parametrize("fault", ["raise.", "slow.", "silence.", "percent."])
def test_what_was_given_after_a_fault_was_invented(fault: str) -> None:
    """An honest maker is given nothing there: whatever stands after it would be trained on unseen."""
    made = judge()
    for turns in ((fault,), ("a.", fault)):
        token_ids, runs = played(made, 4, *turns)
        lie = (*token_ids, *map(ord, "|4:9stop.")), (*runs, 4, 5)
        judged = made.check(item(4, played(made, 4, "stop."), lie))
        assert judged.bad_turns == 1 and judged.rewards == (0.0, 0.0)
        assert judged.details[0].startswith("answer 1: what it was given can't be what the environment says: ")


def test_what_is_not_judged_must_not_have_been_given_anything() -> None:
    made = judge()
    slow, honest = [played(made, 4, "slow.")] * MAX_SLOW_ANSWERS, played(made, 4, "stop.")
    lie = tuple(map(ord, "a.|4:9stop.")), (2, 4, 5)
    assert made.check(item(4, *slow, honest)).bad_turns == -1
    judged = made.check(item(4, *slow, honest, lie))
    assert judged.bad_turns == MAX_SLOW_ANSWERS + 1 and "not judged" in judged.details[0]


class Plays(Counts):
    """Plays a conversation once; `asked`: how many answers each question came with."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def respond(self, index: int, answers: Sequence[str]) -> str | None:
        self.asked.append(len(answers))
        return super().respond(index, answers)

    def responses(self, index: int, answers: Sequence[str]) -> Sequence[str]:
        self.asked.append(len(answers))
        said = [super(Plays, self).respond(index, answers[:number]) for number in range(1, len(answers) + 1)]
        return [each for each in said if each is not None]


def test_a_conversation_that_can_be_played_in_one_go_is_played_once() -> None:
    rules, whole = TurnRules(9, 100), played(judge(9), 4, *"abcdef", "stop.")
    mixed = Mixture([made := Plays()], [1.0])
    for environment, prompt in ((made, 4), (mixed, 4)):
        playing = Judge(environment, CodePoints(), guard, rules=rules)
        made.asked.clear()
        judged = playing.check(item(prompt, whole))
        assert judged.rewards == (0.7,) and not judged.refused
        assert made.asked == [6, 7], "before the last turn, and after it"
        for turn, word in enumerate("abcdef"):
            other = tuple(map(ord, "".join(map(chr, whole[0])).replace(f":{turn + 1}{'bcdefs'[turn]}", f":9{word}")))
            assert (
                playing.check(item(prompt, (other, whole[1])))
                .details[0]
                .startswith(f"answer 0: what it was given after turn {turn + 1} is not")
            )
        over = tuple(map(ord, "stop.|4:1b.")), (5, 4, 2)
        broken = tuple(map(ord, "raise.|4:1b.")), (6, 4, 2)
        assert [playing.check(item(prompt, each)).bad_turns for each in (over, broken)] == [0, 0]


class Hurry:
    """A guard on a clock of its own: each call takes `call_s`, as far as there is time."""

    def __init__(self, call_s: float) -> None:
        self.call_s, self.now, self.ends = call_s, 0.0, [float("inf")]

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        self.ends.append(self.now + seconds)
        yield
        self.ends.pop()

    def __call__(self, work: Callable[[], T]) -> T:
        left_s = min(self.ends) - self.now
        self.now += min(self.call_s, max(0.0, left_s))
        if left_s < self.call_s:
            raise RanTooLong("too slow")
        return work()


def test_an_answer_has_one_time_for_all_its_turns_and_a_group_for_all_its_answers() -> None:
    turns = played(judge(9), 4, *"abcdef", "stop.")
    hurry = Hurry(ANSWER_S / 4)
    slow = Judge(Counts(), CodePoints(), hurry, rules=TurnRules(9, 100), within=hurry.within)
    judged = slow.check(item(4, *[turns] * 4))
    assert judged.bad_turns == 0 and "too slow" in judged.details[0] and hurry.now == ANSWER_S + hurry.call_s

    count = 64
    hurry = Hurry(ANSWER_S / 2)
    slow = Judge(Silent(), CodePoints(), hurry, within=hurry.within)
    one = JudgeItem(4, tuple(map(ord, "s4")), ((97, END),) * count, ("length",) * count, ((2,),) * count)
    judged = slow.check(one)
    assert hurry.now == group_s(count) + hurry.call_s, "and the prompt"
    assert not judged.refused and judged.rewards[0] == 0.5 and judged.rewards[-1] == 0.0
    assert "not judged: 2 answers" in judged.details[-1]


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
