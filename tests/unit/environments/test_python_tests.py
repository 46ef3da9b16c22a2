import pytest

from p2prl.environments.python_tests import PythonTests, program_of
from p2prl.errors import ConfigError

pytestmark = pytest.mark.needs("bwrap")
SQUARES = [{"call": "f(2)", "result": "4"}, {"call": "f(-3)", "result": "9"}]
SUMS = '[{"input": "3\\n4\\n", "output": "7"}, {"input": "1\\n1\\n", "output": "2"}]'


@pytest.fixture(scope="module")
def grader() -> PythonTests:
    return PythonTests("bubblewrap")


@pytest.mark.parametrize(
    ("answer", "reward", "detail"),
    [
        ("Here:\n```python\ndef f(x):\n    return x * x\n```\nDone.", 1.0, "all 2 tests passed"),
        ("print('noise')\ndef f(x): return x * x", 1.0, "all 2 tests passed"),
        ("def f(x): return 4", 0.0, "f(-3) gave 4, not 9"),
        ("def f(x): raise KeyError", 0.0, "f(2) gave raised KeyError, not 4"),
        ('import os\nos.write(1, b\'["4", "9"]\')\nos._exit(0)', 0.0, "gave nothing"),
        ("def f(", 0.0, "the program failed"),
        ("while True: pass", 0.0, "the program failed"),
        ("", 0.0, "a program of 0 bytes"),
    ],
)
def test_calls(grader: PythonTests, answer: str, reward: float, detail: str) -> None:
    given, why = grader.grade(grader.gold(SQUARES, "row 1"), answer)
    assert given == reward
    assert detail in why


def test_input_and_output(grader: PythonTests) -> None:
    gold = grader.gold(SUMS, "row 1")
    assert grader.grade(gold, "print(int(input()) + int(input()))")[0] == 1.0
    assert grader.grade(gold, "print(7)") == (0.0, "test 2: another output")
    assert grader.grade(gold, "1 / 0") == (0.0, "test 1: it ended with exit code 1")


@pytest.mark.parametrize(
    "tests", [[], "[", {"call": "f"}, [{"call": "f(1)"}, {"input": "", "output": ""}], [{"input": "3"}], [{}] * 17]
)
def test_tests_that_say_nothing_are_named(grader: PythonTests, tests: object) -> None:
    with pytest.raises(ConfigError, match="row 4"):
        grader.gold(tests, "row 4")


def test_the_last_block_is_the_program() -> None:
    assert program_of("```\nfirst\n```\ntext\n```python\nsecond\n```") == "second\n"
    assert program_of("plain") == "plain"


@pytest.mark.parametrize(
    "tests",
    [
        [{"call": "f(1)"}],
        [{"call": "f(1)", "output": "1"}],
        [{"call": "f(1)", "result": "1", "output": "1"}],
        [{"input": "1", "result": "1"}],
        [{"input": "1"}],
        "[" * 100_000,
    ],
)
def test_tests_that_nothing_could_pass_are_found_when_the_file_is_read(grader: PythonTests, tests: object) -> None:
    with pytest.raises(ConfigError, match="correct"):
        grader.gold(tests, "row 1")


def test_a_program_that_is_no_argument_is_worth_0(grader: PythonTests) -> None:
    gold = grader.gold(SUMS, "row 1")
    assert grader.grade(gold, "print(7)\0") == (0.0, "a program with a null character")
    assert "a program of 90000 bytes" in grader.grade(gold, "\u20ac" * 30_000)[1]
