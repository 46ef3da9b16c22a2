"""Each role does its part and no more; the figures of /metrics and of the peers come from the work done."""

import json

import pytest

from p2prl.cli.client import Daemon
from p2prl.paths import Home

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]


def series(node) -> dict[str, float]:
    text = Daemon.find(Home.locate(node.home)).get("/metrics").decode()
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def peers_of(node) -> dict[str, dict]:
    rows = json.loads(Daemon.find(Home.locate(node.home)).get("/api/v1/peers"))
    return {row["role"]: row for row in rows}


def test_a_learner_a_maker_and_a_relay_are_a_swarm(make_node) -> None:
    learner = make_node("learner").start("--role", "learner")
    learner.wait(lambda: learner.status().get("swarm", {}).get("addresses"), "addresses")
    (address, *_) = learner.status()["swarm"]["addresses"]
    maker = make_node("maker").start("--role", "rollout", "--join", address)
    relay = make_node("relay").start("--role", "relay", "--join", address)
    relay.wait(lambda: relay.step() >= 5, "fifth version at the relay")
    maker.wait(lambda: maker.status()["policy"]["step"] >= 5, "fifth version in the maker's engine")
    made, trained, idle = maker.status(), learner.status(), relay.status()
    assert trained["swarm"]["role"] == "leader" and trained["given"]["groups"] == 0
    assert made["given"]["groups"] >= 5 * 16 and made["swarm"]["role"] == "follower"
    assert idle["given"]["groups"] == 0 and idle["state"]["now"] == "working"
    assert not [process for process in relay.descendants() if "engine_process" in " ".join(process.cmdline())]
    assert not [process for process in maker.descendants() if "learner_process" in " ".join(process.cmdline())]
    row = peers_of(learner)["rollout"]
    assert row["groups"] > 0 and row["received_bytes"] > 10_000 and row["trust"] > 0.9 and row["faults"] == 0

    here, there = series(learner), series(maker)
    steps = here["p2prl_train_steps_total"]
    assert steps >= 5
    assert here["p2prl_train_tokens_total"] > 0 and here["p2prl_buffer_age_versions_count"] >= steps * 16
    assert here['p2prl_train_step_duration_seconds_count{stage="gradient"}'] == steps
    assert here['p2prl_admission_groups_total{reason="",verdict="admitted"}'] > 0
    assert here['p2prl_gossip_bytes_total{direction="out",kind="blob"}'] > 100_000
    assert here['p2prl_node_state{state="working"}'] == 1
    assert here['p2prl_disk_bytes{kind="db"}'] > 0
    assert there['p2prl_rollout_groups_total{outcome="ok",task="addition"}'] >= 80
    assert there["p2prl_rollout_reward_count"] >= 80 * 8
    assert there["p2prl_train_steps_total"] == 0
    assert there["p2prl_swarm_policy_version"] >= 1  # refreshed once a second
    for node in (relay, maker, learner):
        assert node.end() == 0
