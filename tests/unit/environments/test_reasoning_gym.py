import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.environments.reasoning_gym import last_integer
from p2prl.environments.registry import HELD_OUT_FROM, Answered, Environment, load_environment
from p2prl.errors import ConfigError
from tests import pythons

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
    ("name", "params", "holds"),
    [
        ("complex_arithmetic", {"operations": ["+"], "operations_weights": [1.0]}, "Add the complex numbers"),
        ("word_sorting", {"transformation": "uppercase"}, "sort"),
        ("time_intervals", {"min_date": "1990-01-01", "max_time": "23:00:00", "task_types": ["date"]}, "days"),
        ("aiw", {"task_types": ["siblings"], "task_type_weights": [1.0]}, "sister"),
        ("arc_agi", {"board_format_opts": {"row_delimiter": "|"}}, "|"),
        ("rearc", {"rng_difficulty_ranges": [[0.0, 0.1]], "rng_difficulty_weights": [1.0]}, ""),
        ("composite", {"datasets": [{"name": "leg_counting", "weight": 2, "config": {"max_animals": 3}}]}, "legs"),
    ],
)
def test_parameters_come_in_the_types_that_a_data_set_wants(name: str, params: dict, holds: str) -> None:
    environment = load_environment(name, params)
    assert holds in environment.prompt(0)
    assert isinstance(environment, Answered)
    assert environment.reward(0, environment.answer(0) or "")[0] == 1.0


def test_only_the_part_that_counts_is_scored() -> None:
    environment = chain_sum(extract="tag", template="Q: {question}\nWrite <answer>.")
    assert environment.prompt(0).startswith("Q: State") and environment.prompt(0).endswith("Write <answer>.")
    assert isinstance(environment, Answered)
    right = environment.answer(0)
    assert right is not None and right.startswith("<answer>")
    assert environment.reward(0, f"I think of 5. {right}")[0] == 1.0
    assert environment.reward(0, "5") == (0.0, "no <answer>...</answer> in the answer")


def test_one_that_draws_from_the_global_generators_is_the_same_whatever_they_hold() -> None:
    texts = []
    for seed in (1, 2):
        environment = load_environment("list_functions", {})
        random.seed(seed)
        texts.append([environment.prompt(index) for index in range(300)])
    assert texts[0] == texts[1]


QUICK = ["chain_sum", "isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note", "word_ladder"]


@pytest.mark.parametrize("names", [QUICK, pytest.param([], marks=pytest.mark.slow, id="all")])
def test_prompts_are_the_golden_ones_on_this_python(names: list[str]) -> None:
    """In a process of its own: some depend on the hash seed. No name: every data set."""
    code = (
        "import sys, json; from tests.prompt_hashes import *; print(json.dumps(hashes(sys.argv[1:])), file=sys.stderr)"
    )
    golden = json.loads(Path("tests/vectors/prompts.json").read_text())["datasets"]
    assert len(golden) == 106
    chosen = names or sorted(golden)
    surroundings = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", code, *chosen]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=True)
    found = json.loads(done.stderr.splitlines()[-1])
    assert {name for name in chosen if found[name] != golden[name]} == set()


@pytest.mark.slow
@pytest.mark.needs("python3.13")
@pytest.mark.timeout(600)
def test_prompts_are_the_golden_ones_on_the_newest_python(tmp_path: Path) -> None:
    """All data sets, by an installation of reasoning-gym alone."""
    python = pythons.find("3.13")
    assert python is not None
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    own = tmp_path / "venv" / "bin" / "python"
    packages = ["reasoning-gym", "msgspec", "blake3"]
    subprocess.run([own, "-m", "pip", "install", "-q", "-c", "configs/constraints.txt", *packages], check=True)
    surroundings = os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": "."}
    done = subprocess.run([own, "-m", "tests.prompt_hashes"], env=surroundings, capture_output=True, check=True)
    assert json.loads(done.stdout) == json.loads(Path("tests/vectors/prompts.json").read_text())


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
        ("chain_sum", {"template": "no place"}, "template = 'no place' is no text with"),
        ("chain_sum", {"extract": "tags"}, "extract = 'tags' is unknown"),
        ("word_sorting", {"transformation": "upper"}, "transformation = 'upper' is no TextTransformation"),
        ("time_intervals", {"min_date": "199"}, "min_date = '199' is no date"),
        ("arc_agi", {"board_format_opts": {"row": "|"}}, "no parameter 'row'; did you mean 'row_delimiter'"),
        ("composite", {}, "Must specify at least one dataset"),
        ("composite", {"datasets": [{"name": "chainsum", "weight": 1, "config": {}}]}, "did you mean 'chain_sum'"),
        ("composite", {"datasets": [{"name": "chain_sum", "weight": 1, "config": {"seed": 3}}]}, "leave it out"),
        ("composite", {"datasets": [{"name": "chain_sum", "weight": 1}]}, "datasets = "),
    ],
)
def test_what_is_wrong_is_named(name: str, params: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_environment(f"reasoning_gym:{name}", params)
