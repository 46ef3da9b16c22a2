"""A disk that fills up under a running node, and one that was full before it started: a small tmpfs, really full."""

import subprocess
import sys

import psutil
import pytest

from p2prl.identity import Identity
from p2prl.paths import Home

pytestmark = pytest.mark.timeout(300)
MIB = 2**20


@pytest.mark.slow
def test_a_node_waits_out_a_full_disk(make_node, small_disk) -> None:
    disk = small_disk(160)
    node = make_node("one", disk.path / "home").start()
    node.wait(lambda: node.step() >= 3, "third version")
    for leave_bytes in (0, 24 * 2**10):  # not a page; a page or two, so that a write fails in its middle
        disk.fill(leave_bytes)
        node.wait(lambda: "disk_full" in node.health(), "a full disk in the status")
        item = node.health()["disk_full"]
        assert item["level"] == "error"
        assert "the disk is full" in item["message"]
        assert "free some space" in item["fix"]
        node.wait(lambda: node.now() == "degraded", "degraded")
        node.wait(lambda: node.status()["state"]["reasons"].count("disk_full") == 1, "the reason")
        assert _run("--home", str(node.home), "status", "--check").returncode == 4
        before = node.step()
        assert "goes on by itself" in node.log
        disk.free()
        node.wait(lambda: "disk_full" not in node.health(), "room again")
        node.wait(lambda before=before: node.step() > before + 1, "versions after there was room")
        node.wait(lambda: node.now() == "working", "work as before")
    before = node.step()
    assert node.end() == 0
    assert "Traceback" not in node.log
    node.start()
    node.wait(lambda: node.step() > before, "the chain goes on after a restart")
    assert "corrupt" not in node.log
    assert node.health().keys() <= {"no_peers"}


@pytest.mark.slow
def test_a_node_that_is_killed_on_a_full_disk_goes_on_from_its_home(make_node, small_disk) -> None:
    disk = small_disk(160)
    node = make_node("one", disk.path / "home").start()
    node.wait(lambda: node.step() >= 2, "second version")
    disk.fill()
    node.wait(lambda: "disk_full" in node.health(), "a full disk in the status")
    before = node.step()
    gone, alive = psutil.wait_procs(node.kill(), timeout=10)
    assert not alive, "children outlived their daemon"
    disk.free()
    node.start()
    node.wait(lambda: node.step() > before, "a version after the restart")
    assert "corrupt" not in node.log


@pytest.mark.parametrize("fresh", [True, False])
def test_a_start_on_a_full_disk_is_refused(small_disk, fresh: bool) -> None:
    disk = small_disk(64)
    home = disk.path / "home"
    if not fresh:
        place = Home.locate(home)
        place.create()
        Identity.create(place.identity)
    disk.fill()
    done = _run("--home", str(home), "run", "addition")
    assert done.returncode == 6, done.stderr
    assert "the disk is full" in done.stderr
    assert "--home" in done.stderr
    assert "Traceback" not in done.stderr
    assert home.exists() == (not fresh)


def _run(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "p2prl", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
