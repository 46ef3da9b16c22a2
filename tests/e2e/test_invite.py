"""A stranger joins with nothing but an invite: recipe from the peer, then the same chain."""

import json
import subprocess
import sys

import pytest

from p2prl import recipe as recipes

pytestmark = pytest.mark.timeout(300)


def test_an_invite_is_enough_to_join(make_node, tmp_path) -> None:
    text, _ = _own_recipe(tmp_path)
    host = make_node("host").start(recipe=str(tmp_path / "own.toml"))
    host.wait(lambda: host.step() >= 1, "first version")
    command = [sys.executable, "-m", "p2prl", "--home", str(host.home), "--json", "invite"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    invite = json.loads(shown.stdout)["invite"]
    guest = make_node("guest").start(recipe=invite)
    guest.wait(lambda: guest.step() > 1, "versions at the guest")
    assert guest.status()["swarm"]["id"] == host.status()["swarm"]["id"]
    assert guest.status()["swarm"]["leader"] == host.status()["node"]["peer_id"]
    assert "what leaves this machine" in guest.log


def _own_recipe(folder):
    """One that does not ship, so that only the host has it."""
    _, text = recipes.find("addition")
    changed = text.replace('name = "addition"\n\n[model]', 'name = "own"\n\n[model]').replace(
        "max_age = 16", "max_age = 17"
    )
    assert changed != text
    (folder / "own.toml").write_text(changed)
    return changed, folder
