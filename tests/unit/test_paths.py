"""A node's folders."""

import os
from pathlib import Path

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
