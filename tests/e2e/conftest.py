"""Real daemons on loopback, each in a home of its own; whatever a test leaves is ended by pid."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2prl.cli.client import Daemon
from p2prl.errors import P2prlError
from p2prl.paths import Home

DEADLINE_S = 90.0
LOCAL = ("swarm.host=127.0.0.1", "swarm.port=0", "web.port=0", "limits.threads=1")


class Running:
    """One `p2prl run`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.process: subprocess.Popen | None = None

    def start(self, *args: str, recipe: str = "addition") -> "Running":
        command = [sys.executable, "-m", "p2prl", "--home", str(self.home), "run", recipe, *args]
        for value in LOCAL:
            command += ["--set", value]
        self.home.mkdir(exist_ok=True)
        with (self.home / "test.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return self

    @property
    def log(self) -> str:
        return (self.home / "test.log").read_text(errors="replace")

    def status(self) -> dict[str, Any]:
        try:
            return json.loads(Daemon.find(Home.locate(self.home)).get("/api/v1/status"))
        except (P2prlError, OSError):
            return {}

    def step(self) -> int:
        return self.status().get("training", {}).get("step", 0)

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, f"the node ended while we waited for {what}:\n{self.log[-3000:]}"
            assert time.monotonic() < deadline, f"no {what} in {DEADLINE_S} s:\n{self.log[-3000:]}"
            time.sleep(0.2)

    def descendants(self) -> list[psutil.Process]:
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill(self) -> list[psutil.Process]:
        """kill -9; returns the children it had."""
        assert self.process is not None
        left = self.descendants()
        self.process.kill()
        self.process.wait()
        return left

    def end(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[Callable[[str], Running]]:
    nodes: list[Running] = []

    def make(name: str) -> Running:
        nodes.append(Running(tmp_path / name))
        return nodes[-1]

    yield make
    for node in nodes:
        if node.process is not None and node.process.poll() is None:
            left = node.descendants()
            node.process.kill()
            node.process.wait()
            psutil.wait_procs(left, timeout=10)


@pytest.fixture
def marked() -> Callable[[str], list[psutil.Process]]:
    """Finds the processes whose command line names a text."""

    def find(text: str) -> list[psutil.Process]:
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if process.pid != os.getpid() and any(text in part for part in process.info["cmdline"] or ())
        ]

    return find
