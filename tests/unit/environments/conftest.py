"""A package made on the spot, so that entry points are found as they are for users."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`install("my-tasks", {"doubles": "my_tasks:Doubles"}, "my_tasks", code)` puts it on the path of this process."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def made(package: str, points: dict[str, str], module: str, code: str) -> Path:
        (site / f"{module}.py").write_text(code)
        info = site / f"{package.replace('-', '_')}-1.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
        lines = "".join(f"{name} = {value}\n" for name, value in points.items())
        (info / "entry_points.txt").write_text(f"[p2prl.environments]\n{lines}")
        return site

    return made
