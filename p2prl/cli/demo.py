"""`p2prl demo`: a real swarm on this machine.

In: number of nodes, target reward, which version's leader to kill. Out: N `p2prl run` processes over loopback, a live
table, a summary; exit 1 when the target is not reached or the heads don't lie on one chain.

The nodes hold the read end of a pipe of ours: however this process ends, they see it close, stop and remove their homes.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from p2prl.cli.client import Daemon, decode
from p2prl.cli.demo_view import Seen, open_view
from p2prl.errors import P2prlError
from p2prl.paths import Home
from p2prl.status import Status

POLL_S = 0.5
START_S = 60.0
STOP_S = 10.0
LOGIN_S = 45.0  # a login code is good for 60 s


@dataclass
class DemoNode:
    home: Path
    process: subprocess.Popen | None = None
    url: str = ""
    status: dict[str, Any] = field(default_factory=dict)


@click.command()
@click.option("--nodes", default=4, show_default=True, type=click.IntRange(1, 32), help="How many nodes.")
@click.option("--target-reward", default=0.9, show_default=True, type=click.FloatRange(0, 1), help="When it ends.")
@click.option("--kill-leader-at", type=click.IntRange(1), metavar="VERSION", help="kill -9 the leader at this version.")
@click.option("--seed", type=int, default=None, help="Makes the nodes' identities from a seed.")
@click.option("--recipe", default="addition", show_default=True, help="Recipe to run.")
@click.option("--limit", "limit_s", default=600.0, show_default=True, help="Give up after so many seconds.")
@click.option("--stay", is_flag=True, help="Keep the swarm and its page up after the target, until Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="The summary as one JSON line at the end.")
def demo(
    nodes: int,
    target_reward: float,
    kill_leader_at: int | None,
    seed: int | None,
    recipe: str,
    limit_s: float,
    stay: bool,
    as_json: bool,
) -> None:
    """Run a whole swarm here: N nodes find each other, generate, elect a learner, train and pass weights round."""
    from p2prl import recipe as recipes

    recipes.find(recipe)  # what a node would refuse, before any is started
    swarm = DemoSwarm(nodes, recipe, seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        swarm.start()
        summary = swarm.watch(target_reward, kill_leader_at, limit_s)
        if stay:
            swarm.stay(target_reward)
    finally:
        swarm.stop()
    if as_json:
        click.echo(json.dumps(summary))
    else:
        click.echo(
            f"reward {summary['reward_first']:.2f} -> {summary['reward_last']:.2f} in {summary['versions']} versions "
            f"and {summary['wall_s']:.0f} s; {summary['groups']['admitted']} groups admitted"
        )


class DemoSwarm:
    def __init__(self, num_nodes: int, recipe: str, seed: int | None) -> None:
        self._root = Path(tempfile.mkdtemp(prefix="p2prl-demo-"))
        self._recipe, self._seed = recipe, seed
        self._nodes = [DemoNode(self._root / f"node{index}") for index in range(num_nodes)]
        self._read_end, self._write_end = os.pipe()
        self._started = time.monotonic()
        self._killed: DemoNode | None = None
        self._killed_at = 0.0
        self._killed_term = 0
        self._failover_s: float | None = None
        self._counted: dict[str, dict[str, Any]] = {}
        self._view = open_view()
        self._notes: list[str] = []
        self._page, self._next_login_at = "", 0.0

    def start(self) -> None:
        """Start the first node, then the others through it."""
        self._view.say(f"starting {len(self._nodes)} nodes; the first start takes some seconds")
        for index, node in enumerate(self._nodes):
            if self._seed is not None:
                _write_identity(node.home, self._seed, index)
            self._launch(node)
            if index == 0:
                self._wait(
                    lambda: bool(self._poll(self._nodes[0]) and self._addresses()), "the first node did not start"
                )
                self._view.show(self._seen(0.0))

    def watch(self, target: float, kill_at: int | None, limit_s: float) -> dict[str, Any]:
        """Poll until the target is reached (and, after a kill, the restarted node follows)."""
        while True:
            for node in self._nodes:
                self._poll(node)
            self._check_alive()
            if kill_at is not None and self._killed is None:
                self._maybe_kill(kill_at)
            self._maybe_restart()
            elapsed = time.monotonic() - self._started
            self._view.show(self._seen(target))
            reward = self._reward("reward_last")
            if reward is not None and reward >= target and self._recovered(kill_at) and self._together():
                return self._summary()
            if elapsed > limit_s:
                raise P2prlError(f"the target {target} was not reached in {limit_s:.0f} s (last reward {reward})")
            time.sleep(POLL_S)

    def stay(self, target: float) -> None:
        """Go on until Ctrl-C."""
        self._notes.append("the target is reached; Ctrl-C ends the swarm")
        try:
            while True:
                for node in self._nodes:
                    self._poll(node)
                self._view.show(self._seen(target))
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            return

    def stop(self) -> None:
        """End every node, by its pid, and remove every home."""
        self._view.close()
        os.close(self._write_end)
        for node in self._nodes:
            if node.process is not None and node.process.poll() is None:
                node.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        for node in self._nodes:
            if node.process is not None:
                try:
                    node.process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    node.process.kill()
                    node.process.wait()
        os.close(self._read_end)
        shutil.rmtree(self._root, ignore_errors=True)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def _launch(self, node: DemoNode) -> None:
        cache = node.home / "cache"
        cache.mkdir(parents=True, exist_ok=True)
        if not (cache / "models").exists():  # one copy of the model for all nodes
            (self._root / "models").mkdir(exist_ok=True)
            (cache / "models").symlink_to(self._root / "models")
        command = [sys.executable, "-P", "-m", "p2prl", "--home", str(node.home), "run", self._recipe]
        command += ["--parent-pipe", str(self._read_end)]
        for value in ("swarm.host=127.0.0.1", "swarm.port=0", "web.port=0", "limits.threads=1"):
            command += ["--set", value]
        for address in self._addresses():
            command += ["--join", address]
        with (node.home / "demo.log").open("ab") as log:
            node.process = subprocess.Popen(
                command, pass_fds=(self._read_end,), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, env={**os.environ, "TMPDIR": str(node.home)},
            )  # fmt: skip
        node.url, node.status = "", {}

    def _addresses(self) -> list[str]:
        found = [address for node in self._nodes for address in node.status.get("swarm", {}).get("addresses", [])]
        return found[:3]

    def _ask(self, node: DemoNode, path: str) -> Any:
        return json.loads(Daemon.find(Home.locate(node.home)).get(path))

    def _poll(self, node: DemoNode) -> bool:
        if node.process is None or node.process.poll() is not None:
            return False
        try:
            daemon = Daemon.find(Home.locate(node.home))
            if daemon.pid != node.process.pid:
                return False
            node.url, node.status = daemon.url, json.loads(daemon.get("/api/v1/status"))
        except (OSError, P2prlError):
            return False
        return True

    def _check_alive(self) -> None:
        for node in self._nodes:
            if node is not self._killed and node.process is not None and node.process.poll() is not None:
                log = (node.home / "demo.log").read_text(errors="replace")[-2000:]
                raise P2prlError(f"a node ended with code {node.process.returncode}:\n{log}")

    def _wait(self, ready: Callable[[], bool], failure: str) -> None:
        deadline = time.monotonic() + START_S
        while not ready():
            self._check_alive()
            if time.monotonic() > deadline:
                log = (self._nodes[0].home / "demo.log").read_text(errors="replace")[-2000:]
                raise P2prlError(f"{failure}:\n{log}")
            time.sleep(0.1)

    # -- the kill ---------------------------------------------------------------------------------------------------

    def _maybe_kill(self, kill_at: int) -> None:
        leader = next((node for node in self._nodes if node.status.get("swarm", {}).get("role") == "leader"), None)
        if leader is None or leader.process is None or leader.status["training"]["step"] < kill_at:
            return
        if any(not node.status for node in self._nodes):
            return  # everybody shall be there to see it
        self._killed, self._killed_term = leader, leader.status["swarm"]["term"]
        self._counted["killed"] = leader.status
        leader.process.kill()
        leader.process.wait()
        self._killed_at = time.time()
        self._notes.append(
            f"killed the leader of term {self._killed_term} at version {leader.status['training']['step']}"
        )
        leader.status = {}

    def _maybe_restart(self) -> None:
        """Once a survivor holds a verified manifest of a higher term, the killed node starts again from its home."""
        killed = self._killed
        if killed is None or self._failover_s is not None:
            return
        for node in self._nodes:
            for change in node.status.get("failover", {}).get("term_changed_at", []):
                if node is not killed and change["term"] > self._killed_term and change["at"] >= self._killed_at:
                    at = change["at"] - self._killed_at
                    self._failover_s = at if self._failover_s is None else min(at, self._failover_s)
        if self._failover_s is not None:
            self._notes.append(f"a new leader published after {self._failover_s:.1f} s; restarting the killed node")
            self._launch(killed)

    def _recovered(self, kill_at: int | None) -> bool:
        if kill_at is None:
            return True
        killed = self._killed
        return killed is not None and self._failover_s is not None and killed.status.get("swarm", {}).get(
            "role"
        ) == "follower" and bool(killed.status.get("training", {}).get("step"))  # fmt: skip

    # -- figures ----------------------------------------------------------------------------------------------------

    def _reward(self, name: str) -> float | None:
        return max((node.status for node in self._nodes), key=_step).get("training", {}).get(name)

    def _together(self) -> bool:
        """All heads lie on the furthest node's chain, a few versions apart: nobody is behind or on another branch."""
        steps = [_step(node.status) for node in self._nodes]
        if min(steps) == 0 or max(steps) - min(steps) > 10:
            return False
        furthest = max(self._nodes, key=lambda node: _step(node.status))
        chain = {row["version"] for row in self._ask(furthest, "/api/v1/steps?limit=100")}
        return all(node.status["swarm"]["policy_version"] in chain for node in self._nodes)

    def _summary(self) -> dict[str, Any]:
        statuses = [node.status for node in self._nodes]
        head = max(statuses, key=_step)
        leader = next((status for status in statuses if status["swarm"]["role"] == "leader"), head)
        everything = [*statuses, *self._counted.values()]
        refused: dict[str, int] = {}
        for status in everything:
            for reason, count in status["given"]["refused"].items():
                refused[reason] = refused.get(reason, 0) + count
        sent = {
            kind: sum(status["traffic"]["sent"].get(kind, 0) for status in everything)
            for kind in ("announce", "group", "weights")
        }
        return {
            "schema": 1,
            "reward_first": head["training"]["reward_first"],
            "reward_last": head["training"]["reward_last"],
            "versions": head["training"]["step"],
            "groups": {
                "made": sum(status["given"]["groups"] for status in everything),
                "admitted": head["training"]["num_groups"] + leader["training"]["buffered"],
                "refused": refused,
            },
            "bytes": sent,
            "age": {"p50": leader["policy"]["staleness_p50"], "p95": leader["policy"]["staleness_p95"]},
            "failover_s": self._failover_s,
            "nodes": [
                {
                    "peer_id": status["node"]["peer_id"],
                    "role": status["swarm"]["role"],
                    "version": status["swarm"]["policy_version"],
                    "step": status["training"]["step"],
                }
                for status in statuses
            ],
            "wall_s": time.monotonic() - self._started,
        }

    def _seen(self, target: float) -> Seen:
        page = f"{self._nodes[0].url}   (log in by: p2prl --home {self._nodes[0].home} web)"
        now = time.monotonic()
        if now >= self._next_login_at:
            with contextlib.suppress(OSError, P2prlError):  # it is being killed, or not up yet
                daemon = Daemon.find(Home.locate(self._nodes[0].home))
                code = json.loads(daemon.post("/api/v1/login-code"))["code"]
                self._page, self._next_login_at = f"{daemon.url}/login#{code}", now + LOGIN_S
        statuses = tuple(
            decode(json.dumps(node.status).encode(), Status) if node.status else None for node in self._nodes
        )
        return Seen(now - self._started, target, self._page or page, statuses, tuple(self._notes))


def _step(status: dict[str, Any]) -> int:
    return status.get("training", {}).get("step", 0)


def _write_identity(home: Path, seed: int, index: int) -> None:
    from p2prl.identity import Identity

    place = Home.locate(home)
    place.create()
    Identity.from_words(f"demo {seed} {index}", place.identity)
