"""The folder that vLLM reads holds a version's weights, shared ones twice; what doesn't fit is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from p2prl.errors import EngineError
from p2prl.models.load import ModelFiles
from p2prl.models.lora import find_targets, merge
from p2prl.models.lora_rule import Lora
from p2prl.models.tensors import write_state, write_tensors
from p2prl.rollout.vllm_weights import LOCK, Folders, scratch_folder
from tests import factories

LORA = Lora(2, 4.0, ("q_proj",))


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> ModelFiles:
    folder = tmp_path / "model"
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=request.param, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    module = LlamaForCausalLM(config)
    config.save_pretrained(folder)
    return ModelFiles(folder, folder / "model.safetensors", write_state(module, folder / "model.safetensors"))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def test_it_holds_all_weights_of_the_version_and_the_output_head_beside_the_embeddings(
    files: ModelFiles, tmp_path: Path
) -> None:
    folders = Folders(files, tmp_path / "scratch", None)
    first = folders.first()
    assert (first / "config.json").is_file()
    base = tensors(first)
    changed = {name: value * 2 for name, value in load_file(files.weights).items()}
    write_tensors(changed, tmp_path / "next")
    held = tensors(folders(tmp_path / "next", factories.version(1)))
    assert "lm_head.weight" in held and held.keys() == base.keys()
    for name, value in held.items():
        source = changed.get(name, changed["model.embed_tokens.weight"])
        assert torch.equal(value, source), name


def test_adapters_become_whole_weights_by_the_learners_rule(files: ModelFiles, tmp_path: Path) -> None:
    folders = Folders(files, tmp_path / "scratch", LORA)
    folders.first()
    module = LlamaForCausalLM.from_pretrained(files.folder)
    ((name, target),) = find_targets(module, LORA.targets).items()
    pair = torch.randn(2, target.num_inputs).bfloat16(), torch.randn(target.num_outputs, 2).bfloat16()
    write_tensors({f"{name}.lora_a": pair[0], f"{name}.lora_b": pair[1]}, tmp_path / "adapters")
    held = tensors(folders(tmp_path / "adapters", factories.version(1)))
    base = load_file(files.weights)
    assert torch.equal(held[name], merge(base[name], pair, LORA.scale))
    assert not torch.equal(held[name], base[name])
    others = base.keys() - {name}
    assert all(torch.equal(held[other], base[other]) for other in others)
    assert tensors(folders(files.weights, factories.BASE)).keys() == held.keys()


def test_what_does_not_fit_is_refused(files: ModelFiles, tmp_path: Path) -> None:
    folders = Folders(files, tmp_path / "scratch", None)
    folders.first()
    (tmp_path / "cut").write_bytes(files.weights.read_bytes()[:-10])
    write_tensors({"other": torch.zeros(2)}, tmp_path / "other")
    for path, why in (("cut", "not a weights file"), ("other", "another model"), ("missing", "can't read")):
        with pytest.raises(EngineError, match=why):
            folders(tmp_path / path, factories.version(1))


def test_the_weights_of_a_killed_engine_are_swept_and_those_of_a_living_one_stay(tmp_path: Path) -> None:
    left = tmp_path / ".vllm" / "weights" / "killed"
    left.mkdir(parents=True)
    (left / LOCK).touch()
    (left / "model.safetensors").write_bytes(bytes(100))
    with scratch_folder(tmp_path) as one, scratch_folder(tmp_path) as other:
        assert one != other and one.is_dir() and other.is_dir() and not left.exists()
        (one / "model.safetensors").write_bytes(bytes(100))
    assert not one.exists() and not other.exists()
