"""`p2prl generate` as a user types it: real children, the built-in model."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from p2prl import recipe as recipes
from tests.plugins import install
from tests.unit.cli.homes import make_home

pytestmark = pytest.mark.timeout(180)


def command(home: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "p2prl", "--home", str(home), *args]


def p2prl(home: Path, *args: str) -> subprocess.CompletedProcess:
    return subprocess.run(command(home, *args), capture_output=True, text=True, timeout=120, check=False)


def test_a_recipes_answers_are_shown_with_what_they_earn(tmp_path: Path) -> None:
    result = p2prl(tmp_path / "home", "generate", "addition", "--count", "2", "--seed", "5")
    assert result.returncode == 0, result.stderr
    assert "transformers on cpu in float32" in result.stderr
    assert result.stdout.count("mean reward") == 3 and " 1.000  right  (" in result.stdout
    assert "over 2 prompts, 16 answers" in result.stdout


def test_stop_strings_end_answers_and_an_exported_model_answers_too(tmp_path: Path) -> None:
    """One run for both: starting the children takes seconds."""
    home = make_home(tmp_path / "home")
    exported = p2prl(home.state.parent, "export", str(tmp_path / "exported"), "--version", "0")
    assert exported.returncode == 0, exported.stderr
    _, text = recipes.find("addition")
    changed = text.replace("[sampling]\n", '[sampling]\nstop = ["1", "22"]\n')
    assert changed != text
    (tmp_path / "own.toml").write_text(changed)
    args = ("generate", str(tmp_path / "own.toml"), "--json", "--count", "4", "--weights", str(tmp_path / "exported"))
    result = p2prl(home.state.parent, *args)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["schema"], found["num_answers"], len(found["groups"])) == (1, 32, 4)
    texts = [answer["turns"][0]["text"] for group in found["groups"] for answer in group["answers"]]
    assert any(text.endswith("1") for text in texts)
    assert not any("1" in text[:-1] or "22" in text[:-1] for text in texts)
    assert all(answer["finish_reason"] == "stop" for group in found["groups"] for answer in group["answers"]
               if answer["turns"][0]["text"].endswith("1"))  # fmt: skip
    assert "would refuse" not in result.stdout
    assert found["reward_mean"] > 0.3, "right answers without a 1 are right all the same"


def test_a_task_that_raises_is_shown_and_no_answer_at_all_is_a_failure(tmp_path: Path) -> None:
    source = (
        "class Odd:\n    def prompt(self, index): return '1+1='\n"
        "    def reward(self, index, answer): raise ValueError('never \\x1b[31m again')\n"
        "class Mute(Odd):\n    def prompt(self, index):\n"
        "        if index: raise ValueError('no prompt')\n        return '1+1='\n"
    )
    site = install(tmp_path / "site", "odd", {"odd": source}, odd="odd:Odd", mute="odd:Mute")
    _, text = recipes.find("addition")
    head, _, tail = text.partition("[environment]")
    for name, code in (("odd", 0), ("mute", 1)):
        environment = f'[environment]\nname = "odd:{name}"\nversion = "odd==1.0"\n\n'
        (tmp_path / f"{name}.toml").write_text(head + environment + tail[tail.index("[") :])
        args = command(tmp_path / "home", "generate", str(tmp_path / f"{name}.toml"), "--count", "1")
        result = subprocess.run(
            ["env", f"PYTHONPATH={site}", *args], capture_output=True, text=True, timeout=120, check=False
        )
        assert result.returncode == code, result.stderr
        if name == "odd":
            assert "the environment raised ValueError: never \\x1b[31m again" in " ".join(result.stdout.split())
        else:
            assert "! " in result.stdout and "no prompt" in result.stdout
            assert "error: no prompt could be answered" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_its_children(tmp_path: Path, number: int) -> None:
    args = command(tmp_path / "home", "generate", "addition", "--count", "1000")
    process = subprocess.Popen(args, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = next(line for line in process.stderr if "engine: " in line)
    assert said
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(number)
    assert process.wait(60) == 130
    process.stderr.close()
    _, left = psutil.wait_procs(children, timeout=10)
    assert left == []
