"""What `p2prl demo` refuses, before it starts anything; what it does is in the end-to-end tests."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from p2prl.cli.main import group


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("additoin", "there is no recipe 'additoin'; did you mean 'addition'?"),
        ("nope", "there is no recipe 'nope'. There are: addition"),
        ("nowhere/at/all.toml", "can't read the recipe nowhere/at/all.toml"),
        ("bad.toml", "bad.toml: unknown key 'learner.max_aeg' (did you mean 'max_age'?)"),
    ],
)
def test_a_recipe_that_no_node_could_take_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    hash_of_none = "0" * 64
    (tmp_path / "bad.toml").write_text(
        f'name = "bad"\n[model]\nsource = "builtin:addition"\nhash = "{hash_of_none}"\n'
        '[environment]\nname = "addition"\n[learner]\nmax_aeg = 3\n'
    )
    result = CliRunner(env={"NO_COLOR": "1"}).invoke(group, ["demo", "--recipe", recipe])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bad.toml"]
