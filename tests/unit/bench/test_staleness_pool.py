"""Runs over processes: kept one by one, resumed after any end, the same whatever the number of workers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from p2prl.bench import staleness_pool
from p2prl.bench.processes import is_gone
from p2prl.bench.staleness import Ready, Run, RunSpec, Settings, Setup, plan
from p2prl.errors import ConfigError, P2prlError

TINY = Settings(num_steps=2, groups_per_step=2, eval_answers=8, final_answers=16)
WAIT_S = 120


class Notes:
    """A `Watch` that remembers."""

    def __init__(self) -> None:
        self.found, self.num_ticks, self.names = 0, 0, []

    def begin(self, num_ticks: int, num_found: int, num_runs: int) -> None:
        self.found = num_found

    def advance(self, num_ticks: int) -> None:
        self.num_ticks += num_ticks

    def finished(self, run: Run, wall_s: float) -> None:
        self.names.append((run.objective, run.age))


def test_runs_are_the_same_over_one_worker_or_two_and_are_not_made_again(tmp_path: Path) -> None:
    specs = plan(("gepo", "tis"), (0, 1), 1, "fixed", TINY)
    first, notes = staleness_pool.study(specs, tmp_path / "one", 1, one := Notes()), Notes()
    assert (one.num_ticks, one.found, len(one.names)) == (8, 0, 4)
    assert staleness_pool.study(specs, tmp_path / "two", 2, Notes()) == first
    assert [(run.objective, run.age) for run in first] == [(spec.objective, spec.age) for spec in specs]

    assert staleness_pool.study(specs, tmp_path / "one", 1, notes) == first
    assert (notes.num_ticks, notes.found, notes.names) == (0, 4, [])
    damaged = next((tmp_path / "one" / "runs").glob("tis_fixed_age1*"))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    again = Notes()
    assert staleness_pool.study(specs, tmp_path / "one", 1, again) == first
    assert (again.found, again.names) == (3, [("tis", 1)])


def test_an_unknown_objective_is_refused_before_any_run(tmp_path: Path) -> None:
    specs = plan(("gepo", "gepo_vcop"), (0,), 1, "fixed", TINY)
    before = set(psutil.Process().children())  # of other tests
    with pytest.raises(P2prlError, match="did you mean 'gepo_vcpo'"):
        staleness_pool.study(specs, tmp_path, 1, notes := Notes())
    assert notes.names == []
    assert not (tmp_path / "runs").exists()
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize("closed", [False, True])
def test_a_worker_that_is_ended_says_nothing(closed: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Python's own end, torch and all, takes so long that a SIGTERM comes within it."""
    worker = staleness_pool._Worker()
    with worker.socket:
        worker.pipe.send(Setup(plan(("gepo",), (0,), 1, "fixed", TINY)))
        assert isinstance(worker.pipe.receive(), Ready)
        if closed:
            worker.socket.close()
        while worker.process.poll() is None:
            worker.process.terminate()
            time.sleep(0.001)
    assert capfd.readouterr().err == ""


def test_two_studies_in_one_folder_are_refused(tmp_path: Path) -> None:
    with staleness_pool.FileLock(tmp_path / ".lock"), pytest.raises(ConfigError, match="--out"):
        staleness_pool.study((), tmp_path, 1, Notes())


def test_a_run_of_other_settings_counts_as_none(tmp_path: Path) -> None:
    spec = RunSpec("gepo", "fixed", 0, 0, TINY)
    run = Run("gepo", 0, "fixed", 0, 0.5, 0.7, False, 2, 0, {}, 1.0, ((0, 0.7),), TINY)
    for key, expected in ((spec.key(), run), ("0" * 64, None)):
        saved = msgspec.json.encode(staleness_pool.Saved(key, 1.0, run))
        staleness_pool.write_whole(tmp_path / "traces" / f"{spec.name}.json", b"{}")
        staleness_pool.write_whole(tmp_path / "runs" / f"{spec.name}.json", saved)
        assert staleness_pool.load(spec, tmp_path) == expected


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_study_that_is_stopped_leaves_no_process_and_goes_on(number: int, code: int, tmp_path: Path) -> None:
    words = ["--objectives", "gepo,tis", "--ages", "0,2", "--seeds", "2", "--steps", "12", "--groups", "4"]
    command = [sys.executable, "-m", "p2prl", "bench", "staleness", *words, "--workers", "2", "--json", "--out"]
    folder = tmp_path / "stopped"
    process = subprocess.Popen([*command, str(folder)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert process.stderr is not None
    with process.stderr:
        first = process.stderr.readline()
        assert first.startswith(b"1/8 "), first
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2
        os.kill(process.pid, number)
        process.stderr.read()
    assert process.wait(WAIT_S) == code
    psutil.wait_procs([child for child in children if not is_gone(child)], timeout=WAIT_S)
    assert all(map(is_gone, children))

    kept = {path: path.stat().st_mtime_ns for path in (folder / "runs").glob("[!.]*")}
    assert 1 <= len(kept) < 8
    resumed = subprocess.run([*command, str(folder)], capture_output=True, check=True, timeout=WAIT_S)
    assert resumed.stderr.decode().splitlines()[0] == f"{len(kept)} of 8 runs are finished already"
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    whole = subprocess.run([*command, str(tmp_path / "whole")], capture_output=True, check=True, timeout=WAIT_S)
    assert json.loads(whole.stdout) == json.loads(resumed.stdout)
