"""Files that rotted while a node was stopped: said, set aside, and the node goes on."""

from pathlib import Path

import pytest

from p2prl.models.state import state_hash

pytestmark = pytest.mark.timeout(300)


def spoil(path: Path) -> None:
    """The second half of the file becomes noise."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + b"\xff" * (len(content) - len(content) // 2))


@pytest.fixture
def quick(tmp_path: Path) -> str:
    """The recipe of the demo with a checkpoint every second version."""
    from p2prl import recipe as recipes

    text = recipes.find("addition")[1].replace("[learner]\n", "[learner]\ncheckpoint_every = 2\n")
    path = tmp_path / "quick.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.slow
def test_a_corrupt_database_is_set_aside_and_the_chain_goes_on(make_node) -> None:
    node = make_node("one").start()
    node.wait(lambda: node.step() >= 5, "fifth version")
    assert node.end() == 0
    before = node.step_at_rest()
    database = node.home / "state" / "node.db"
    spoil(database)
    node.start()
    node.wait(lambda: "store_corrupt" in node.health(), "the notice")
    item = node.health()["store_corrupt"]
    assert "was corrupt" in item["message"] and "corrupt-" in item["message"]
    assert "check the disk" in item["fix"]
    assert list(database.parent.glob("node.db.corrupt-*"))
    assert node.status()["swarm"]["role"] == "follower"  # silent until the rounds it may have voted in are over
    node.wait(lambda: node.status()["swarm"]["role"] == "leader", "its own lease")
    node.wait(lambda: node.step() > before, "versions beyond those of before")
    assert "was corrupt" in node.log
    assert "Traceback" not in node.log
    assert node.end() == 0


@pytest.mark.slow
def test_a_corrupt_checkpoint_is_set_aside_for_the_one_before(make_node, quick: str) -> None:
    node = make_node("one").start(recipe=quick)
    node.wait(lambda: node.step() >= 6, "sixth version")
    assert node.end() == 0
    before = node.step_at_rest()
    folder = node.home / "state" / "checkpoints"
    newest, previous = sorted(folder.rglob("*.json"), reverse=True)[:2]
    spoil(newest.with_suffix(".safetensors"))
    node.start(recipe=quick)
    node.wait(lambda: node.step() > before, "a version after the restart")
    assert f"checkpoint {newest.stem} is corrupt" in node.log
    step, _, name = previous.stem.partition("-")
    assert f".{int(step)}.{name[:8]}" in node.log.rpartition("optimiser taken from the checkpoint of")[2]
    assert list(folder.rglob(f"{newest.stem}.corrupt-*"))
    assert "Traceback" not in node.log
    assert node.end() == 0


@pytest.mark.slow
def test_corrupt_weights_are_found_before_they_are_used(make_node) -> None:
    node = make_node("one").start()
    node.wait(lambda: node.step() >= 4, "fourth version")
    assert node.end() == 0
    before = node.step_at_rest()
    newest = max((node.home / "cache" / "states").glob("*/*/*"), key=lambda path: path.stat().st_mtime_ns)
    spoil(newest)
    node.start()
    node.wait(lambda: "weights_corrupt" in node.health(), "the notice")
    assert not newest.exists() or state_hash(newest).hex() == newest.name, "dropped, or made again of its deltas"
    assert "were corrupt" in node.health()["weights_corrupt"]["message"]
    node.wait(lambda: node.step() > before, "versions beyond the one that was lost")
    assert "Traceback" not in node.log
    assert node.end() == 0
