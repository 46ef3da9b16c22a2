"""A node's folders."""

import os
from pathlib import Path

import pytest

from p2prl.paths import Home


def test_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        home = Home.locate(tmp_path / "a b" / "hömé")
        home.create()
    finally:
        os.umask(before)
    for folder in (home.state.parent, home.config, home.state, home.cache, home.logs, home.blobs):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_command_for_a_home_names_it_where_it_is_not_the_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("P2PRL_HOME", raising=False)
    assert Home.locate().command == "p2prl"
    assert Home.locate("/tmp/my second").command == "p2prl --home '/tmp/my second'"


def test_weights_lie_by_their_swarm(tmp_path: Path) -> None:
    home = Home.locate(tmp_path)
    one, other = home.of(bytes([1]) * 32), home.of(bytes([2]) * 32)
    for name in ("states", "blobs", "checkpoints"):
        assert getattr(one, name) == getattr(home, name) / ("01" * 8) != getattr(other, name)
    assert (one.database, one.models, one.identity) == (home.database, home.models, home.identity)
    assert one.of(b"") == home
