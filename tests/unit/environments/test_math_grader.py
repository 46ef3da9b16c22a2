import pytest

from p2prl.environments.math_grader import MathGrader
from p2prl.errors import ConfigError


@pytest.fixture(scope="module")
def grader() -> MathGrader:
    return MathGrader()


@pytest.mark.parametrize(
    ("right", "answer", "reward"),
    [
        (r"\frac{3}{4}", "So it is 0.75", 1.0), (r"\frac{3}{4}", r"$\frac{6}{8}$", 1.0), (r"\frac{3}{4}", "4", 0.0),
        ("x^2 - 1", r"\boxed{(x-1)(x+1)}", 1.0), (r"3\sqrt{2}", r"$\sqrt{18}$", 1.0), ("12", "I get 12", 1.0),
        ("12", "", 0.0), ("12", "no idea", 0.0), ("12", "13 or 11", 0.0), (r"\boxed{5}", "5", 1.0),
    ],
)  # fmt: skip
def test_what_is_the_same_is_right(grader: MathGrader, right: str, answer: str, reward: float) -> None:
    assert grader.grade(grader.gold(right, "row 1"), answer)[0] == reward


@pytest.mark.parametrize(
    "answer", ["9**9**9**9", "$10^{10^{10}}$", "$2^{10000000000}$", "$1000000!$", "$3!!!$", "1" * 60, "$2^{(9^9)}$"]
)
def test_what_would_take_for_ever_is_not_worked_out(grader: MathGrader, answer: str) -> None:
    reward, detail = grader.grade(grader.gold("7", "row 1"), answer)
    assert reward == 0.0
    assert "too large" in detail


def test_a_row_without_mathematics_is_named(grader: MathGrader) -> None:
    with pytest.raises(ConfigError, match="the answer of row 3, ''"):
        grader.gold("", "row 3")


def test_it_says_which_package_judges(grader: MathGrader) -> None:
    assert grader.version.startswith("math-verify==")
    assert grader.grade(grader.gold("7", "row 1"), grader.reference(grader.gold("7", "row 1")))[0] == 1.0


@pytest.mark.parametrize("answer", ["9" * 60 + "!", "9^{9^{9}}", "99999!", "2^{99999}"])
def test_a_right_answer_too_large_to_work_out_is_a_sentence(answer: str) -> None:
    with pytest.raises(ConfigError, match="too large to work out"):
        MathGrader().gold(answer, "row 1")
