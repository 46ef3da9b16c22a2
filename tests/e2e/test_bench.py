"""`p2prl bench node` for real: a figure for each promise; nothing is left, also after Ctrl-C in its middle."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from p2prl.bench.processes import is_gone

FIGURES = {
    "command_help",
    "command_status",
    "idle_memory",
    "idle_cpu",
    "loop_lag_p99",
    "announcement_p95",
    "join",
    "generation",
}


def _start(tmp_path: Path) -> subprocess.Popen[str]:
    """With its temporary folders inside `tmp_path`, so that all its processes name it."""
    command = [sys.executable, "-m", "p2prl", "bench", "node", "--json"]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_every_promise_gets_a_figure_beside_its_reference(tmp_path: Path, marked) -> None:
    process = _start(tmp_path)
    output, progress = process.communicate(timeout=400)
    assert process.returncode == 0, progress[-3000:]
    report = json.loads(output.splitlines()[-1])
    assert report["schema"] == 1
    assert report["figures"].keys() == FIGURES
    for name, figure in report["figures"].items():
        assert figure["value"] > 0 or name == "idle_cpu", (name, figure)
        assert figure["reference"] is not None and figure["target"] is not None and figure["how"], name
        assert not figure["broken"], (name, figure["broken"])
    assert report["figures"]["idle_memory"]["details"]["torch_mapped"] == 0
    assert list(tmp_path.iterdir()) == []
    assert [left for left in marked(str(tmp_path)) if not is_gone(left)] == []


@pytest.mark.timeout(120)
def test_ctrl_c_leaves_nothing(tmp_path: Path, marked) -> None:
    process = _start(tmp_path)
    assert process.stderr is not None
    while "an idle daemon" not in (line := process.stderr.readline()):  # two daemons and a bare node are up
        assert line, "it ended before its idle daemon was up"
    assert marked(str(tmp_path))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []
    assert [left for left in marked(str(tmp_path)) if not is_gone(left)] == []
