"""Real daemons on loopback, each in a home of its own; whatever a test leaves is ended by pid."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from p2prl.bench.processes import is_gone
from p2prl.cli.client import Daemon
from p2prl.errors import P2prlError
from p2prl.paths import Home

DEADLINE_S = 90.0
GONE_S = 30.0
LOCAL = ("swarm.host=127.0.0.1", "swarm.port=0", "web.port=0", "limits.threads=1")


class Running:
    """One `p2prl run`."""

    def __init__(self, home: Path, log_file: Path) -> None:
        self.home, self._log_file = home, log_file
        self.process: subprocess.Popen | None = None

    def start(
        self, *args: str, recipe: str = "addition", launcher: Sequence[str] = (sys.executable, "-m", "p2prl")
    ) -> "Running":
        """`launcher` comes before the arguments of `p2prl`: a skewed clock, another network namespace."""
        command = [*launcher, "--home", str(self.home), "run", recipe]
        for value in LOCAL:
            command += ["--set", value]
        command += args
        self.home.mkdir(exist_ok=True)
        with self._log_file.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        return self

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    def status(self) -> dict[str, Any]:
        try:
            return json.loads(Daemon.find(Home.locate(self.home)).get("/api/v1/status"))
        except (P2prlError, OSError):
            return {}

    def health(self) -> dict[str, dict[str, str]]:
        """What the status says is wrong, by code."""
        return {item["code"]: item for item in self.status().get("health", [])}

    def now(self) -> str:
        return self.status().get("state", {}).get("now", "")

    def step(self) -> int:
        return self.status().get("training", {}).get("step", 0)

    def step_at_rest(self) -> int:
        """The newest version in the store of a node that does not run."""
        with closing(sqlite3.connect(self.home / "state" / "node.db")) as database:
            return database.execute("SELECT MAX(step) FROM manifests").fetchone()[0]

    def wait(self, condition: Callable[[], Any], what: str, deadline_s: float = DEADLINE_S) -> None:
        deadline = time.monotonic() + deadline_s
        while not condition():
            assert self.process is not None
            assert self.process.poll() is None, f"the node ended while we waited for {what}:\n{self.log[-3000:]}"
            assert time.monotonic() < deadline, f"no {what} in {deadline_s} s:\n{self.log[-3000:]}"
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
def make_node(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """`make(name)`, or `make(name, home)` for a home elsewhere; the log stays in `tmp_path`."""
    nodes: list[Running] = []

    def make(name: str, home: Path | None = None) -> Running:
        nodes.append(Running(home or tmp_path / name, tmp_path / f"{name}.log"))
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


@pytest.fixture
def wait_gone() -> Callable[[Sequence[psutil.Process]], None]:
    """Waits until these have ended, as they do by themselves."""

    def wait(processes: Sequence[psutil.Process]) -> None:
        deadline = time.monotonic() + GONE_S
        while left := [process for process in processes if not is_gone(process)]:
            assert time.monotonic() < deadline, f"{left} did not end in {GONE_S} s"
            time.sleep(0.1)

    return wait
