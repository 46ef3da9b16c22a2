"""One node through what happens to nodes: restarts, kill -9, a dead p2pd, dead bootstraps, a second daemon."""

import subprocess
import sys

import psutil
import pytest

pytestmark = pytest.mark.timeout(240)
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEfY2TmhEWp1scTkNTgGcB6sBdaeicFJXJjeBmUpFMyg8"


def test_a_killed_node_goes_on_from_its_home(make_node) -> None:
    node = make_node("one").start()
    node.wait(lambda: node.step() >= 3, "third version")
    before = node.step()
    left = node.kill()
    gone, alive = psutil.wait_procs(left, timeout=10)
    assert not alive, "children outlived their daemon"
    node.start()
    node.wait(lambda: node.step() > before, "next version after the restart")
    status = node.status()
    assert status["swarm"]["term"] >= 2  # a new term: the vote of the first is never given twice
    assert node.end() == 0
    assert not (node.home / "state" / "node.json").exists()


def test_a_node_outlives_its_p2pd_and_dead_bootstraps(make_node) -> None:
    node = make_node("one").start("--join", NOBODY)
    node.wait(lambda: node.step() >= 2, "second version, alone")
    assert "no_peers" in [item["code"] for item in node.status()["health"]]
    daemons = [process for process in node.descendants() if "p2pd" in process.name()]
    assert daemons
    for process in daemons:
        process.kill()
    before = node.step()
    node.wait(lambda: node.step() > before + 1, "versions after p2pd died")
    node.wait(lambda: any("p2pd" in process.name() for process in node.descendants()), "a new p2pd")


def test_a_second_daemon_on_one_home_is_refused(make_node) -> None:
    node = make_node("one").start()
    node.wait(lambda: node.status(), "status")
    second = _run("--home", str(node.home), "run", "addition")
    assert second.returncode == 7
    assert "another p2prl daemon" in second.stderr


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("run",), 2, "which recipe?"),
        (("run", "additoin"), 2, "did you mean 'addition'"),
        (("run", "addition", "--join", "/ip4/1.2.3.4"), 2, "/ip4/1.2.3.4"),
        (("run", "addition", "--set", "web.prot=1"), 2, "did you mean 'port'"),
        (("status",), 3, "Start one with: p2prl --home "),
    ],
)
def test_a_user_error_says_what_to_do(tmp_path, args, code, says) -> None:
    done = _run("--home", str(tmp_path), *args)
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_corrupt_identity_is_refused(tmp_path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "identity.key").write_bytes(b"nonsense")
    done = _run("--home", str(tmp_path), "run", "addition")
    assert done.returncode == 2
    assert "corrupt" in done.stderr


def _run(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "p2prl", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_one_identity_in_two_places_is_found(make_node, tmp_path) -> None:
    first = make_node("first").start()
    first.wait(lambda: first.status().get("swarm", {}).get("addresses"), "addresses")
    second = make_node("second")
    (second.home / "state").mkdir(parents=True)
    (second.home / "state" / "identity.key").write_bytes((first.home / "state" / "identity.key").read_bytes())
    (second.home / "state" / "identity.key").chmod(0o400)
    third = make_node("third").start("--join", first.status()["swarm"]["addresses"][0])
    third.wait(lambda: third.status().get("swarm", {}).get("peers_alive"), "the first node")
    second.start("--join", third.status()["swarm"]["addresses"][0])
    assert second.process is not None
    assert second.process.wait(60) == 6, second.log
    assert "identity runs elsewhere" in second.log
