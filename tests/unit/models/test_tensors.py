from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2prl.errors import BadRecord
from p2prl.models.state import state_hash
from p2prl.models.tensors import load_into, read_state, write_state, write_tensors


class Tied(torch.nn.Module):
    """Two layers that share a weight, as tied embeddings do."""

    def __init__(self, seed: int = 0, width: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.inside = torch.nn.Linear(width, width)
        self.out = torch.nn.Linear(width, width)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.out.weight = self.inside.weight


def test_round_trip_is_the_bf16_rounding(tmp_path: Path) -> None:
    module, other, path = Tied(0), Tied(1), tmp_path / "state.safetensors"
    digest = write_state(module, path)
    load_into(other, path)
    for (name, mine), (_, theirs) in zip(module.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(theirs, mine.to(torch.bfloat16).float()), name
    assert other.out.weight is other.inside.weight
    assert digest == state_hash(path)
    assert write_state(other, tmp_path / "again.safetensors") == digest
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_a_tied_weight_is_written_once(tmp_path: Path) -> None:
    write_state(Tied(), tmp_path / "state.safetensors")
    assert list(read_state(tmp_path / "state.safetensors")) == ["inside.bias", "inside.weight", "out.bias"]


def test_safetensors_itself_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    write_state(Tied(), path)
    ours, theirs = read_state(path), load_file(path)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == torch.bfloat16 for name in ours)


def test_the_hash_agrees_with_a_file_of_another_writer(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 2).bfloat16(), "a": torch.tensor(1.5).bfloat16(), "c": torch.empty(0, 2).bfloat16()}
    save_file(tensors, tmp_path / "other.safetensors", metadata={"format": "pt"})
    assert write_tensors(tensors, tmp_path / "ours.safetensors") == state_hash(tmp_path / "other.safetensors")


def test_special_values_keep_their_bits(tmp_path: Path) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    write_tensors({"all": bits.view(torch.bfloat16)}, tmp_path / "state.safetensors")
    assert torch.equal(read_state(tmp_path / "state.safetensors")["all"].view(torch.int16), bits)


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: without(tensors, "out.bias"), "lacks 'out.bias'"),
        (lambda tensors: tensors | {"extra": torch.zeros(1)}, "unknown 'extra'"),
        (lambda tensors: tensors | {"out.bias": torch.zeros(5)}, r"'out.bias' is BF16 \[5\], not BF16 \[4\]"),
    ],
)
def test_weights_of_another_model_change_nothing(tmp_path: Path, change, message: str) -> None:
    path, module = tmp_path / "state.safetensors", Tied(0)
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    write_tensors(change(dict(Tied(1).named_parameters())), path)
    with pytest.raises(BadRecord, match=message):
        load_into(module, path)
    assert all(torch.equal(before[name], parameter) for name, parameter in module.named_parameters())


def test_weights_of_another_type_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    save_file({"inside.weight": torch.zeros(4, 4), "inside.bias": torch.zeros(4), "out.bias": torch.zeros(4)}, path)
    with pytest.raises(BadRecord, match="F32"):
        load_into(Tied(), path)
    with pytest.raises(BadRecord, match="F32"):
        read_state(path)


def test_what_was_read_outlives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    write_tensors({"a": torch.full((3,), 2.0)}, path)
    held = read_state(path)["a"]
    path.unlink()
    assert held.tolist() == [2.0, 2.0, 2.0]
