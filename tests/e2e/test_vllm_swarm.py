"""A node with vLLM and a node with transformers train SmolLM2 together: two engines, one policy."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from p2prl.models.load import prepare
from p2prl.paths import Home
from p2prl.recipe import find, parse

pytestmark = [pytest.mark.slow, pytest.mark.needs("vllm"), pytest.mark.timeout(1200)]
START_S, TRAIN_S = 420.0, 420.0  # on two cores that have other work too
# A node may have four groups in flight and a step takes six: no step without groups of both nodes.
FEW = {
    "group_size = 8": "group_size = 4",
    "max_new_tokens = 32": "max_new_tokens = 12",
    "groups_per_step = 8": "groups_per_step = 6",
    "longest_wait_s = 120.0": "longest_wait_s = 3600.0",
    "max_in_flight = 8": "max_in_flight = 4",
    "micro_batch_tokens = 4096": "micro_batch_tokens = 512",
    "prompts = 64": "prompts = 0",
}


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """The shipped one with few and short answers; its model is in the user's cache."""
    text = find("smollm2-chain-sum")[1]
    for before, after in FEW.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    path = tmp_path / "few.toml"
    path.write_text(text)
    prepare(parse(text, "few").model.source, Home.locate().models, print)
    return str(path)


def home(folder: Path) -> Path:
    """A home that shares the user's models: a hundred megabytes are fetched once."""
    (folder / "cache").mkdir(parents=True)
    Home.locate(folder).models.symlink_to(Home.locate().models)
    return folder


def trained(node) -> dict[str, int]:
    """Whose groups went into a version, and the newest step that one of them began under."""
    with closing(sqlite3.connect(f"file:{node.home / 'state' / 'node.db'}?mode=ro", uri=True)) as database:
        return dict(database.execute("SELECT maker, MAX(step) FROM groups WHERE trained = 1 GROUP BY maker"))


def test_vllm_and_transformers_train_one_policy(make_node, wait_gone, recipe: str, tmp_path: Path) -> None:
    with_vllm = make_node("vllm", home(tmp_path / "vllm"))
    with_vllm.start("--role", "rollout", "--set", "rollout.engine=vllm", recipe=recipe)
    with_vllm.wait(lambda: with_vllm.status().get("swarm", {}).get("addresses"), "addresses")
    (address, *_) = with_vllm.status()["swarm"]["addresses"]
    leader = make_node("transformers", home(tmp_path / "transformers"))
    leader.start("--set", "rollout.engine=transformers", "--join", address, recipe=recipe)
    leader.wait(lambda: leader.step() >= 1, "first version", deadline_s=START_S)
    maker = address.rpartition("/")[2]

    def learned() -> bool:
        """Both nodes' groups were trained on, those of vLLM also under weights that it was given since it runs."""
        newest = trained(leader)
        return len(newest) == 2 and newest[maker] >= 1 and leader.step() >= 3

    leader.wait(learned, "vLLM's answers under a new version in training", deadline_s=TRAIN_S)
    made = with_vllm.status()
    assert made["policy"]["step"] >= 1 and made["given"]["groups"] >= 2
    assert made["swarm"]["role"] == "follower" and leader.status()["swarm"]["role"] == "leader"
    assert "vllm on cpu in bfloat16" in with_vllm.log and "transformers on cpu in float32" in leader.log
    left = [*leader.descendants(), *with_vllm.descendants()]
    for node in (leader, with_vllm):
        assert all(loop["ok"] and not loop["restarts"] for loop in node.status()["state"]["loops"].values()), node.log
        assert node.end() == 0
    wait_gone(left)
