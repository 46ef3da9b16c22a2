from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from p2prl.errors import EngineError
from p2prl.models.builtin import WEIGHTS
from p2prl.models.char_tokenizer import END_ID, PAD_ID, CharTokenizer
from p2prl.models.load import load_module
from p2prl.models.tensors import write_state
from p2prl.records import Completion, Sampling
from p2prl.rollout.transformers_engine import TransformersEngine, filtered_logprobs
from tests import factories

TOKENIZER = CharTokenizer()
EVEN = [TOKENIZER.encode_prompt(text) for text in ("12+34=", "99+99=", "70+01=")]
UNEVEN = [TOKENIZER.encode_prompt(text) for text in ("12+34=", "9+9=", "123+77=", "=")]
FREE = Sampling(1.0, 1.0, 0, 8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    return load_module("builtin:addition", tmp_path_factory.mktemp("models"), torch.float32)


@pytest.fixture
def engine(module: torch.nn.Module) -> TransformersEngine:
    made = TransformersEngine(module, TOKENIZER.stop_ids, PAD_ID)
    made.load(WEIGHTS, factories.BASE)
    return made


def plain_logprobs(module: torch.nn.Module, prompt: list[int], answer: Completion, sampling: Sampling) -> np.ndarray:
    """One unpadded row through the whole model, no cache."""
    ids = torch.tensor([[*prompt, *answer.token_ids]])
    with torch.no_grad():
        logits = module(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = filtered_logprobs(logits, sampling).gather(1, torch.tensor(answer.token_ids)[:, None])
    return chosen[:, 0].numpy()


@pytest.mark.parametrize("prompts", [EVEN, UNEVEN], ids=["even", "padded"])
@pytest.mark.parametrize(
    "sampling", [FREE, Sampling(0.7, 1.0, 0, 8), Sampling(1.5, 0.9, 6, 3)], ids=["free", "cool", "filtered"]
)
def test_logprobs_are_those_of_a_plain_forward(engine, module, prompts, sampling) -> None:
    groups = engine.generate(prompts, 6, sampling, seed=3)
    assert [len(group) for group in groups] == [6] * len(prompts)
    for prompt, group in zip(prompts, groups, strict=True):
        for answer in group:
            expected = plain_logprobs(module, prompt, answer, sampling)
            np.testing.assert_allclose(np.frombuffer(answer.logprobs, "<f4"), expected, atol=1e-4, rtol=0)


def test_another_architecture_with_shared_heads_agrees_too() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    module = LlamaForCausalLM(config).eval()
    engine = TransformersEngine(module, (1, 7), 0)
    engine._version = factories.BASE  # its fresh weights
    prompts = [list(range(5, 5 + length)) for length in (3, 9, 4)]
    for prompt, group in zip(prompts, engine.generate(prompts, 4, Sampling(1.0, 1.0, 0, 30), seed=1), strict=True):
        for answer in group:
            expected = plain_logprobs(module, prompt, answer, FREE)
            np.testing.assert_allclose(np.frombuffer(answer.logprobs, "<f4"), expected, atol=1e-4, rtol=0)


def test_answers_end_with_their_end_token_or_at_the_limit(engine) -> None:
    answers = [answer for group in engine.generate(UNEVEN, 40, Sampling(2.0, 1.0, 0, 4), seed=1) for answer in group]
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for answer in answers:
        assert END_ID not in answer.token_ids[:-1]
        assert (answer.token_ids[-1] == END_ID) == (answer.finish_reason == "stop")
        assert answer.finish_reason == "stop" or len(answer.token_ids) == 4
        assert [(part.version, part.num_tokens) for part in answer.segments] == [(0, len(answer.token_ids))]


def test_a_seed_gives_one_result(engine) -> None:
    first = engine.generate(UNEVEN, 8, FREE, seed=11)
    assert engine.generate(UNEVEN, 8, FREE, seed=11) == first
    assert engine.generate(UNEVEN, 8, FREE, seed=12) != first


def test_small_batches_keep_the_order_of_prompts(module) -> None:
    small = TransformersEngine(module, TOKENIZER.stop_ids, PAD_ID, max_batch_tokens=1)
    small.load(WEIGHTS, factories.BASE)
    sharp = Sampling(0.01, 1.0, 0, 8)
    texts = ["50+50=", "9+9=", "12+34=", "80+11="]
    prompts = [TOKENIZER.encode_prompt(text) for text in texts]
    sampled = [TOKENIZER.decode(group[0].token_ids) for group in small.generate(prompts, 2, sharp, seed=0)]
    assert (sampled[0], sampled[2], sampled[3]) == ("001", "64", "19")


def test_samples_follow_the_distribution_they_report(engine, module) -> None:
    (answers,) = engine.generate([EVEN[0]], 4000, Sampling(2.0, 1.0, 0, 1), seed=2)
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([EVEN[0]]), use_cache=False).logits[0, -1:]
    expected = filtered_logprobs(logits, Sampling(2.0, 1.0, 0, 1)).exp()[0].numpy()
    drawn = np.bincount([answer.token_ids[0] for answer in answers], minlength=len(expected)) / 4000
    np.testing.assert_allclose(drawn, expected, atol=5 * 0.5 / 4000**0.5)


def test_filters_keep_the_most_likely() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    assert filtered_logprobs(logits, Sampling(1.0, 1.0, 2, 1)).exp()[0].tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert filtered_logprobs(logits, Sampling(1.0, 0.7, 0, 1)).exp()[0].tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert filtered_logprobs(logits, Sampling(1.0, 0.01, 0, 1)).exp()[0].tolist() == pytest.approx([1, 0, 0, 0])


def test_a_bad_file_keeps_the_old_weights(engine, tmp_path: Path) -> None:
    before = engine.generate(EVEN, 4, FREE, seed=0)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(WEIGHTS.read_bytes()[:-100])
    for path in (broken, tmp_path / "missing.safetensors"):
        with pytest.raises(EngineError, match="can't load"):
            engine.load(path, factories.version(4))
    assert engine.version == factories.BASE
    assert engine.generate(EVEN, 4, FREE, seed=0) == before


def test_other_weights_are_used_once_loaded(tmp_path: Path) -> None:
    module = load_module("builtin:addition", tmp_path, torch.float32)
    engine = TransformersEngine(module, TOKENIZER.stop_ids, PAD_ID)
    with pytest.raises(EngineError, match="no weights"):
        engine.generate(EVEN, 1, FREE, seed=0)
    engine.load(WEIGHTS, factories.BASE)
    before = engine.generate(EVEN, 4, FREE, seed=0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.25)
    write_state(module, tmp_path / "next.safetensors")
    engine.load(tmp_path / "next.safetensors", factories.version(1))
    assert engine.version == factories.version(1)
    assert engine.generate(EVEN, 4, FREE, seed=0) != before


@pytest.mark.parametrize("prompts", [[[99999]], [[]]], ids=["no such token", "empty"])
def test_what_can_not_be_generated_is_an_engine_error(engine, prompts) -> None:
    with pytest.raises(EngineError):
        engine.generate(prompts, 2, FREE, seed=0)


def test_weights_that_are_no_numbers_are_an_engine_error(tmp_path: Path) -> None:
    module = load_module("builtin:addition", tmp_path, torch.float32)
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))
    write_state(module, tmp_path / "nan.safetensors")
    engine = TransformersEngine(module, TOKENIZER.stop_ids, PAD_ID)
    engine.load(tmp_path / "nan.safetensors", factories.version(1))
    with pytest.raises(EngineError):
        engine.generate(EVEN, 2, FREE, seed=0)
