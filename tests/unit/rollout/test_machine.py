from pathlib import Path

import psutil
import pytest

from p2prl.errors import ConfigError
from p2prl.models.load import prepare
from p2prl.rollout.machine import describe, free_memory, measure


def test_the_builtin_policy_is_described(tmp_path: Path) -> None:
    model = describe(prepare("builtin:addition", tmp_path, lambda _: None))
    assert 300_000 < model.num_parameters < 900_000
    assert not model.is_folder and model.max_positions == 64


def test_a_container_counts_with_its_limit(tmp_path: Path) -> None:
    assert free_memory(tmp_path) > 0
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert free_memory(tmp_path) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path) <= psutil.virtual_memory().total
    assert free_memory(tmp_path) > 600_000


def test_a_gpu_that_is_gone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert measure().device == "cpu"
    with pytest.raises(ConfigError, match="GPU that generated here is gone"):
        measure("cuda")
