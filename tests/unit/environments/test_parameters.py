"""What `p2prl env show` says may be set: of every source, and nothing that is refused."""

import sys
from pathlib import Path

import pytest

from p2prl.environments.parameters import line_of, parameters
from p2prl.environments.registry import load_environment
from p2prl.errors import ConfigError
from tests.conftest import check_needs

COUNTS = """
class Counts:
    def __init__(self, start, *, step=1, names=("a", "b"), loud=False):
        pass
    def prompt(self, index): return "?"
    def reward(self, index, answer): return 0.0
class Evil:
    def __str__(self): raise KeyError("no")
class Odd(Counts):
    def __init__(self, table={(1, 2): 3}, evil=Evil(), step=1):
        pass
class Open(Counts):
    def __init__(self, step=1, **more):
        pass
"""
TASKSET = """
import verifiers.v1 as vf
class Config(vf.TasksetConfig):
    num_tasks: int = 20
class Doubles(vf.Taskset[vf.Task[vf.TaskData], Config]):
    def load(self):
        return [vf.Task[vf.TaskData](vf.TaskData(prompt=str(i)), self.config.task) for i in range(20)]
__all__ = ["Doubles"]
"""


@pytest.mark.parametrize(
    ("full", "params", "says"),
    [
        ("builtin:addition", {}, ["digits = 2", "max_digit = 9"]),
        ("reasoning_gym:letter_counting", {}, ["max_words = 15", "min_words = 5", 'score = "dataset"']),
        ("reasoning_gym:chain_sum", {}, ["allow_negation = false"]),
        ("dataset:school-maths.jsonl", {}, ['template = "{question}"', 'grader = "exact"', "ignore_case = false"]),
        ("dataset:school-maths.jsonl", {"grader": "python_tests"}, ["sandbox"]),
    ],
)
def test_each_source_says_what_may_be_set(full: str, params: dict[str, str], says: list[str]) -> None:
    assert set(says) <= set(parameters(full, params))


def test_a_plug_in_shows_what_its_class_takes(install) -> None:
    install("counts", {"plain": "p2prl_counts:Counts", "open": "p2prl_counts:Open"}, "p2prl_counts", COUNTS)
    assert parameters("counts:plain", {}) == ("start", "step = 1", 'names = ["a", "b"]', "loud = false")
    assert parameters("counts:open", {}) == ("step = 1",)


def test_a_usual_value_that_can_not_be_written_is_left_out(install) -> None:
    install("odd", {"odd": "p2prl_counts:Odd"}, "p2prl_counts", COUNTS)
    assert parameters("odd:odd", {}) == ("table", "evil", "step = 1")
    assert line_of("rows", (rows := []).append(rows) or rows) == "rows", "a list in itself"


def test_a_task_set_shows_its_configs_fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_needs("verifiers")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "p2prl_fields", raising=False)
    (tmp_path / "p2prl_fields.py").write_text(TASKSET)
    found = parameters("verifiers:p2prl_fields", {})
    assert "num_tasks = 20" in found and not any(line.startswith(("id", "env")) for line in found)


def refusal(full: str, params: dict[str, object]) -> str:
    try:
        load_environment(full, params)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("full", ["builtin:addition", "reasoning_gym:chain_sum", "counts:plain"])
def test_what_is_shown_is_all_that_is_taken(install, full: str) -> None:
    install("counts", {"plain": "p2prl_counts:Counts"}, "p2prl_counts", COUNTS)
    names = [line.partition(" = ")[0] for line in parameters(full, {})]
    assert names
    for name in names:
        assert "has no parameter" not in refusal(full, {name: [[]]})  # a value that hardly anything takes
        assert f"has no parameter '{name}x'" in refusal(full, {f"{name}x": 1})


def test_a_long_value_is_cut() -> None:
    assert line_of("rows", list(range(1000))).endswith("...") and len(line_of("rows", "x" * 1000)) < 250
