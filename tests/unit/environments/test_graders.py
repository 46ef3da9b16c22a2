import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.environments.graders import GRADERS, last_number, make_grader
from p2prl.environments.rewarder import LimitGuard, Limits
from p2prl.errors import ConfigError

PLAIN = ("exact", "number", "regex", "choice")


def worth(kind: str, right: object, answer: str, **options: object) -> float:
    grader = make_grader(kind, options, "environment x")
    return grader.grade(grader.gold(right, "row 1"), answer)[0]


@pytest.mark.parametrize(
    ("right", "answer", "options", "reward"),
    [
        ("Paris", " Paris\n", {}, 1.0), ("Paris", "paris", {}, 0.0), ("Paris", "paris", {"ignore_case": True}, 1.0),
        (5, "5", {}, 1.0), ("Paris", "", {}, 0.0),
    ],
)  # fmt: skip
def test_exact(right: object, answer: str, options: dict, reward: float) -> None:
    assert worth("exact", right, answer, **options) == reward


@pytest.mark.parametrize(
    ("right", "answer", "tolerance", "reward"),
    [
        ("42", "so it is 42.", 0, 1.0), (42, "42.0", 0, 1.0), ("1,234", "1234", 0, 1.0), ("-3", "it is \u22123", 0, 1.0),
        ("3", "8-3", 0, 1.0), ("0.5", ".5", 0, 0.0), ("3.14", "3.1416", 0, 0.0), ("3.14", "3.1416", 0.001, 1.0),
        ("1e3", "1000", 0, 1.0), ("5", "", 0, 0.0), ("5", "nothing", 0, 0.0), ("5", "9" * 5000, 0, 0.0),
        ("5", "5 apples and 6 pears", 0, 0.0),
    ],
)  # fmt: skip
def test_number(right: object, answer: str, tolerance: float, reward: float) -> None:
    assert worth("number", right, answer, tolerance=tolerance) == reward


@given(st.text(max_size=50), st.decimals(-(10**6), 10**6, places=3))
def test_a_number_after_a_blank_is_found_behind_any_text(text: str, value: Decimal) -> None:
    assert last_number(f"{text} {value}") == value


@pytest.mark.parametrize(
    ("right", "answer", "options", "reward"),
    [
        (r"\d+ (cats|dogs)", "12 cats", {}, 1.0), (r"\d+ (cats|dogs)", "12 cows", {}, 0.0),
        ("7", "a=6 a=7", {"pattern": r"a=(\d)"}, 1.0), ("6", "a=6 a=7", {"pattern": r"a=(\d)"}, 0.0),
        ("a=7", "so a=7", {"pattern": r"a=\d"}, 1.0), ("7", "nothing", {"pattern": r"a=(\d)"}, 0.0),
    ],
)  # fmt: skip
def test_regex(right: str, answer: str, options: dict, reward: float) -> None:
    assert worth("regex", right, answer, **options) == reward


def test_a_pattern_that_backtracks_for_ever_is_stopped() -> None:
    grader = make_grader("regex", {}, "environment x")
    gold = grader.gold("(a+)+b", "row 1")
    with pytest.raises(Exception, match="ran longer than"):
        LimitGuard(Limits(call_s=0.2))(lambda: grader.grade(gold, "a" * 60))


@pytest.mark.parametrize(
    ("right", "answer", "reward"),
    [
        ("B", "B", 1.0), ("b", "(B)", 1.0), (1, "The answer is B.", 1.0), (0, "The answer is B.", 0.0),
        ("C", "A is wrong, I think. Answer: C", 1.0), ("C", "It can't be A or B; C", 1.0), ("C", "", 0.0),
        ("D", "the answer is **D**", 1.0), ("B", "The answer is 'B'", 1.0), ("B", "Answer:\n\nB", 1.0),
        ("A", "The answer is a dog", 0.0), ("A", "The answer is a \"dog\".", 0.0), ("A", "A dog barked", 0.0),
        ("A", "It is a dog, so the answer is b.", 0.0), ("B", "It is a dog, so the answer is b.", 1.0),
        ("A", "a", 1.0), ("A", "(a)", 1.0), ("A", "the answer is (a) because of it", 1.0), ("A", "answer: a", 1.0),
        ("B", "option b: the dog", 1.0), ("B", "answer is b - the dog", 1.0), ("A", "A is right", 1.0),
        ("B", "B. I am sure of it", 1.0), ("B", "I choose B since A dog isn't it", 1.0), ("A", "I say A", 1.0),
        ("I", "The answer is I", 1.0), ("D", "D's a dog", 0.0), ("C", "Q: the unanswered c", 0.0),
        ("B", "$\\boxed{B}$", 1.0), ("B", "**Answer:** B", 1.0), ("B", "My answer I think is B", 1.0),
    ],
)  # fmt: skip
def test_choice(right: object, answer: str, reward: float) -> None:
    assert worth("choice", right, answer) == reward


@pytest.mark.parametrize(
    ("kind", "right", "options", "message"),
    [
        ("number", "no number", {}, "the answer of row 1, 'no number', holds no number"),
        ("choice", "BC", {}, "is no letter"),
        ("regex", "(", {}, "is no regular expression"),
        ("regex", "7", {"pattern": "["}, "pattern, '\\[', is no regular expression"),
        ("number", "1", {"tolerance": 2.0}, "tolerance = 2.0"),
        ("number", "1", {"tolerance": "much"}, "tolerance = 'much' is no float"),
        ("exact", "1", {"ignore_case": 1}, "ignore_case = 1 is no bool"),
        ("python_tests", [], {}, 'says sandbox = "bubblewrap"'),
    ],
)
def test_what_can_not_be_graded_by_is_named(kind: str, right: object, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_grader(kind, options, "environment x").gold(right, "row 1")


@pytest.mark.parametrize("kind", PLAIN)
@given(answer=st.text(max_size=200))
def test_any_answer_gets_a_reward_and_a_reason(kind: str, answer: str) -> None:
    grader = make_grader(kind, {}, "environment x")
    reward, detail = grader.grade(grader.gold("7" if kind != "choice" else "B", "row 1"), answer)
    assert 0.0 <= reward <= 1.0 and detail


@pytest.mark.parametrize(("kind", "right"), [("exact", "Paris"), ("number", "1,234.5"), ("choice", 2)])
def test_the_reference_earns_everything(kind: str, right: object) -> None:
    grader = make_grader(kind, {}, "environment x")
    gold = grader.gold(right, "row 1")
    assert grader.grade(gold, str(grader.reference(gold)))[0] == 1.0


def test_every_grader_has_a_case_here() -> None:
    assert set(GRADERS) == {*PLAIN, "math", "python_tests"}


@pytest.mark.parametrize("answer", ["answer is" + " " * 20_000, "answer is " * 5_000, "answer" + " :=*" * 10_000])
@pytest.mark.parametrize("kind", ["choice", "number", "exact"])
def test_no_answer_takes_long_to_grade(kind: str, answer: str) -> None:
    grader = make_grader(kind, {}, "environment x")
    gold = grader.gold("B" if kind == "choice" else "7", "row 1")
    started = time.perf_counter()
    assert grader.grade(gold, answer)[0] == 0.0
    assert time.perf_counter() - started < 0.5


@pytest.mark.parametrize("tolerance", [float("nan"), float("inf"), -0.1, 1])
def test_a_tolerance_is_a_share(tolerance: float) -> None:
    with pytest.raises(ConfigError, match="not in 0 to 1"):
        make_grader("number", {"tolerance": tolerance}, "environment x")
