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


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("100GB", 10**11), ("1.5 TB", 1_500_000_000_000), ("512MiB", 2**29), ("7", 7), ("0", 0), ("3k", 3000)],
)
def test_a_size_is_read_as_people_write_it(tmp_path: Path, text: str, num_bytes: int) -> None:
    found, _ = config.load(tmp_path / "none.toml", {}, [f'storage.cache="{text}"'])
    assert found.storage.cache == num_bytes


@pytest.mark.parametrize("text", ["much", "-1", "5MB/s", "1e400GB", "9999999999TB"])
def test_what_is_no_size_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="storage.cache"):
        config.load(tmp_path / "none.toml", {}, [f'storage.cache="{text}"'])
