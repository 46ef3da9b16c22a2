"""The command in this process, its child a real one."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from p2prl import records
from p2prl.buffer.store import Store
from p2prl.cli.main import group
from p2prl.cli.versions import read_versions
from p2prl.errors import StoreError
from p2prl.models.builtin import WEIGHTS
from p2prl.models.state import state_hash
from p2prl.paths import Home
from p2prl.weights import delta
from p2prl.weights.partial import content_path
from tests import factories
from tests.unit.cli.homes import BASE, RECIPE, add_versions, make_home, other_swarm


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path / "home")


def p2prl(home: Home, *args: str) -> Result:
    runner = CliRunner(env={"P2PRL_HOME": "", "NO_COLOR": "1"})
    return runner.invoke(group, ["--home", str(home.state.parent), *args])


def weights_hash(folder: Path) -> bytes:
    return state_hash(folder / "model.safetensors")


def test_the_newest_version_of_a_home_without_daemon(home: Home, tmp_path: Path) -> None:
    chain = add_versions(home, 5, (3, 5))
    result = p2prl(home, "export", str(tmp_path / "out"), "--json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout.splitlines()[-1])
    assert (answer["schema"], answer["step"], answer["kind"]) == (1, 5, "whole")
    assert weights_hash(tmp_path / "out") == chain[-1].version.hash
    card = (tmp_path / "out" / "README.md").read_text()
    for words in (str(chain[-1].version), chain[0].learner, "gepo_vcpo: clip = 0.2", 'source = "builtin:addition"'):
        assert words in card


def test_an_older_one_while_the_daemon_has_the_store_open(home: Home, tmp_path: Path) -> None:
    chain = add_versions(home, 5, (3, 5))
    store = Store.open(home.database, factories.NOW, RECIPE.swarm_id)
    try:
        before = home.database.read_bytes()
        result = p2prl(home, "export", "--version", "3", str(tmp_path / "out"))
        assert home.database.read_bytes() == before
    finally:
        store.close()
    assert result.exit_code == 0 and "has the weights of version 1.3." in result.stdout, result.output
    assert weights_hash(tmp_path / "out") == chain[2].version.hash
    assert "| steps | 3 |" in (tmp_path / "out" / "README.md").read_text()


def test_one_whose_state_is_gone_is_made_of_deltas(home: Home, tmp_path: Path) -> None:
    chain = add_versions(home, 6, (4,), deltas=True)
    versions = read_versions(home)
    assert versions.steps_here() == [0, 1, 2, 3, 4, 5, 6]
    for step in (2, 6):  # from version 0, and from a state that is here
        made = versions.state_of(chain[step - 1].version, tmp_path, lambda: WEIGHTS)
        assert state_hash(made) == chain[step - 1].version.hash
    here = content_path(home.states, chain[3].version.hash)
    kept = versions.state_of(chain[3].version, tmp_path, lambda: WEIGHTS)
    aside = here.rename(home.cache / "aside")
    assert state_hash(kept) == chain[3].version.hash  # whatever a running node drops
    aside.rename(here)
    lost = content_path(home.blobs, chain[2].contents[0].content_hash)
    lost.rename(lost.with_name("aside"))
    assert versions.steps_here() == [0, 1, 2, 4, 5, 6]
    with pytest.raises(StoreError, match=r"version 3 are not on this disk; there are: 0-2, 4-6"):
        versions.state_of(chain[2].version, tmp_path, lambda: WEIGHTS)
    lost.write_bytes(b"rotted")
    with pytest.raises(StoreError, match="can't be made from the deltas here"):
        versions.state_of(chain[2].version, tmp_path, lambda: WEIGHTS)
    result = p2prl(home, "export", "--version", "2", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    assert weights_hash(tmp_path / "out") == chain[1].version.hash
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_many_deltas_are_applied_some_at_a_time(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "MAX_MERGED", 2)
    chain = add_versions(home, 5, (), deltas=True)
    for step in (2, 5):
        made = read_versions(home).state_of(chain[step - 1].version, tmp_path, lambda: WEIGHTS)
        assert state_hash(made) == chain[step - 1].version.hash


def test_what_the_node_drops_meanwhile_is_said(home: Home, tmp_path: Path) -> None:
    chain = add_versions(home, 3, (), deltas=True)
    versions = read_versions(home)
    path = content_path(home.blobs, chain[1].contents[0].content_hash)

    def base() -> Path:
        path.unlink()
        return WEIGHTS

    with pytest.raises(StoreError, match="dropped it just now; try again"):
        versions.state_of(chain[2].version, tmp_path, base)


def test_version_0_needs_no_store(home: Home, tmp_path: Path) -> None:
    assert p2prl(home, "export", str(tmp_path / "out")).exit_code == 0
    assert weights_hash(tmp_path / "out") == BASE.hash


def test_what_is_not_here_is_said(home: Home, tmp_path: Path) -> None:
    add_versions(home, 5, (3, 5))
    for args, code, words in (
        (("--version", "4"), 1, "version 4 are not on this disk; there are: 0, 3, 5"),
        (("--version", "6"), 2, "no version 6: the newest here is 5"),
        (("--adapter",), 2, "trains all weights"),
    ):
        result = p2prl(home, "export", str(tmp_path / "out"), *args)
        assert (result.exit_code, words in result.output) == (code, True), result.output
    assert p2prl(Home.locate(tmp_path / "none"), "export", str(tmp_path / "out")).exit_code == 2
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    assert "is not empty" in p2prl(home, "export", str(tmp_path / "full")).output


def test_a_folder_that_can_not_be_made_is_said(home: Home, tmp_path: Path) -> None:
    add_versions(home, 1, (1,))
    (tmp_path / "file").touch()
    result = p2prl(home, "export", str(tmp_path / "file" / "under" / "it"))
    assert result.exit_code == 2 and "name another folder" in result.output
    assert "Traceback" not in result.output and not isinstance(result.exception, OSError)


def test_another_recipe_of_this_home_has_versions_of_its_own(home: Home, tmp_path: Path) -> None:
    add_versions(home, 2, (2,))
    other_swarm(home)
    assert read_versions(home).head == BASE
    make_home(tmp_path / "home")
    assert read_versions(home).head.step == 2


def test_a_store_that_can_not_be_used_is_said(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_versions(home, 2, (2,))
    with monkeypatch.context() as later:
        later.setattr(records, "WIRE_SCHEMA", records.WIRE_SCHEMA + 1)
        result = p2prl(home, "export", str(tmp_path / "out"))
    assert result.exit_code == 1 and "can't be used here" in result.output
    with sqlite3.connect(home.database) as connection:
        connection.execute("DELETE FROM manifests WHERE step = 1")
    assert "lacks a version of its chain" in p2prl(home, "export", str(tmp_path / "out")).output
    home.database.write_bytes(b"no database" * 1000)
    for suffix in ("-wal", "-shm"):
        home.database.with_name(home.database.name + suffix).unlink(missing_ok=True)
    assert "can't be read" in p2prl(home, "export", str(tmp_path / "out")).output


def test_a_child_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from p2prl.cli import export

    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(StoreError, match="ended with code 1"):
        export.run_child(b"{}")


def test_it_loads_no_torch(home: Home) -> None:
    script = "import sys, p2prl.cli.export, p2prl.cli.versions, p2prl.models.card, p2prl.models.lora_rule\n"
    script += "print([name for name in ('torch', 'transformers', 'hivemind') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
