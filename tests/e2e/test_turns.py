"""Nodes train on a task of two turns: what the environment says is seen, judged over again by all, and never trained on."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from p2prl import codec, recipe
from p2prl.records import Group
from tests.plugins import install

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
TRAIN_S = 240.0
BETTER = 0.2  # all that first answers can still gain is .1
ECHO = '''
import random

class Echo:
    """A sum, then a digit to say after it; half the reward for each."""

    def prompt(self, index):
        draw = random.Random(index)
        return f"{draw.randrange(10, 100)}+{draw.randrange(10, 100)}="

    def respond(self, index, answers):
        return f"{index % 10}=" if len(answers) == 1 else None

    def answer(self, index):
        first, second = self.prompt(index).rstrip("=").split("+")
        return [str(int(first) + int(second))[::-1], str(index % 10)]

    def reward(self, index, answers):
        return sum(map(str.__eq__, answers, self.answer(index))) / 2, " ".join(answers)
'''
ENVIRONMENT = """[environment]
name = "echo:echo"
version = "echo==1.0"
max_turns = 2
max_given_tokens = 12

"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The recipe of `p2prl demo` with another task, which both nodes have installed."""
    monkeypatch.setenv("PYTHONPATH", str(install(tmp_path / "site", "echo", {"echo": ECHO}, echo="echo:Echo")))
    _, text = recipe.find("addition")
    head, _, tail = text.partition("[environment]")
    path = tmp_path / "echo.toml"
    path.write_text(head + ENVIRONMENT + tail[tail.index("[sampling]") :].replace("every = 25", "every = 10"))
    return str(path)


def groups(node, swarm: bytes) -> list[Group]:
    """Those that went into versions, as that node's database has them."""
    with closing(sqlite3.connect(f"file:{node.home / 'state' / 'node.db'}?mode=ro", uri=True)) as database:
        bodies = database.execute("SELECT body FROM groups WHERE trained = 1").fetchall()
    return [codec.unseal(body, Group, swarm).record for (body,) in bodies]


def test_two_nodes_learn_a_task_of_two_turns(make_node, echo: str) -> None:
    leader = make_node("leader").start(recipe=echo)
    leader.wait(lambda: leader.status().get("swarm", {}).get("addresses"), "addresses")
    (address, *_) = leader.status()["swarm"]["addresses"]
    maker = make_node("maker").start("--role", "rollout", "--join", address, recipe=echo)
    rewards: list[float] = []

    def learned() -> bool:
        reward = leader.status().get("training", {}).get("eval_reward")
        if reward is not None:
            rewards.append(reward)
        return bool(rewards) and reward >= rewards[0] + BETTER

    leader.wait(learned, "better answers", deadline_s=TRAIN_S)
    trained = groups(leader, recipe.load(Path(echo)).swarm_id)
    assert len({group.maker for group in trained}) == 2
    answers = [trajectory.completion for group in trained for trajectory in group.trajectories]
    for answer in answers:
        drawn = [part.drawn for part in answer.segments]
        assert drawn[0] and drawn[-1] and drawn.count(False) <= 1
    assert sum(len(answer.segments) > 1 for answer in answers) > len(answers) / 2, (
        "most first answers end by themselves"
    )
    for node in (leader, maker):
        status = node.status()
        assert all(loop["ok"] and not loop["restarts"] for loop in status["state"]["loops"].values()), node.log
        assert node.end() == 0
