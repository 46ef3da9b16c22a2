from pathlib import Path

import pytest
import torch

from p2prl.bench.warm_start import main
from p2prl.models.state import state_hash


def test_the_command_writes_a_state_file_and_prints_its_hash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    try:
        # An untrained policy already has a reward of 0, so this ends at the first measurement.
        assert main(["--target", "0", "--out", str(tmp_path / "addition.safetensors")]) == 0
    finally:
        torch.set_num_threads(threads)
    output = capsys.readouterr()
    assert output.out.strip() == state_hash(tmp_path / "addition.safetensors").hex()
    assert "step 10: loss" in output.err
