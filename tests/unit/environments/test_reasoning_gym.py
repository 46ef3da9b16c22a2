import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.environments.reasoning_gym import last_integer
from p2prl.environments.registry import HELD_OUT_FROM, Environment, load_environment
from p2prl.errors import ConfigError

CHAIN_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def chain_sum(**params: object) -> Environment:
    return load_environment("reasoning_gym:chain_sum", CHAIN_SUM | params)


def test_the_last_integer_decides() -> None:
    environment = chain_sum(score="last_integer")
    assert environment.version.startswith("reasoning-gym==")
    for index in range(20):
        first, sign, second = re.findall(r"[0-9]+|[+-]", environment.prompt(index))
        right = int(first) + (int(second) if sign == "+" else -int(second))
        assert environment.reward(index, f"{first} {sign} {second} = {right}.") == (1.0, "right")
        assert environment.reward(index, f"The answer is {right + 1}")[0] == 0.0
        assert environment.reward(index, "I don't know") == (0.0, "no integer in the answer")


def test_the_default_is_the_data_sets_own_score() -> None:
    environment = load_environment("reasoning_gym:leg_counting", {})
    scores = {environment.reward(0, answer)[0] for answer in map(str, range(200))}
    assert 1.0 in scores


def test_the_same_index_gives_the_same_question_everywhere() -> None:
    assert [chain_sum().prompt(index).rpartition(": ")[2] for index in (0, 1, HELD_OUT_FROM)] == [
        "3 + 4 =",
        "3 - 4 =",
        "5 - 9 =",
    ]


def test_held_out_questions_never_come_in_training() -> None:
    environment = chain_sum()
    trained = {environment.prompt(index) for index in range(2000)}
    held_out = {environment.prompt(HELD_OUT_FROM + index) for index in range(200)}
    assert not trained & held_out
    assert len(trained) > 100 and len(held_out) > 5


def test_a_data_set_that_cannot_be_split_still_gives_prompts() -> None:
    environment = chain_sum(min_digits=1)
    assert environment.prompt(2**53)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8-3", 3), ("4 - 7 = -3", -3), ("is 5.", 5), ("5.0", 5), ("3.5", None), ("", None), ("(\u22124)", -4),
        ("1 2", 2),
        ("x5", 5), ("-0", 0), ("007", 7), ("10, 20", 20), ("--4", -4), ("9" * 5000, None), ("\u0663", None),
        ("5 apples", 5),
    ],
)  # fmt: skip
def test_last_integer(text: str, value: int | None) -> None:
    assert last_integer(text) == value


@given(st.text(), st.integers(-(10**20), 10**20))
def test_an_integer_after_a_blank_is_found_behind_any_text(text: str, value: int) -> None:
    assert last_integer(f"{text} {value}") == value


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("chainsum", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"min_term": 2}, "did you mean 'min_terms'"),
        ("chain_sum", {"seed": 2}, "no parameter 'seed'"),
        ("chain_sum", {"size": 2}, "no parameter 'size'"),
        ("chain_sum", {"score": "best"}, "use one of dataset, last_integer"),
        ("chain_sum", {"min_terms": 0}, "can't be made from"),
        ("chain_sum", {"min_terms": "two"}, "can't be made from"),
    ],
)
def test_what_is_wrong_is_named(name: str, params: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_environment(f"reasoning_gym:{name}", params)
