"""Two machines, as far as the network can tell: two network namespaces joined by a veth pair."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow, pytest.mark.needs("root", "ip", "nsenter")]
ANYWHERE = ("--set", "swarm.host=0.0.0.0")


@dataclass(frozen=True)
class Host:
    """One namespace with its address on the wire between the two."""

    name: str
    link: str
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        """What a command inside of it begins with."""
        return ("nsenter", f"--net=/run/netns/{self.name}")

    def p2prl(self, node, *args: str) -> dict[str, Any]:
        """The JSON of a reading command: its API listens on that namespace's loopback."""
        command = [*self.inside, sys.executable, "-m", "p2prl", "--home", str(node.home), "--json", *args]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else {}

    def step(self, node) -> int:
        return self.p2prl(node, "status").get("training", {}).get("step", 0)

    def start(self, node, *args: str, recipe: str = "addition"):
        return node.start(*ANYWHERE, *args, recipe=recipe, launcher=(*self.inside, sys.executable, "-m", "p2prl"))


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Namespaces named after this process; gone in any case, and the wire with them."""
    tag = os.getpid()
    one, two = (Host(f"p2prl-{end}-{tag}", f"p{end}{tag}", f"10.77.0.{end}") for end in (1, 2))
    pair = (one, two)
    try:
        for host in pair:
            ip("netns", "add", host.name)
        ip(
            "link",
            "add",
            pair[0].link,
            "netns",
            pair[0].name,
            "type",
            "veth",
            "peer",
            pair[1].link,
            "netns",
            pair[1].name,
        )
        for host in pair:
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.link)
            ip("-n", host.name, "link", "set", host.link, "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield pair
    finally:
        for host in pair:
            subprocess.run(["ip", "netns", "delete", host.name], check=False, stderr=subprocess.DEVNULL)


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True)


def test_two_machines_join_by_an_invite_and_train_one_chain(hosts: tuple[Host, Host], make_node) -> None:
    here, there = hosts
    host = here.start(make_node("host"))
    host.wait(lambda: here.step(host) >= 1, "first version")
    invite = here.p2prl(host, "invite")["invite"]
    assert here.address in invite
    assert "127.0.0.1" not in invite  # nobody else can dial that
    guest = there.start(make_node("guest"), recipe=invite)
    guest.wait(lambda: there.p2prl(guest, "status").get("given", {}).get("admitted", 0) > 0, "groups of the guest's")
    before = here.step(host)
    guest.wait(lambda: there.step(guest) > before, "versions of the host's at the guest")
    leaders = {machine.p2prl(node, "status")["swarm"]["leader"] for machine, node in ((here, host), (there, guest))}
    assert leaders == {here.p2prl(host, "id")["peer_id"]}
    assert _heads_meet(hosts, host, guest)
    left = [*host.descendants(), *guest.descendants()]
    assert guest.end() == 0
    assert host.end() == 0
    gone, alive = psutil.wait_procs(left, timeout=10)
    assert not alive


def test_a_cut_wire_makes_two_chains_and_a_mended_one_makes_one_again(hosts: tuple[Host, Host], make_node) -> None:
    here, there = hosts
    host = here.start(make_node("host"))
    host.wait(lambda: here.step(host) >= 1, "first version")
    guest = there.start(make_node("guest"), recipe=here.p2prl(host, "invite")["invite"])
    guest.wait(lambda: there.step(guest) >= 1, "versions at the guest")
    ip("-n", here.name, "link", "set", here.link, "down")
    before = there.step(guest)
    guest.wait(lambda: there.p2prl(guest, "status").get("swarm", {}).get("role") == "leader", "the guest's own lease")
    guest.wait(lambda: there.step(guest) > before, "versions of the guest's own")
    assert here.p2prl(host, "status")["swarm"]["role"] == "leader"
    ip("-n", here.name, "link", "set", here.link, "up")
    guest.wait(lambda: _leaders(hosts, host, guest) == 1, "one leader")
    guest.wait(lambda: _heads_meet(hosts, host, guest), "one chain")
    for machine, node in ((here, host), (there, guest)):
        assert "Traceback" not in node.log
        assert machine.p2prl(node, "status")["state"]["now"] == "working"


def _leaders(hosts: tuple[Host, Host], *nodes) -> int:
    roles = [
        machine.p2prl(node, "status").get("swarm", {}).get("role") for machine, node in zip(hosts, nodes, strict=True)
    ]
    return roles.count("leader")


def _heads_meet(hosts: tuple[Host, Host], *nodes) -> bool:
    """Whether the two hold a version in common as their newest, seen within some steps."""
    seen: list[set[str]] = [set(), set()]
    for _ in range(40):
        for versions, machine, node in zip(seen, hosts, nodes, strict=True):
            versions.add(machine.p2prl(node, "status").get("swarm", {}).get("policy_version", ""))
        if (seen[0] & seen[1]) - {""}:
            return True
    return False
