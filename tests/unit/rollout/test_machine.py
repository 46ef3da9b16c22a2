from pathlib import Path

import psutil
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from p2prl.errors import ConfigError
from p2prl.models.load import ModelFiles, prepare
from p2prl.models.tensors import write_state
from p2prl.rollout.machine import describe, free_memory, measure


def test_the_builtin_policy_is_described(tmp_path: Path) -> None:
    model = describe(prepare("builtin:addition", tmp_path, lambda _: None))
    assert 300_000 < model.num_parameters < 900_000
    assert not model.is_folder and model.max_positions == 64


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_folder_is_described_with_what_it_uses_twice(tmp_path: Path, is_tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=is_tied, max_position_embeddings=32,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    model = describe(ModelFiles(tmp_path, weights, write_state(LlamaForCausalLM(config), weights)))
    assert (model.num_shared, model.max_positions) == (16 * 8 if is_tied else 0, 32)


def test_a_container_counts_with_its_limit(tmp_path: Path) -> None:
    assert free_memory(tmp_path) > 0
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert free_memory(tmp_path) == 600_000
    (tmp_path / "memory.stat").write_text("anon 100000\ninactive_file 250000\nactive_file 7\n")
    assert free_memory(tmp_path) == 850_000, "files that were read are no reason to plan with less"
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path) <= psutil.virtual_memory().total
    assert free_memory(tmp_path) > 600_000


def test_a_gpu_that_is_gone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert measure().device == "cpu"
    with pytest.raises(ConfigError, match="GPU that generated here is gone"):
        measure("cuda")


def test_apples_gpu_is_taken_where_torch_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    assert measure().device == "mps" and measure("cpu").device == "cpu"
    with pytest.raises(ConfigError, match="is gone"):
        measure("cuda")
