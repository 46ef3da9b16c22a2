"""The commands as a user types them: real children, real environments."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from p2prl.cli.env import checked_params, parse_params
from p2prl.cli.main import group
from p2prl.environments.rows import data_hash
from p2prl.errors import ConfigError
from tests.plugins import install


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def p2prl(home: Path, *args: str) -> Result:
    return CliRunner(env={"P2PRL_HOME": "", "NO_COLOR": "1"}).invoke(group, ["--home", str(home), "env", *args])


def test_list_has_every_source_and_the_users_files(home: Path) -> None:
    folder = home / "config" / "datasets"
    folder.mkdir(parents=True)
    (folder / "mine.jsonl").write_text('{"question": "q", "answer": "a"}')
    result = p2prl(home, "list", "--json")
    assert result.exit_code == 0, result.output
    found = {entry["name"]: entry for entry in json.loads(result.stdout)}
    assert {
        "builtin:addition",
        "reasoning_gym:letter_counting",
        "dataset:mine.jsonl",
        "dataset:school-maths.jsonl",
    } <= set(found)
    assert sum(name.startswith("reasoning_gym:") for name in found) == 106
    assert "differ between versions of Python" in found["reasoning_gym:knight_swap"]["about"]
    assert "reasoning_gym:knight_swap" in p2prl(home, "list").output


def test_show_gives_prompts_with_right_answers(home: Path) -> None:
    result = p2prl(home, "show", "letter_counting", "--count", "2", "--set", "max_words=5", "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["schema"] == 1 and "type" not in shown
    assert (shown["name"], shown["version"]) == ("reasoning_gym:letter_counting", "reasoning-gym==0.1.25")
    assert [prompt["reward"] for prompt in shown["prompts"]] == [1.0, 1.0]
    assert shown["held_out"]["index"] == 2**40
    text = p2prl(home, "show", "addition").output
    assert "--- 0\n76+14=" in text and "(held out)" in text


def test_show_tells_a_files_hash(home: Path) -> None:
    assert (
        'hash = "' in p2prl(home, "show", "dataset:school-maths.jsonl", "--set", "grader=math", "--count", "1").output
    )


def test_score_gives_the_reward_and_why(home: Path) -> None:
    assert p2prl(home, "score", "addition", "0", "09").output == "1  right\n"
    assert p2prl(home, "score", "addition", "0", "90").output == "0  expected 09\n"
    assert json.loads(p2prl(home, "score", "addition", "0", "9", "--json").stdout)["reward"] == 0.0
    raised = p2prl(home, "score", "boxnet", "0", "7")
    assert raised.exit_code == 0 and "the environment raised TypeError" in raised.output


def test_check_draws_and_scores(home: Path) -> None:
    result = p2prl(home, "check", "smollm2-chain-sum", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["members"] == {"reasoning_gym:chain_sum": 100}
    assert found["reference"] == 1.0 > found["wrong"]
    assert found["problems"] == []
    assert p2prl(home, "check", "addition").output.endswith("ok\n")


def test_check_finds_a_file_with_nothing_to_learn(home: Path, tmp_path: Path) -> None:
    folder = home / "config" / "datasets"
    folder.mkdir(parents=True)
    (folder / "one.jsonl").write_text('{"question": "q", "answer": "7"}')
    recipe = tmp_path / "vain.toml"
    recipe.write_text(
        f'name = "vain"\n[model]\nsource = "builtin:addition"\nhash = "{"0" * 64}"\n[environment]\n'
        f'name = "dataset:one.jsonl"\nparams = {{ hash = "{data_hash(folder / "one.jsonl")}" }}\n'
    )
    result = p2prl(home, "check", str(recipe))
    assert result.exit_code == 1
    assert "! only 1 of 100 prompts differ" in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("show", "letter_countin"), "did you mean 'letter_counting'"),
        (("show", "chain_sum", "--set", "min_term=3"), "did you mean 'min_terms'"),
        (("show", "chain_sum", "--set", "min_terms"), "is not KEY=VALUE"),
        (("score", "reasoning_gym:chain_su", "0", "1"), "did you mean 'chain_sum'"),
        (("show", "dataset:nothing.jsonl"), "no data file 'nothing.jsonl'"),
        (("check", "additoin"), "did you mean 'addition'"),
    ],
)
def test_what_is_wrong_is_a_sentence_and_exit_2(home: Path, args: tuple[str, ...], message: str) -> None:
    result = p2prl(home, *args)
    assert result.exit_code == 2
    assert message in result.stderr


def test_parameters_are_toml_or_text() -> None:
    given = ("a=3", "b=0.5", "c=true", 'd="x"', "e=[1, 2]", "f=plain text", "g={h = 1}", "i=")
    assert parse_params(given) == {
        "a": 3, "b": 0.5, "c": True, "d": "x", "e": [1, 2], "f": "plain text", "g": {"h": 1}, "i": ""
    }  # fmt: skip
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        parse_params(("=3",))


@pytest.mark.parametrize("value", ["[" * 3000, "9" * 5000])
def test_a_value_that_cant_be_read_is_a_sentence(value: str) -> None:
    with pytest.raises(ConfigError, match="can't be read"):
        parse_params((f"a={value}",))


@pytest.mark.parametrize("value", ["nan", "inf", "1" + "0" * 30, "[[[[[[[[1]]]]]]]]"])
def test_a_parameter_that_no_recipe_could_have_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="not usable"):
        checked_params(parse_params((f"a={value}",)))


def test_dates_and_second_lines_are_text() -> None:
    assert parse_params(("a=2024-01-31", "b=3\nc=4")) == {"a": "2024-01-31", "b": "3\nc=4"}


def test_bytes_that_are_no_text_are_a_sentence(home: Path) -> None:
    for args in (("show", "\udcff"), ("score", "addition", "0", "\udcff"), ("show", "addition", "--set", "a=\udcff")):
        result = p2prl(home, *args)
        assert result.exit_code == 2, result.exception
        assert "no UTF-8" in result.stderr


def test_what_no_terminal_should_get_is_written_out(home: Path) -> None:
    folder = home / "config" / "datasets"
    folder.mkdir(parents=True)
    row = json.dumps({"question": "\ud800 \x1b[2J", "answer": "\udfff"})
    (folder / "a\x1b[31m.jsonl").write_text(row)
    os.close(os.open(bytes(folder) + b"/\xff.jsonl", os.O_CREAT | os.O_WRONLY))
    assert p2prl(home, "list").exit_code == 0
    shown = p2prl(home, "show", "dataset:a\x1b[31m.jsonl", "--count", "1")
    assert shown.exit_code == 0, shown.output
    assert "\x1b" not in shown.output and "? \\x1b[2J" in shown.output
    assert p2prl(home, "score", "dataset:a\x1b[31m.jsonl", "0", "x").output == "0  expected ?\n"


TALKS = """
class Guess:
    def prompt(self, index): return f"Guess {index}."
    def respond(self, index, answers): return None if answers[-1] == str(index) else f"not {answers[-1]}"
    def reward(self, index, answers): return float(answers[-1] == str(index)) / len(answers), f"{len(answers)} guesses"
    def answer(self, index): return ["?", index]
"""


def test_an_environment_that_answers_back(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "site" / "talks-1.0.dist-info"
    info.mkdir(parents=True)
    (info.parent / "talks.py").write_text(TALKS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: talks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[p2prl.environments]\nguess = talks:Guess\n")
    monkeypatch.setenv("PYTHONPATH", str(info.parent))
    assert p2prl(home, "score", "talks:guess", "5", "4", "5").output == "--- it says\nnot 4\n0.5  2 guesses\n"
    shown = p2prl(home, "show", "talks:guess", "--count", "1").output
    assert "it answers back: a recipe sets [environment] max_turns" in shown
    assert "--- right answer\n?\n--- it says\nnot ?\n--- right answer, worth 0.5\n0\n" in shown
    assert "over after 1 of the 2 answers" in p2prl(home, "score", "addition", "0", "09", "09").output


STRANGE = """
class Strange:
    def prompt(self, index): return "p"
    def reward(self, index, answer): raise {"k": KeyboardInterrupt, "g": GeneratorExit}[answer]
"""


def test_what_no_code_should_raise_is_a_reward_of_0_and_the_current_folder_is_no_place_for_modules(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "site", "odd", {"odd": STRANGE}, odd="odd:Strange")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "msgspec.py").write_text("raise SystemExit(9)")
    for answer, raised in (("k", "KeyboardInterrupt"), ("g", "GeneratorExit")):
        assert f"the environment raised {raised}" in p2prl(home, "score", "odd:odd", "0", answer).output


def test_a_package_that_never_loads_or_ends_its_process_is_a_sentence(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The limit of a minute, made short: the module that is imported changes it before it hangs.
    slow = "import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)\ntime.sleep(600)\n"
    modules = {"slow": slow, "deadly": "import os\nos.kill(os.getpid(), 27)\n"}
    site = install(tmp_path / "site", "slow", modules, slow="slow:Slow", deadly="deadly:Deadly")
    monkeypatch.setenv("PYTHONPATH", str(site))
    result = p2prl(home, "show", "slow:slow")
    assert result.exit_code == 2
    assert "slow:slow was not loaded within 60 s" in result.stderr
    result = p2prl(home, "show", "slow:deadly")
    assert result.exit_code == 1
    assert "has no answer (ended by SIGPROF: it used more of the processor" in result.stderr
