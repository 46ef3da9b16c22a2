"""The processes of a benchmark: daemons and measuring children, what they cost, and their end.

In: a folder that goes when the benchmark ends. Out: running processes, replies of children, bytes and seconds of trees.

Invariants: `close` ends every process that was started and all their children; each holds the read end of a pipe of
ours, so that even kill -9 of the benchmark ends them. A cost is that of a whole tree: a daemon, p2pd, its children.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil

from p2prl.errors import P2prlError

STOP_S = 10.0
LOCAL = ("swarm.host=127.0.0.1", "swarm.port=0", "web.port=0", "limits.threads=1")


class Cost(msgspec.Struct, frozen=True):
    """Of a process and all its descendants at one moment. `mapped`: files that some process of them has mapped."""

    rss_bytes: int
    pss_bytes: int
    cpu_s: float
    by_process: dict[str, int]
    mapped: frozenset[str]


class Processes:
    """Everything that one benchmark starts, in a temporary folder."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="p2prl-bench-"))
        self._read_end, self._write_end = os.pipe()
        self._running: list[subprocess.Popen] = []

    def daemon(self, name: str, role: str, join: Sequence[str] = ()) -> subprocess.Popen:
        """`p2prl run addition` in the home `root/name`."""
        home = self.root / name
        command = [sys.executable, "-P", "-m", "p2prl", "--home", str(home), "run", "addition", "--role", role]
        command += ["--parent-pipe", str(self._read_end)]
        for value in LOCAL:
            command += ["--set", value]
        for address in join:
            command += ["--join", address]
        home.mkdir()
        with (self.root / f"{name}.log").open("wb") as log:
            return self._start(command, stdout=log, stderr=log)

    def child(self, module: str) -> Any:
        """Run a measuring child to its end; what it prints is JSON."""
        process = self._start(self._command(module), stdout=subprocess.PIPE, stderr=None)
        assert process.stdout is not None
        output = process.stdout.read()
        code = process.wait()
        if code != 0:
            raise P2prlError(f"{module} ended with {code}; what it says is above")
        return json.loads(output)

    def background(self, module: str) -> subprocess.Popen:
        """A measuring child that says `ready` and stays."""
        process = self._start(self._command(module), stdout=subprocess.PIPE, stderr=None)
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise P2prlError(f"{module} did not start; what it says is above")
        return process

    def log_of(self, name: str) -> str:
        """The last words of a daemon."""
        return (self.root / f"{name}.log").read_text(errors="replace")[-2000:]

    def end(self, *ending: subprocess.Popen) -> None:
        """SIGTERM, a while to leave, SIGKILL for what stays; children that outlive their parent too."""
        left: list[psutil.Process] = []
        for process in ending:
            with contextlib.suppress(psutil.NoSuchProcess):
                left += psutil.Process(process.pid).children(recursive=True)
            process.terminate()
        _, slow = psutil.wait_procs([psutil.Process(p.pid) for p in ending if p.poll() is None], timeout=STOP_S)
        for process in slow:
            process.kill()
        for process in ending:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        deadline = time.monotonic() + STOP_S
        while not all(map(is_gone, left)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self._running = [process for process in self._running if process not in ending]

    def close(self) -> None:
        """End everything and remove the folder; a second Ctrl-C doesn't stop it half-way."""
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            os.close(self._write_end)
            self.end(*self._running)
            os.close(self._read_end)
            shutil.rmtree(self.root, ignore_errors=True)
        finally:
            signal.signal(signal.SIGINT, before)

    def _command(self, module: str) -> list[str]:
        return [sys.executable, "-P", "-m", module, str(self._read_end), str(self.root)]

    def _start(self, command: list[str], **streams: Any) -> subprocess.Popen:
        process = subprocess.Popen(
            command, pass_fds=(self._read_end,), stdin=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "TMPDIR": str(self.root)}, **streams,
        )  # fmt: skip
        self._running.append(process)
        return process


def is_gone(process: psutil.Process) -> bool:
    """Ended; in a container whose first process reaps nobody, what is left of it stays as a zombie."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def cost(pid: int) -> Cost:
    """What the tree under `pid` costs now; CPU seconds are since each process began."""
    process = psutil.Process(pid)
    tree = [process, *process.children(recursive=True)]
    memory = [member.memory_full_info() for member in tree]
    times = [member.cpu_times() for member in tree]
    return Cost(
        rss_bytes=sum(info.rss for info in memory),
        pss_bytes=sum(info.pss for info in memory),
        cpu_s=sum(time.user + time.system for time in times),
        by_process={_label(member): info.rss for member, info in zip(tree, memory, strict=True)},
        mapped=frozenset(mapped.path for member in tree for mapped in member.memory_maps()),
    )


def _label(process: psutil.Process) -> str:
    """p2pd, environment_process ...: the program, or the module that Python runs."""
    words = process.cmdline()
    modules = [words[index + 1] for index, word in enumerate(words[:-1]) if word == "-m"]
    return modules[0].rpartition(".")[2] if modules else process.name()
