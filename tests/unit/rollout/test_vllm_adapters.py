"""Adapters for vLLM by name: a folder in the peft library's form, of zeros for version 0; what vLLM can't take is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from p2prl.errors import EngineError
from p2prl.models.load import ModelFiles
from p2prl.models.lora_rule import Lora
from p2prl.models.tensors import write_state, write_tensors
from p2prl.rollout.messages import Setup
from p2prl.rollout.vllm_adapters import Adapters
from p2prl.rollout.vllm_process import weights_of
from p2prl.rollout.vllm_weights import Folders
from tests import factories

LORA = Lora(2, 4.0, ("q_proj", "down_proj"))
SMALL = LlamaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, eos_token_id=1
)


def write(module: torch.nn.Module, folder: Path) -> ModelFiles:
    module.config.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    return ModelFiles(folder, folder / "model.safetensors", write_state(module, folder / "model.safetensors"))


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    return write(LlamaForCausalLM(SMALL), tmp_path / "model")


def pairs(rank: int = 2) -> dict[str, torch.Tensor]:
    found = {}
    for layer in range(2):
        for name, outputs, inputs in (("self_attn.q_proj", 8, 8), ("mlp.down_proj", 8, 12)):
            weight = f"model.layers.{layer}.{name}.weight"
            found[f"{weight}.lora_a"] = torch.randn(rank, inputs).bfloat16()
            found[f"{weight}.lora_b"] = torch.randn(outputs, rank).bfloat16()
    return found


def test_a_version_is_a_folder_of_peft_and_version_0_changes_nothing(files: ModelFiles, tmp_path: Path) -> None:
    adapters = Adapters(files, tmp_path / "scratch", LORA)
    base = adapters.first()
    zeros = load_file(adapters(files.weights, factories.BASE) / "adapter_model.safetensors")
    write_tensors(made := pairs(), tmp_path / "one")
    folder = adapters(tmp_path / "one", factories.version(1))
    held = load_file(folder / "adapter_model.safetensors")
    assert held.keys() == zeros.keys() and len(held) == len(made)
    assert all(not value.any() for value in zeros.values())
    name = "model.layers.1.mlp.down_proj"
    assert torch.equal(held[f"base_model.model.{name}.lora_B.weight"], made[f"{name}.weight.lora_b"])
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 4.0, ["down_proj", "q_proj"])
    assert torch.equal(
        load_file(base / "model.safetensors")[f"{name}.weight"], load_file(files.weights)[f"{name}.weight"]
    )


@pytest.mark.parametrize(("rank", "room"), [(1, 1), (2, 8), (8, 8), (9, 16), (512, 512)])
def test_vllm_gets_room_for_the_rank(files: ModelFiles, tmp_path: Path, rank: int, room: int) -> None:
    args = Adapters(files, tmp_path, Lora(rank, 4.0, LORA.targets)).engine_args()
    assert args == {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


def test_what_vllm_can_not_take_is_refused(files: ModelFiles, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="rank 513.*rollout.adapters"):
        Adapters(files, tmp_path / "scratch", Lora(513, 4.0, LORA.targets))
    gpt2 = write(GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2)), tmp_path / "gpt2")
    with pytest.raises(EngineError, match="these layers.*rollout.adapters"):
        Adapters(gpt2, tmp_path / "scratch", Lora(2, 4.0, ("c_attn",)))
    adapters = Adapters(files, tmp_path / "scratch", LORA)
    adapters.first()
    write_tensors(pairs(rank=4), tmp_path / "four")
    for path in (tmp_path / "four", files.weights):
        with pytest.raises(EngineError, match="of another recipe"):
            adapters(path, factories.version(1))


def test_version_0_is_the_base_model_and_no_other(files: ModelFiles, tmp_path: Path) -> None:
    adapters = Adapters(files, tmp_path / "scratch", LORA)
    adapters.first()
    assert adapters(Path(shutil.copy(files.weights, tmp_path / "copy")), factories.BASE).is_dir()
    other = write(LlamaForCausalLM(SMALL), tmp_path / "other")
    with pytest.raises(EngineError, match="not the base model.*rollout.adapters"):
        adapters(other.weights, factories.BASE)


def test_a_recipe_with_adapters_has_them_merged_unless_the_config_says_by_name(
    files: ModelFiles, tmp_path: Path
) -> None:
    found = [
        type(weights_of(Setup("folder:x", "", (1,), 0, lora=lora, adapters=adapters), files, tmp_path))
        for lora in (None, LORA)
        for adapters in ("merged", "name")
    ]
    assert found == [Folders, Folders, Folders, Adapters]
