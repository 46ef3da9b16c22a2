"""Against the real package, where it is installed: it brings some forty others, so a checkout's set-up leaves it out."""

import sys
from pathlib import Path

import pytest

from p2prl.environments.registry import HELD_OUT_FROM
from p2prl.environments.verifiers import load_taskset
from p2prl.errors import ConfigError

TASKSET = """
import verifiers.v1 as vf

class DoublesData(vf.TaskData):
    right: str = ""

class DoublesTask(vf.Task[DoublesData]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.right)

    @vf.reward(weight=1.0)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 5)
{extra}

class DoublesConfig(vf.TasksetConfig):
    num_tasks: int = 20

class DoublesTaskset(vf.Taskset[DoublesTask, DoublesConfig]):
    def load(self):
        return [DoublesTask(DoublesData(prompt={prompt}, system_prompt="Compute.", right=str(2 * i)), self.config.task)
                for i in range(self.config.num_tasks)]

__all__ = ["DoublesTaskset"]
"""
NEEDS_A_RUNTIME = """
    @vf.reward
    async def ran(self, trace: vf.Trace, runtime) -> float:
        return 1.0
"""
PREPARES = """
    async def setup(self, trace, runtime) -> None:
        return None
"""


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("verifiers.v1", reason="needs verifiers: pip install 'p2prl[verifiers]'")
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(extra: str = "", prompt: str = 'f"Twice {i}?"') -> None:
        monkeypatch.delitem(sys.modules, "p2prl_doubles", raising=False)
        (tmp_path / "p2prl_doubles.py").write_text(TASKSET.replace("{extra}", extra).replace("{prompt}", prompt))

    return write


def test_tasks_of_one_turn_are_prompts_with_the_tasks_own_rewards(made) -> None:
    made()
    environment = load_taskset("p2prl_doubles", {"num_tasks": 30})
    assert environment.version.startswith("verifiers==")
    assert environment.num_prompts == 27
    assert environment.prompt(3) == "Compute.\n\nTwice 3?"
    assert environment.prompt(HELD_OUT_FROM) == "Compute.\n\nTwice 27?"
    assert environment.reward(3, "6") == (1.0, "correct 1, short 1")
    assert environment.reward(3, "7") == (0.5, "correct 0, short 1")
    assert environment.reward(3, "seven of them") == (0.0, "correct 0, short 0")


@pytest.mark.parametrize(
    ("extra", "prompt", "params", "message"),
    [
        ("", "None", {}, "the user speaks later"),
        (NEEDS_A_RUNTIME, "str(i)", {}, "has rewards that need a runtime"),
        (PREPARES, "str(i)", {}, "prepares or clears up a runtime"),
        ("", "str(i)", {"num_task": 3}, "no parameter 'num_task'; did you mean 'num_tasks'"),
        ("", "str(i)", {"num_tasks": "many"}, "can't be made from"),
        ("", "str(i)", {"num_tasks": 0}, "has no tasks"),
        ("    1 / 0", "str(i)", {}, "can't be loaded"),
    ],
)
def test_what_needs_more_than_a_turn_is_a_sentence(made, extra: str, prompt: str, params: dict, message: str) -> None:
    made(extra, prompt)
    with pytest.raises(ConfigError, match=message):
        load_taskset("p2prl_doubles", params)


def test_without_the_package_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("verifiers", "verifiers.v1", "verifiers.v1.utils", "verifiers.v1.utils.loaders"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'p2prl\[verifiers\]'"):
        load_taskset("doubles", {})
