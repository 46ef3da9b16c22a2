"""A node at its start and end: a wrong clock, a wrong network, ports in use, Ctrl-C once and twice."""

import os
import signal
import socket
import sys
from collections.abc import Iterator

import psutil
import pytest

pytestmark = pytest.mark.timeout(240)

# The whole CLI with this machine's clock moved by argv[1] seconds, argv[2] seconds after the start; nothing else of the
# process is touched.
SKEWED = """
import sys, time
shift, after, real, start = float(sys.argv.pop(1)), float(sys.argv.pop(1)), time.time, time.monotonic()
time.time = lambda: real() + (shift if time.monotonic() - start >= after else 0.0)
from p2prl.cli.main import main
main()
"""


def skewed(shift_s: float, after_s: float = 0.0) -> tuple[str, ...]:
    return (sys.executable, "-c", SKEWED, str(shift_s), str(after_s))


def address(node) -> str:
    node.wait(lambda: node.status().get("swarm", {}).get("addresses"), "addresses")
    return node.status()["swarm"]["addresses"][0]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.slow
def test_a_clock_that_is_off_stops_a_newcomer_when_three_peers_tell(make_node) -> None:
    relays = ("--role", "relay")
    first = make_node("first").start(*relays)
    join = ("--join", address(first))
    others = [make_node(f"other{number}").start(*relays, *join) for number in range(2)]
    for node in others:
        node.wait(lambda node=node: node.status().get("swarm", {}).get("peers_alive", 0) >= 2, "both peers")
    late = make_node("late").start(*relays, *join, launcher=skewed(-60))
    assert late.process is not None
    assert late.process.wait(60) == 6, late.log
    assert "s behind the swarm's, as 3 peers tell" in late.log
    assert "NTP" in late.log
    assert "Traceback" not in late.log
    for node in (first, *others):  # the one wrong clock is told of nowhere, and stops nobody
        assert node.process.poll() is None
        assert "clock_skew" not in node.health()


@pytest.mark.slow
def test_a_clock_that_goes_wrong_later_is_told_of_and_ends_nothing(make_node) -> None:
    relays = ("--role", "relay")
    first = make_node("first").start(*relays)
    join = ("--join", address(first))
    for number in range(2):
        make_node(f"other{number}").start(*relays, *join)
    late = make_node("late").start(*relays, *join, launcher=skewed(7, after_s=70))
    late.wait(lambda: late.status().get("swarm", {}).get("peers_alive", 0) >= 3, "three peers")
    assert "clock_skew" not in late.health()
    late.wait(lambda: late.health().get("clock_skew", {}).get("level") == "error", "the clock in the status")
    late.wait(lambda: late.now() == "degraded", "degraded")
    assert "7.0 s ahead of the swarm's, as 3 peers tell" in late.health()["clock_skew"]["message"]
    assert late.end() == 0


@pytest.mark.slow
def test_an_invite_that_nobody_answers_says_to_try_again(make_node) -> None:
    nobody = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEfY2TmhEWp1scTkNTgGcB6sBdaeicFJXJjeBmUpFMyg8"
    node = make_node("one").start(recipe=f"p2prl://{'ab' * 32}?peer={nobody}")
    assert node.process is not None
    assert node.process.wait(100) == 75
    assert "nobody gave the recipe of swarm abababab" in node.log
    assert "try again later" in node.log
    assert "Traceback" not in node.log


def test_a_clock_that_two_peers_dispute_is_only_told_of(make_node) -> None:
    first = make_node("first").start("--role", "relay")
    early = make_node("early").start("--role", "relay", "--join", address(first), launcher=skewed(10))
    early.wait(lambda: "clock_skew" in early.health(), "a warning about the clock")
    item = early.health()["clock_skew"]
    assert item["level"] == "warning"
    assert "ahead of the swarm's, as 1 peer tell" in item["message"]
    assert "NTP" in item["fix"]
    assert early.end() == 0


def test_a_bootstrap_of_another_network_stops_the_start(make_node, tmp_path) -> None:
    other = tmp_path / "other.toml"
    from p2prl import recipe as recipes

    text = recipes.find("addition")[1]
    other.write_text(text.replace("max_age = 16", "max_age = 15"))
    host = make_node("host").start("--role", "relay", recipe=str(other))
    guest = make_node("guest").start("--role", "relay", "--join", address(host))
    assert guest.process is not None
    assert guest.process.wait(60) == 6, guest.log
    assert "wrong network: the bootstrap is in another swarm" in guest.log
    assert "Traceback" not in guest.log
    assert not (guest.home / "state" / "node.json").exists()
    # With a second bootstrap that is merely down, the right network may come back: told, and dialled on.
    nobody = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWEfY2TmhEWp1scTkNTgGcB6sBdaeicFJXJjeBmUpFMyg8"
    guest.start("--role", "relay", "--join", address(host), "--join", nobody)
    guest.wait(lambda: "wrong_network" in guest.health(), "a warning about the network")
    assert "wrong_network" not in host.health()  # who was dialled by a stranger has nothing to repair
    assert guest.end() == 0


@pytest.mark.parametrize("key", ["swarm.port", "web.port"])
def test_a_port_in_use_stops_the_start(make_node, taken: int, key: str) -> None:
    node = make_node("one").start("--set", f"{key}={taken}")
    assert node.process is not None
    assert node.process.wait(60) == 6, node.log
    assert str(taken) in node.log
    assert key in node.log
    assert "Traceback" not in node.log
    assert not (node.home / "state" / "node.json").exists()


def test_ctrl_c_drains(make_node) -> None:
    node = make_node("one").start()
    node.wait(lambda: node.step() >= 1, "first version")
    before, left = node.step(), node.descendants()
    assert node.process is not None
    node.process.send_signal(signal.SIGINT)
    assert node.process.wait(30) == 0, node.log
    _ended_well(node, left)
    assert node.status() == {}
    node.start()  # nothing of what it had is lost
    node.wait(lambda: node.step() >= before, "the version of before")
    assert node.end() == 0


@pytest.mark.parametrize("whom", ["its process group", "all its processes"])
def test_a_stop_that_reaches_its_children_too_is_no_fault(make_node, whom: str) -> None:
    """As Ctrl-C in a terminal, and systemd, do it."""
    node = make_node("one").start()
    node.wait(lambda: node.step() >= 1, "first version")
    left = node.descendants()
    assert node.process is not None
    if whom == "its process group":
        os.killpg(node.process.pid, signal.SIGTERM)
    else:
        for process in (psutil.Process(node.process.pid), *left):
            process.terminate()
    assert node.process.wait(30) == 0, node.log
    _ended_well(node, left)
    after = node.log[node.log.index("draining") :]
    assert " warn " not in after  # no child's end, p2pd's neither, is told as a fault
    assert " error " not in after or whom == "all its processes"  # a loop may have waited for its child


def test_ctrl_c_twice_stops_at_once(make_node) -> None:
    node = make_node("one").start()
    node.wait(lambda: node.step() >= 1, "first version")
    left = node.descendants()
    (engine,) = (child for child in left if any("engine_process" in part for part in child.cmdline()))
    engine.suspend()  # its batch never ends, so the drain would wait for all its time
    assert node.process is not None
    node.process.send_signal(signal.SIGINT)
    node.wait(lambda: "draining" in node.log, "the drain")
    node.process.send_signal(signal.SIGINT)
    assert node.process.wait(15) == 130, node.log
    _ended_well(node, left)


def _ended_well(node, left: list[psutil.Process]) -> None:
    gone, alive = psutil.wait_procs(left, timeout=10)
    assert not alive, "children outlived their daemon"
    assert "draining" in node.log
    assert "Traceback" not in node.log
    assert not (node.home / "state" / "node.json").exists()
