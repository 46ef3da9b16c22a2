"""A node with vLLM and a node with transformers train together: two engines, one policy, answers of one turn or two."""

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from p2prl import codec
from p2prl.models.load import load_module, prepare
from p2prl.paths import Home
from p2prl.recipe import find, parse
from p2prl.records import Group
from tests import tiny_model
from tests.plugins import install

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
TALK = """
class Even:
    # Even words are good ones; after the first answer it asks for more.
    def prompt(self, index):
        return f"w{3 + index % 15} w{100 + index % 100}"
    def respond(self, index, answers):
        return f"w{50 + index % 50} w9" if len(answers) == 1 else None
    def reward(self, index, answers):
        words = " ".join(answers).split()
        return sum(int(word[1:]) % 2 == 0 for word in words) / max(1, len(words)), f"{len(answers)} answers"
"""
TWO_TURNS = """
name = "two-turns"
[model]
source = "folder:{folder}"
hash = "{hash}"
[environment]
name = "talk:even"
version = "talk==1.0"
max_turns = 2
max_given_tokens = 8
[sampling]
group_size = 4
max_new_tokens = 32
stop = ["w20"]
[learner]
groups_per_step = 6
longest_wait_s = 3600.0
max_in_flight = 4
learning_rate = 1e-3
micro_batch_tokens = 1024
[eval]
prompts = 0
"""


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
    Home.locate().models.mkdir(parents=True, exist_ok=True)
    Home.locate(folder).models.symlink_to(Home.locate().models)
    return folder


def trained(node) -> dict[str, int]:
    """Whose groups went into a version, and the newest step that one of them began under."""
    with closing(sqlite3.connect(f"file:{node.home / 'state' / 'node.db'}?mode=ro", uri=True)) as database:
        return dict(database.execute("SELECT maker, MAX(step) FROM groups WHERE trained = 1 GROUP BY maker"))


def train(make_node, recipe: str, folder: Path, *args: str):
    """A follower with vLLM, the leader that joined it, and the follower's id; both nodes' groups were trained on."""
    with_vllm = make_node("vllm", home(folder / "vllm"))
    with_vllm.start("--role", "rollout", "--set", "rollout.engine=vllm", *args, recipe=recipe)
    with_vllm.wait(lambda: with_vllm.status().get("swarm", {}).get("addresses"), "addresses")
    (address, *_) = with_vllm.status()["swarm"]["addresses"]
    leader = make_node("transformers", home(folder / "transformers"))
    leader.start("--set", "rollout.engine=transformers", "--join", address, recipe=recipe)
    leader.wait(lambda: leader.step() >= 1, "first version", deadline_s=START_S)
    maker = address.rpartition("/")[2]

    def learned() -> bool:
        """Groups of vLLM also under weights that it was given since it runs."""
        newest = trained(leader)
        return len(newest) == 2 and newest[maker] >= 1 and leader.step() >= 3

    leader.wait(learned, "vLLM's answers under a new version in training", deadline_s=TRAIN_S)
    return with_vllm, leader, maker


def end(wait_gone, *nodes) -> None:
    left = [process for node in nodes for process in node.descendants()]
    for node in nodes:
        assert all(loop["ok"] and not loop["restarts"] for loop in node.status()["state"]["loops"].values()), node.log
        assert node.end() == 0
    wait_gone(left)


def test_vllm_and_transformers_train_one_policy(make_node, wait_gone, recipe: str, tmp_path: Path) -> None:
    with_vllm, leader, _ = train(make_node, recipe, tmp_path)
    made = with_vllm.status()
    assert made["policy"]["step"] >= 1 and made["given"]["groups"] >= 2
    assert made["swarm"]["role"] == "follower" and leader.status()["swarm"]["role"] == "leader"
    assert "vllm on cpu in bfloat16" in with_vllm.log and "transformers on cpu in float32" in leader.log
    end(wait_gone, leader, with_vllm)


def test_turns_of_vllm_are_trained_on_and_have_the_log_probs_of_their_version(
    make_node, wait_gone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "site", "talk", {"talk": TALK}, even="talk:Even")))
    folder, cache = tiny_model.make(tmp_path / "model"), tmp_path / "cache"
    text = TWO_TURNS.format(folder=folder, hash=prepare(f"folder:{folder}", cache, print).hash.hex())
    path = tmp_path / "two-turns.toml"
    path.write_text(text)
    with_vllm, leader, maker = train(make_node, str(path), tmp_path, "--set", "rollout.dtype=float32")

    swarm = parse(text, "two-turns").swarm_id
    with closing(sqlite3.connect(f"file:{leader.home / 'state' / 'node.db'}?mode=ro", uri=True)) as database:
        sql = "SELECT body FROM groups WHERE trained = 1 AND maker = ? AND step = 0"
        groups = [codec.unseal(body, Group, swarm).record for (body,) in database.execute(sql, (maker,))]
    module, num_given = load_module(f"folder:{folder}", cache, torch.float32), 0
    for group in (group for group in groups if len(group.versions) == 1):
        for answer in (trajectory.completion for trajectory in group.trajectories):
            ids = torch.tensor([[*group.prompt_ids, *answer.token_ids]])
            with torch.no_grad():
                logits = module(input_ids=ids, use_cache=False).logits[0, len(group.prompt_ids) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0].numpy()
            drawn = np.repeat([part.drawn for part in answer.segments], [part.num_tokens for part in answer.segments])
            np.testing.assert_allclose(np.frombuffer(answer.logprobs, "<f4"), expected * drawn, atol=1e-3, rtol=0)
            num_given += np.count_nonzero(~drawn)
    assert num_given > 0, "no conversation was seen: this shows nothing"
    end(wait_gone, leader, with_vllm)
