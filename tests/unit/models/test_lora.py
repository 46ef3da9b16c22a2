"""Adapters as a file: what is refused, and a sum that has the same bits everywhere."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from p2prl.errors import BadRecord, ConfigError
from p2prl.models.lora import Target, find_targets, is_adapter_file, merge, read_pairs
from p2prl.models.tensors import write_state, write_tensors
from p2prl.recipe import find

NAMES = ("up", "down")
GPT2: dict[str, Any] = {"n_embd": 12, "n_layer": 2, "n_head": 2, "vocab_size": 17, "n_positions": 16}
LLAMA: dict[str, Any] = {
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 17,
}


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 6, bias=False), nn.LayerNorm(6)


def halves(rank: int = 3) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(rank)
    shapes = {"up.weight": (10, 6), "down.weight": (6, 10)}
    found = {}
    for name, (rows, columns) in shapes.items():
        found[f"{name}.lora_a"] = torch.randn(rank, columns, generator=source)
        found[f"{name}.lora_b"] = torch.randn(rows, rank, generator=source)
    return found


@pytest.fixture
def targets() -> dict[str, Target]:
    return find_targets(Small(), NAMES)


def test_a_file_is_read_as_it_was_written(targets, tmp_path: Path) -> None:
    written = halves()
    write_tensors(written, tmp_path / "state")
    assert is_adapter_file(tmp_path / "state")
    for name, (a, b) in read_pairs(tmp_path / "state", targets, 3).items():
        assert torch.equal(a, written[f"{name}.lora_a"].bfloat16())
        assert torch.equal(b, written[f"{name}.lora_b"].bfloat16())


def without(name: str) -> dict[str, torch.Tensor]:
    return {key: value for key, value in halves().items() if key != name}


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        (halves(4), r"BF16 \[4, 10\], not BF16 \[3, 10\]"),
        (without("up.weight.lora_b"), "lacks 'up.weight.lora_b'"),
        ({key: value for key, value in halves().items() if key.startswith("up")}, "lacks 'down.weight.lora_a'"),
        (halves() | {"norm.weight.lora_a": torch.zeros(3, 6)}, "unknown 'norm.weight.lora_a'"),
        (halves() | {"norm.weight": torch.zeros(6)}, "unknown 'norm.weight'"),
        (halves() | {"up.weight.lora_a": torch.full((3, 6), float("inf"))}, "'up.weight.lora_a' has values"),
        (halves() | {"down.weight.lora_b": torch.full((6, 3), float("nan"))}, "'down.weight.lora_b' has values"),
    ],
)
def test_what_is_not_the_recipes_is_refused(targets, tmp_path: Path, tensors, match: str) -> None:
    write_tensors(tensors, tmp_path / "state")
    with pytest.raises(BadRecord, match=match):
        read_pairs(tmp_path / "state", targets, 3)


def test_other_types_are_refused(targets, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(halves(), tmp_path / "state")
    with pytest.raises(BadRecord, match="is F32"):
        read_pairs(tmp_path / "state", targets, 3)


def test_whole_weights_are_no_adapters(tmp_path: Path) -> None:
    write_state(Small(), tmp_path / "state")
    assert not is_adapter_file(tmp_path / "state")
    write_tensors(halves() | {"norm.weight": torch.zeros(6)}, tmp_path / "both")
    assert not is_adapter_file(tmp_path / "both")


@pytest.mark.parametrize("transposed", [False, True])
def test_the_sum_has_the_same_bits_whatever_the_order_of_its_terms(transposed: bool) -> None:
    """In float32 a permutation of the ranks changes the rounding of some weights; here of none."""
    source = torch.Generator().manual_seed(0)
    rows, columns, rank = 300, 700, 64
    base = torch.randn(rows, columns, generator=source).bfloat16()
    a, b = torch.randn(rank, columns, generator=source), 0.02 * torch.randn(rows, rank, generator=source)
    a, b = a.bfloat16(), b.bfloat16()
    order = torch.randperm(rank, generator=source)
    given = base.t().contiguous() if transposed else base
    merged = [merge(given, pair, 2.0 / 3.0, transposed) for pair in ((a, b), (a[order], b[:, order]))]
    assert merged[0].shape == given.shape and merged[0].dtype == torch.bfloat16
    assert torch.equal(*merged)
    exact = (base.double() + 2.0 / 3.0 * (b.double() @ a.double())).float().bfloat16()
    assert torch.equal(merged[0].t() if transposed else merged[0], exact)
    assert torch.equal(merge(given, (a, torch.zeros_like(b)), 2.0, transposed), given)


def test_it_goes_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    base, (a, b) = torch.randn(50, 7), (torch.randn(2, 7), torch.randn(50, 2))
    whole = merge(base, (a, b), 2.0)
    monkeypatch.setattr("p2prl.models.lora._BLOCK", 20)
    assert torch.equal(merge(base, (a, b), 2.0), whole)


def test_layers_of_both_families_are_found() -> None:
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    found = find_targets(llama, find("addition")[0].learner.lora.targets)
    assert len(found) == 14 and not any(target.transposed for target in found.values())
    target = found["model.layers.0.mlp.up_proj.weight"]
    assert (target.num_inputs, target.num_outputs) == (12, 20)
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    found = find_targets(gpt2, ("c_attn", "c_fc"))
    assert len(found) == 4 and all(target.transposed for target in found.values())
    target = found["transformer.h.0.attn.c_attn.weight"]
    assert (target.num_inputs, target.num_outputs) == (12, 36)


def test_a_weight_that_is_shared_is_no_target() -> None:
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2))
    with pytest.raises(ConfigError, match="lm_head shares its weight"):
        find_targets(gpt2, ("c_attn", "lm_head"))
    with pytest.raises(ConfigError, match="no linear layer named 'q_proj'"):
        find_targets(gpt2, ("c_attn", "q_proj"))
