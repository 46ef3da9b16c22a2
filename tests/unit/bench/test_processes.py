"""What a benchmark starts is measured as a tree, and ended with everything under it."""

import subprocess
import sys

import psutil
import pytest

from p2prl.bench.processes import Processes, cost, is_gone

PARENT = "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE); "


@pytest.fixture
def processes():
    made = Processes()
    yield made
    if made.root.exists():
        made.close()


def _parent(processes: Processes, then: str) -> tuple[subprocess.Popen, psutil.Process]:
    """A process with a child, both started."""
    command = [sys.executable, "-c", PARENT + "print(child.pid, flush=True); " + then]
    process = processes._start(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, psutil.Process(int(process.stdout.readline()))


def test_a_tree_costs_more_than_its_root(processes: Processes) -> None:
    process, child = _parent(processes, "import time; time.sleep(60)")
    whole = cost(process.pid)
    assert whole.rss_bytes >= psutil.Process(process.pid).memory_info().rss
    assert len(psutil.Process(process.pid).children()) == 1
    assert whole.rss_bytes > cost(child.pid).rss_bytes > 0
    assert 0 < whole.pss_bytes <= whole.rss_bytes
    assert any("python" in path for path in whole.mapped)


def test_close_ends_parents_and_children_and_removes_the_folder(processes: Processes) -> None:
    process, child = _parent(processes, "import time; time.sleep(60)")
    processes.close()
    assert process.poll() is not None
    assert is_gone(child)
    assert not processes.root.exists()


def test_one_that_ignores_sigterm_is_killed(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2prl.bench.processes.STOP_S", 0.3)
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    process, child = _parent(processes, stubborn)
    assert process.stdout is not None
    assert process.stdout.readline() == b"deaf\n"
    processes.end(process)
    assert process.returncode == -9
    assert is_gone(child)
