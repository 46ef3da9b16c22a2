import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from p2prl import recipe
from p2prl.cli.main import group
from p2prl.environments.rows import data_hash


def p2prl(home: Path, *args: str) -> Result:
    return CliRunner(env={"P2PRL_HOME": "", "NO_COLOR": "1"}).invoke(group, ["--home", str(home), "recipe", *args])


def test_the_id_is_the_swarms(tmp_path: Path) -> None:
    wanted = recipe.find("addition")[0].swarm_id.hex()
    assert p2prl(tmp_path, "id", "addition").output == wanted + "\n"
    assert json.loads(p2prl(tmp_path, "id", "addition", "--json").stdout)["swarm"] == wanted


def test_show_prints_every_key_as_a_recipe_that_gives_the_same_id(tmp_path: Path) -> None:
    text = p2prl(tmp_path, "show", "school-maths").output
    assert recipe.parse(text.replace('version = ""\n', ""), "shown").swarm_id == recipe.find("school-maths")[0].swarm_id
    assert tomllib.loads(text)["learner"]["max_age"] == 8
    shown = json.loads(p2prl(tmp_path, "show", "addition", "--json").stdout)
    assert shown["recipe"]["environment"]["name"] == "addition"
    assert "qwen-five-tasks" in p2prl(tmp_path, "show").output.split()


def test_check_tells_model_environment_and_id(tmp_path: Path) -> None:
    result = p2prl(tmp_path, "check", "addition")
    assert result.exit_code == 0, result.output
    assert recipe.find("addition")[0].swarm_id.hex() in result.output
    assert "right answers  1.000" in result.output


def test_check_refuses_prompts_that_the_model_can_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert p2prl(tmp_path, "new", "sums", "--env", "reasoning_gym:chain_sum").exit_code == 0
    result = p2prl(tmp_path, "check", "sums.toml")
    assert result.exit_code == 2, result.output
    assert "the built-in policy can't read 'S'" in result.stderr


def test_new_fills_in_names_versions_and_hashes_and_keeps_comments(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    args = ("--env", "letter_counting", "--param", "max_words=5", "--set", "learner.max_age=4", "--out", str(path))
    result = p2prl(tmp_path, "new", "mine", "--from", "smollm2-chain-sum", *args)
    assert result.exit_code == 0, result.output
    made = recipe.load(path)
    assert made.name == "mine"
    assert (made.environment.name, made.environment.version) == (
        "reasoning_gym:letter_counting",
        "reasoning-gym==0.1.25",
    )
    assert made.environment.params == {"max_words": 5}
    assert (made.learner.max_age, made.learner.learning_rate) == (4, 3e-5)
    assert "# Rate: at 1e-4 the policy grows vaguer" in path.read_text()
    assert made.swarm_id.hex() in result.output
    assert p2prl(tmp_path, "new", "mine", "--out", str(path)).exit_code == 2


def test_new_of_a_data_file_has_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "maths.toml"
    params = ("--param", "grader=math", "--param", "template={question}")
    result = p2prl(tmp_path, "new", "maths", "--env", "dataset:school-maths.jsonl", *params, "--out", str(path))
    assert result.exit_code == 0, result.output
    section = recipe.load(path).environment
    assert section.version == "math-verify==0.9.0"
    assert section.params["hash"] == recipe.find("school-maths")[0].environment.params["hash"]


def test_new_with_a_model_has_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    result = p2prl(
        tmp_path, "new", "mine", "--from", "qwen-five-tasks", "--model", "builtin:addition", "--out", str(path)
    )
    assert result.exit_code == 0, result.output
    assert recipe.load(path).model == recipe.find("addition")[0].model
    assert len(recipe.load(path).environment.mix) == 5


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("id", "additoin"), "did you mean 'addition'"),
        (("check", "qwen-five-tasks"), "name a Hugging Face model folder on this machine"),
        (("new", "Bad Name"), "name: "),
        (("new", "x", "--param", "a=1"), "--param belongs to --env"),
        (("new", "x", "--set", "learner.max_aeg=3"), "did you mean 'max_age'"),
        (("new", "x", "--env", "chain_su"), "did you mean 'chain_sum'"),
        (("new", "x", "--set", "objective.name=gepoo"), "no objective 'gepoo'; did you mean 'gepo'"),
        (("new", "x", "--set", "objective.options={clipp = 1}"), "no option 'clipp'; did you mean 'clip'"),
        (("new", "x", "--set", "objective.name=m2po"), "set objective.prox = 'recompute'"),
        (("new", "x", "--out", "/nowhere/at/all.toml"), "can't write /nowhere/at/all.toml"),
    ],
)
def test_what_is_wrong_is_a_sentence_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = p2prl(tmp_path, *args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list(tmp_path.glob("*.toml"))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('name = "gepoo"', "no objective 'gepoo'; did you mean 'gepo'"),
        ("options = { clipp = 1.0 }", "no option 'clipp'; did you mean 'clip'"),
        ('name = "a3po"\noptions = { cap = "high" }', "can't use the options"),
    ],
)
def test_check_refuses_an_objective_that_no_learner_could_use(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    found = recipe.find("addition")[1]
    path.write_text(found.replace('name = "gepo_vcpo"', lines))
    result = p2prl(tmp_path, "check", str(path))
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_new_takes_an_objective_that_a_learner_can_use(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    given = ("--set", "objective.name=decoupled_ppo", "--set", 'objective.prox="recompute"')
    assert p2prl(tmp_path, "new", "mine", "--out", str(path), *given).exit_code == 0
    assert recipe.load(path).objective.name == "decoupled_ppo"


def test_a_path_of_this_machine_is_warned_of(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"question": f"{n}=", "answer": str(n)}) for n in range(50)))
    found = recipe.find("addition")[1]
    section = f'name = "dataset:{data}"\nparams = {{ hash = "{data_hash(data)}" }}'
    path = tmp_path / "mine.toml"
    path.write_text(found.replace('name = "addition"\nparams = { digits = 2 }', section))
    result = p2prl(tmp_path, "check", str(path))
    assert result.exit_code == 0, result.output
    assert "is a path of this machine" in result.output


def test_new_writes_over_nothing(tmp_path: Path) -> None:
    link, target = tmp_path / "link.toml", tmp_path / "target"
    link.symlink_to(target)
    assert p2prl(tmp_path, "new", "mine", "--out", str(link)).exit_code == 2
    assert not target.exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", ""), "no model source"),
        (("--env", ""), "no environment"),
        (("--set", "name.x=3"), "name is no section"),
        (("--set", "learner.learning_rate=\udcff"), "no UTF-8"),
        (("--env", "addition", "--param", "digits=nan"), "not usable"),
    ],
)
def test_new_with_what_cant_be_is_a_sentence(tmp_path: Path, args: tuple[str, ...], message: str) -> None:
    path = tmp_path / "mine.toml"
    result = p2prl(tmp_path, "new", "mine", "--out", str(path), *args)
    assert result.exit_code == 2, result.exception
    assert message in result.stderr
    assert not path.exists()


def test_a_model_source_with_a_null_character_is_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "null.toml"
    path.write_text(recipe.find("addition")[1].replace("builtin:addition", "a\\u0000b"))
    result = p2prl(tmp_path, "check", str(path))
    assert result.exit_code == 2, result.exception
    assert "no name has" in result.stderr
