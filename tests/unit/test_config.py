"""Precedence with origins, and every misspelling refused wherever it comes from."""

from pathlib import Path

import pytest

from p2prl import config
from p2prl.errors import ConfigError


def test_file_then_environment_then_flag(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[web]\nport = 1\n[swarm]\nport = 2\n[node]\nname = 'ann'\n")
    found, origins = config.load(file, {"P2PRL_WEB__PORT": "3", "P2PRL_SWARM__PORT": "4"}, ["web.port=5"])
    assert (found.web.port, found.swarm.port, found.node.name, found.log.level) == (5, 4, "ann", "info")
    assert origins["web.port"] == "--set"
    assert origins["swarm.port"] == "P2PRL_SWARM__PORT"
    assert origins["node.name"] == str(file)
    assert origins["log.level"] == "default"


@pytest.mark.parametrize(
    ("text", "environ", "flags", "says"),
    [
        ("[web]\nprot = 1", {}, [], "did you mean 'port'"),
        ("[wbe]\nport = 1", {}, [], "did you mean 'web'"),
        ("web = 1", {}, [], "must be a section"),
        ("[web", {}, [], "can't read"),
        ("", {"P2PRL_WBE__PORT": "1"}, [], "P2PRL_WBE__PORT"),
        ("", {"P2PRL_PORT": "1"}, [], "P2PRL_SECTION__KEY"),
        ("", {}, ["web.port"], "not SECTION.KEY=VALUE"),
        ("", {}, ["web.port=70000"], "web.port"),
        ("", {}, ["web.host=0.0.0.0"], "web.host"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, environ: dict, flags: list, says: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        config.load(file, environ, flags)


def test_without_a_file_all_is_default(tmp_path: Path) -> None:
    found, origins = config.load(tmp_path / "none.toml", {"P2PRL_HOME": "/x", "HOME": "/y"})
    assert found == config.NodeConfig()
    assert set(origins.values()) == {"default"}
