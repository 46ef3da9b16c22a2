"""A node that says it hardly ever draws what it draws, to make one answer weigh more than all others: found out, shut out."""

import json
import sys

import pytest

from p2prl.cli.client import Daemon
from p2prl.paths import Home

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
# The whole daemon, but each log-prob that it claims is 4 below what it drew by.
LIE = """
import msgspec, numpy
from p2prl.cli.main import main
from p2prl.rollout import worker

honest = worker.make_group

def lower(trajectory):
    claimed = numpy.frombuffer(trajectory.completion.logprobs, "<f4") - 4.0
    completion = msgspec.structs.replace(trajectory.completion, logprobs=claimed.astype("<f4").tobytes())
    return msgspec.structs.replace(trajectory, completion=completion)

def lie(*args):
    group = honest(*args)
    return msgspec.structs.replace(group, trajectories=tuple(map(lower, group.trajectories)))

worker.make_group = lie
main()
"""


def test_a_liar_about_log_probs_is_shut_out_and_the_others_learn_on_at_full_steps(make_node) -> None:
    leader = make_node("leader").start("--role", "learner")
    leader.wait(lambda: leader.status().get("swarm", {}).get("addresses"), "addresses")
    (address, *_) = leader.status()["swarm"]["addresses"]
    maker = make_node("maker").start("--role", "rollout", "--join", address)
    leader.wait(lambda: leader.step() >= 2, "second version")
    liar = make_node("liar").start("--role", "rollout", "--join", address, launcher=(sys.executable, "-c", LIE))

    def row(node) -> dict:
        peers = json.loads(Daemon.find(Home.locate(leader.home)).get("/api/v1/peers"))
        name = node.status().get("node", {}).get("peer_id", "")
        return next((peer for peer in peers if peer["peer_id"] == name), {})

    leader.wait(lambda: row(liar).get("quarantined"), "the liar in quarantine")
    known = leader.step()
    leader.wait(lambda: leader.step() >= known + 5, "versions without it")
    last = leader.status()["training"]["last"]
    assert last["ess_ratio"] > 0.5 and last["lr_multiplier"] > 0.5
    assert row(liar)["refused"] >= 1 and not row(maker)["quarantined"] and row(maker)["refused"] == 0
    liar.wait(lambda: liar.status()["given"]["refused"].get("unlikely_draws"), "the verdict at the liar")
    for node in (liar, maker, leader):
        assert node.end() == 0
