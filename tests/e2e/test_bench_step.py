"""`p2prl bench step` for real, on the built-in policy: every figure, one JSON line, nothing left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from p2prl.bench.step import VARIANTS


@pytest.mark.slow
def test_every_figure_is_there_and_nothing_is_left(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "p2prl", "--home", str(tmp_path / "home"), "bench", "step"]
    command += ["--model", "builtin", "--rounds", "2", "--threads", "1", "--json"]
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=170, env={**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert report["schema"] == 1 and report["models"].keys() == {"builtin"}
    found = report["models"]["builtin"]
    assert found["num_rounds"] == 2 and found["plain"]
    assert found["step_s"].keys() == found["tokens_per_s"].keys() == set(VARIANTS)
    for name in ("vcpo_over_plain", "vcpo_over_plain_shared", "naive_over_plain", "a3po_over_recompute"):
        assert 0.1 < found[name] < 100
    assert found["naive_over_plain"] > found["vcpo_over_plain"]
    assert all(num_bytes > 10_000_000 for num_bytes in found["peak_memory_bytes"].values())
    assert report["figures"]["builtin_a3po_over_recompute"]["target"] == 0.82
    assert list((tmp_path / "tmp").iterdir()) == []
