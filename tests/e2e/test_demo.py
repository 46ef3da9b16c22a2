"""The demo is a real swarm: it learns, survives its leader, and leaves nothing behind however it ends."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(400)


def demo(*args: str, folder: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "p2prl", "demo", "--json", *args]
    environ = {**os.environ, "TMPDIR": str(folder)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)


@pytest.fixture
def folder():
    """Short: p2pd's sockets and homes lie below it."""
    with tempfile.TemporaryDirectory(prefix="p2prl-e2e-") as path:
        yield Path(path)


def test_a_swarm_learns_and_leaves_nothing(folder: Path, marked) -> None:
    process = demo("--nodes", "3", "--target-reward", "0.85", folder=folder)
    output, messages = process.communicate(timeout=300)
    assert process.returncode == 0, messages[-3000:]
    summary = json.loads(output.splitlines()[-1])
    assert summary["schema"] == 1
    assert summary["reward_last"] >= 0.85 > summary["reward_first"]
    assert len(summary["nodes"]) == 3
    assert [node["role"] for node in summary["nodes"]].count("leader") == 1
    assert all(kind in summary["bytes"] for kind in ("announce", "group", "weights"))
    assert list(folder.iterdir()) == []
    assert marked(str(folder)) == []


@pytest.mark.slow
def test_a_swarm_survives_its_leader(folder: Path, marked) -> None:
    process = demo("--kill-leader-at", "5", folder=folder)
    output, messages = process.communicate(timeout=300)
    assert process.returncode == 0, messages[-3000:]
    summary = json.loads(output.splitlines()[-1])
    assert summary["failover_s"] < 15
    assert {node["version"].split(".")[0] for node in summary["nodes"]} == {"2"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_however_the_demo_ends_its_nodes_end_too(folder: Path, marked, number: signal.Signals) -> None:
    process = demo("--nodes", "2", folder=folder)
    deadline = time.monotonic() + 60
    while len(nodes := [found for found in marked(str(folder)) if "run" in found.cmdline()]) < 2:
        assert time.monotonic() < deadline, "the nodes did not start"
        time.sleep(0.1)
    process.send_signal(number)
    process.communicate(timeout=60)
    gone, alive = psutil.wait_procs(nodes, timeout=20)
    assert not alive
    assert list(folder.iterdir()) == []
