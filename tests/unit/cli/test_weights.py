"""The command on homes as nodes leave them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from filelock import FileLock

from p2prl import codec, records
from p2prl.buffer.store import Store
from p2prl.cli.main import group
from p2prl.cli.render import size
from p2prl.paths import Home
from p2prl.records import Manifest
from p2prl.weights.partial import content_path, part_paths
from tests import factories
from tests.unit.cli.homes import RECIPE, add_versions, make_home, other_swarm


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return make_home(tmp_path / "home")


@pytest.fixture
def chain(home: Home) -> list[Manifest]:
    """All are anchors: the newest two stay."""
    return add_versions(home, 4, (1, 3, 4))


def p2prl(home: Home, *args: str) -> Result:
    runner = CliRunner(env={"P2PRL_HOME": "", "NO_COLOR": "1"})
    return runner.invoke(group, ["--home", str(home.state.parent), *args])


def state_of(home: Home, manifest: Manifest) -> Path:
    return content_path(home.states, manifest.version.hash)


def other(home: Home) -> Path:
    path = content_path(home.blobs, bytes(32))
    path.parent.mkdir()
    path.write_bytes(b"x" * 100)
    return path


def test_list_says_what_is_here_and_why(home: Home, chain: list[Manifest]) -> None:
    other(home)
    answer = json.loads(p2prl(home, "weights", "--json").stdout)
    assert answer == json.loads(p2prl(home, "weights", "list", "--json").stdout)
    assert answer["head"] == str(chain[-1].version) and answer["schema"] == 1
    assert [(row["step"], row["kept"]) for row in answer["versions"]] == [
        (4, "newest"),
        (3, "anchor"),
        (1, "not needed"),
    ]
    sizes = [state_of(home, chain[step - 1]).stat().st_size for step in (4, 3, 1)]
    assert [row["state_bytes"] for row in answer["versions"]] == sizes
    assert (answer["others"], answer["bytes"]) == ({"files": 1, "bytes": 100}, sum(sizes) + 100)
    text = p2prl(home, "weights").output
    assert "3 versions here" in text and "the base model" in text and "1 file of no version known here" in text
    assert "schema" in p2prl(home, "--json", "weights").stdout


def test_list_works_beside_a_daemon_and_changes_nothing(home: Home, chain: list[Manifest]) -> None:
    staged = home.states / f".state0.{os.getpid()}.staged"
    staged.touch()
    with FileLock(home.lock):
        assert p2prl(home, "weights", "list").exit_code == 0
    assert staged.exists()


def test_verify_sets_corrupt_files_aside(home: Home, chain: list[Manifest]) -> None:
    assert "all whole" in p2prl(home, "weights", "verify").output
    path, lost = state_of(home, chain[2]), other(home)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    (home.node_file).write_text(json.dumps({"pid": os.getpid(), "url": "http://127.0.0.1:1"}))
    result = p2prl(home, "weights", "verify")
    assert result.exit_code == 1 and "left there" in result.output and path.exists()
    home.node_file.unlink()
    result = p2prl(home, "weights", "verify", "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["files"]) == (1, 4)
    assert {fault["path"] for fault in answer["corrupt"]} == {str(path), str(lost)}
    assert not path.exists() and Path(answer["corrupt"][0]["set_aside"]).read_bytes() == content
    assert p2prl(home, "weights", "verify").exit_code == 0
    assert "2 files of no" not in p2prl(home, "weights").output


def test_gc_drops_what_is_not_needed_once_nobody_runs(home: Home, chain: list[Manifest]) -> None:
    lost, aside = other(home), home.states / "ab" / ("ab" * 32 + ".corrupt")
    aside.parent.mkdir(exist_ok=True)
    aside.write_bytes(b"y" * 50)
    freed = state_of(home, chain[0]).stat().st_size + 150
    with FileLock(home.lock):
        result = p2prl(home, "weights", "gc")
    assert result.exit_code == 7 and "stop it first" in result.output
    answer = json.loads(p2prl(home, "weights", "gc", "--dry-run", "--json").stdout)
    assert answer == {"schema": 1, "dry_run": True, "files": 3, "bytes": freed}
    assert lost.exists() and aside.exists() and state_of(home, chain[0]).exists()
    answer = json.loads(p2prl(home, "weights", "gc", "--json").stdout)
    assert answer == {"schema": 1, "dry_run": False, "files": 3, "bytes": freed}
    assert not (lost.exists() or aside.exists() or state_of(home, chain[0]).exists())
    assert state_of(home, chain[2]).exists() and state_of(home, chain[3]).exists()
    assert "0 files" in p2prl(home, "weights", "gc").output


def test_gc_keeps_what_a_newcomer_has_of_a_version_on_its_way(home: Home) -> None:
    """Its manifests are in the store, its head is still the base model."""
    chain = add_versions(home, 3, (), deltas=True)
    store = Store.open(home.database, factories.NOW, RECIPE.swarm_id)
    store.save_head(codec.ZERO_HASH)
    store.close()
    content = chain[1].contents[0]
    part, listed = part_paths(home.blobs, chain[2].contents[0].content_hash)
    for path in (part, listed):
        path.write_bytes(b"some")
    lost = other(home)
    answer = json.loads(p2prl(home, "weights", "gc", "--json").stdout)
    assert answer["files"] == 1 and not lost.exists()
    assert content_path(home.blobs, content.content_hash).exists() and part.exists() and listed.exists()


def test_list_says_what_a_newcomer_waits_for(home: Home) -> None:
    chain = add_versions(home, 3, (), deltas=True)
    store = Store.open(home.database, factories.NOW, RECIPE.swarm_id)
    store.save_head(codec.ZERO_HASH)
    store.close()
    content_path(home.blobs, chain[0].contents[0].content_hash).unlink()
    last = chain[2].contents[0]
    content_path(home.blobs, last.content_hash).unlink()
    part, listed = part_paths(home.blobs, last.content_hash)
    part.write_bytes(bytes(last.content_bytes))
    listed.write_bytes(bytes(8))  # one piece
    text = p2prl(home, "weights").output
    sizes = [manifest.contents[0].content_bytes for manifest in chain]
    assert text.startswith("no version yet but the base model of addition; 0 versions here")
    here = f"{size(sizes[1] + sizes[2])} of {size(sum(sizes))}"
    assert f"on the way to {chain[2].version}: 1 of 3 files here, {here}" in text
    assert f"delta from 2: {size(sizes[2])} of {size(sizes[2])} here, not fetched twice" in text
    assert "of no version" not in text and "gc" not in text
    answer = json.loads(p2prl(home, "weights", "--json").stdout)
    assert answer["awaited"] == {
        "version": str(chain[2].version),
        "files": 3,
        "files_here": 1,
        "bytes": sum(sizes),
        "bytes_here": sizes[1] + sizes[2],
    }
    assert answer["others"]["files"] == 0 and answer["ahead"]["files"] == 2


def test_gc_needs_to_know_what_is_needed(home: Home, chain: list[Manifest]) -> None:
    home.database.unlink()
    result = p2prl(home, "weights", "gc")
    assert result.exit_code == 1 and "start the node first" in result.output
    assert state_of(home, chain[0]).exists()
    assert p2prl(Home.locate(home.state.parent / "none"), "weights").exit_code == 2


def test_what_only_another_release_can_read_goes_when_it_is_given_up(
    home: Home, chain: list[Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "WIRE_SCHEMA", records.WIRE_SCHEMA + 1)
    store = Store.open(home.database, factories.NOW, RECIPE.swarm_id)
    store.save_head(codec.ZERO_HASH)  # as a node of the newer release does when it starts
    store.close()
    result = p2prl(home, "weights", "gc")
    assert result.exit_code == 1 and "4 versions of this recipe can't be read" in result.output
    assert state_of(home, chain[0]).exists()
    assert json.loads(p2prl(home, "weights", "gc", "--unread", "--json").stdout)["files"] == 3
    assert not state_of(home, chain[3]).exists()


def test_what_other_recipes_trained_is_told_of_and_stays(home: Home, chain: list[Manifest]) -> None:
    num_bytes = sum(path.stat().st_size for path in home.states.rglob("*") if path.is_file())
    other_swarm(home)
    flat = content_path(home.of(b"").blobs, bytes(32))
    flat.parent.mkdir()
    flat.write_bytes(b"x" * 100)
    answer = json.loads(p2prl(home, "weights", "--json").stdout)
    assert answer["versions"] == [] and answer["other_recipes"] == {"folders": 2, "bytes": num_bytes + 100}
    assert f"of other recipes in {home.states}" in p2prl(home, "weights").output
    assert json.loads(p2prl(home, "weights", "gc", "--json").stdout)["files"] == 0
    assert state_of(home, chain[0]).exists() and flat.exists()
    answer = json.loads(p2prl(home, "weights", "verify", "--json").stdout)
    assert (answer["files"], [fault["path"] for fault in answer["corrupt"]]) == (4, [str(flat)])


def test_a_disk_budget_is_kept(home: Home, chain: list[Manifest]) -> None:
    home.config_file.write_text('[storage]\ncache = "1kB"\n')
    assert json.loads(p2prl(home, "weights", "gc", "--json").stdout)["files"] == 2
    assert state_of(home, chain[3]).exists() and not state_of(home, chain[2]).exists()


def test_it_loads_no_torch(home: Home) -> None:
    script = "import sys\nfrom p2prl.cli.main import main\nhome = sys.argv[1]\n"
    script += "sys.argv[1:] = ['--home', home, 'weights', 'verify']\ntry:\n    main()\nexcept SystemExit:\n    pass\n"
    script += "print([name for name in ('torch', 'transformers', 'hivemind', 'numpy') if name in sys.modules])"
    add_versions(home, 1, (1,))
    command = [sys.executable, "-c", script, str(home.state.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "all whole" in done.stdout and done.stdout.splitlines()[-1] == "[]", done.stdout
