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
from p2prl.models.lora import find_targets
from p2prl.models.lora_rule import Lora
from p2prl.models.stop_strings import StopStrings
from p2prl.models.tensors import load_into, write_state, write_tensors
from p2prl.records import Completion, Sampling
from p2prl.rollout.decoding import filtered_logprobs
from p2prl.rollout.transformers_engine import TransformersEngine
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
    groups = engine.generate(prompts, 6, sampling, seed=3).completions
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
    for prompt, group in zip(
        prompts, engine.generate(prompts, 4, Sampling(1.0, 1.0, 0, 30), seed=1).completions, strict=True
    ):
        for answer in group:
            expected = plain_logprobs(module, prompt, answer, FREE)
            np.testing.assert_allclose(np.frombuffer(answer.logprobs, "<f4"), expected, atol=1e-4, rtol=0)


def test_answers_end_with_their_end_token_or_at_the_limit(engine) -> None:
    answers = [
        answer
        for group in engine.generate(UNEVEN, 40, Sampling(2.0, 1.0, 0, 4), seed=1).completions
        for answer in group
    ]
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for answer in answers:
        assert END_ID not in answer.token_ids[:-1]
        assert (answer.token_ids[-1] == END_ID) == (answer.finish_reason == "stop")
        assert answer.finish_reason == "stop" or len(answer.token_ids) == 4
        assert [(part.version, part.num_tokens) for part in answer.segments] == [(0, len(answer.token_ids))]


def test_a_seed_gives_one_result(engine) -> None:
    first = engine.generate(UNEVEN, 8, FREE, seed=11).completions
    assert engine.generate(UNEVEN, 8, FREE, seed=11).completions == first
    assert engine.generate(UNEVEN, 8, FREE, seed=12).completions != first


def test_small_batches_keep_the_order_of_prompts(module) -> None:
    small = TransformersEngine(module, TOKENIZER.stop_ids, PAD_ID, batch_tokens=1)
    small.load(WEIGHTS, factories.BASE)
    sharp = Sampling(0.01, 1.0, 0, 8)
    texts = ["50+50=", "9+9=", "12+34=", "80+11="]
    prompts = [TOKENIZER.encode_prompt(text) for text in texts]
    sampled = [TOKENIZER.decode(group[0].token_ids) for group in small.generate(prompts, 2, sharp, seed=0).completions]
    assert (sampled[0], sampled[2], sampled[3]) == ("001", "64", "19")


def test_samples_follow_the_distribution_they_report(engine, module) -> None:
    (answers,) = engine.generate([EVEN[0]], 4000, Sampling(2.0, 1.0, 0, 1), seed=2).completions
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
    before = engine.generate(EVEN, 4, FREE, seed=0).completions
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(WEIGHTS.read_bytes()[:-100])
    for path in (broken, tmp_path / "missing.safetensors"):
        with pytest.raises(EngineError, match="can't load"):
            engine.load(path, factories.version(4))
    assert engine.version == factories.BASE
    assert engine.generate(EVEN, 4, FREE, seed=0).completions == before


def test_other_weights_are_used_once_loaded(tmp_path: Path) -> None:
    module = load_module("builtin:addition", tmp_path, torch.float32)
    engine = TransformersEngine(module, TOKENIZER.stop_ids, PAD_ID)
    with pytest.raises(EngineError, match="no weights"):
        engine.generate(EVEN, 1, FREE, seed=0)
    engine.load(WEIGHTS, factories.BASE)
    before = engine.generate(EVEN, 4, FREE, seed=0).completions
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.25)
    write_state(module, tmp_path / "next.safetensors")
    engine.load(tmp_path / "next.safetensors", factories.version(1))
    assert engine.version == factories.version(1)
    assert engine.generate(EVEN, 4, FREE, seed=0).completions != before


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


LORA = Lora(2, 4.0, ("q_proj", "up_proj"))


def adapters(module: torch.nn.Module, rank: int = 2) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(5)
    found = {}
    for name, target in find_targets(module, LORA.targets).items():
        found[f"{name}.lora_a"] = torch.randn(rank, target.num_inputs, generator=source)
        found[f"{name}.lora_b"] = torch.randn(target.num_outputs, rank, generator=source)
    return found


def test_adapters_are_added_to_the_base_and_bad_ones_keep_the_old_weights(tmp_path: Path) -> None:
    module = load_module("builtin:addition", tmp_path, torch.float32)
    engine = TransformersEngine(module, TOKENIZER.stop_ids, PAD_ID, lora=LORA)
    engine.load(WEIGHTS, factories.BASE)
    base = engine.generate(EVEN, 4, FREE, seed=0).completions
    good, bad = adapters(module), tmp_path / "bad"
    write_tensors(good, tmp_path / "good")
    engine.load(tmp_path / "good", factories.version(1))
    adapted = engine.generate(EVEN, 4, FREE, seed=0).completions
    assert adapted != base and engine.version == factories.version(1)
    name = next(iter(good))
    lacking = {key: value for key, value in good.items() if key != name}
    for tensors in (adapters(module, rank=3), lacking, good | {name: good[name] * float("nan")}):
        write_tensors(tensors, bad)
        with pytest.raises(EngineError, match="can't load .* adapters"):
            engine.load(bad, factories.version(2))
    with pytest.raises(EngineError, match="adapters are of another recipe"):  # whole weights that are no version 0
        engine.load(WEIGHTS, factories.version(2))
    assert engine.version == factories.version(1)
    assert engine.generate(EVEN, 4, FREE, seed=0).completions == adapted
    engine.load(WEIGHTS, factories.BASE)
    assert engine.generate(EVEN, 4, FREE, seed=0).completions == base


def test_an_engine_for_whole_weights_takes_no_adapters(engine, module, tmp_path: Path) -> None:
    write_tensors(adapters(module), tmp_path / "adapters")
    with pytest.raises(EngineError, match="adapters alone"):
        engine.load(tmp_path / "adapters", factories.version(1))
    assert engine.version == factories.BASE


# -- weights that change in mid-answer --------------------------------------------------------------------------------


def random_llama(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


class Changes:
    """A `Between` that loads the next of three versions at the asked steps."""

    def __init__(self, folder: Path, at: dict[int, int]) -> None:
        self.engine = TransformersEngine(random_llama(0), (1, 7), 0)
        self.modules = [random_llama(step) for step in range(3)]
        self._paths = [folder / f"{step}.safetensors" for step in range(3)]
        for module, path in zip(self.modules, self._paths, strict=True):
            write_state(module, path)
            load_into(module, path)  # bf16 values, as the engine has them
        self._at, self._calls = at, 0
        self.load(0)

    def load(self, step: int) -> None:
        self.engine.load(self._paths[step], factories.version(step))

    def __call__(self, may_load: bool) -> None:
        self._calls += may_load
        if may_load and self._calls in self._at:
            self.load(self._at[self._calls])


PROMPTS = [list(range(5, 5 + length)) for length in (3, 9, 4)]


@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:1]], ids=["padded", "even"])
@pytest.mark.parametrize("fill", [1, 8192], ids=["in pieces", "at once"])
def test_each_token_is_drawn_from_the_version_it_is_stamped_with(tmp_path: Path, prompts, fill: int) -> None:
    changes = Changes(tmp_path, {3: 1, 9: 2, 14: 0, 15: 1})
    changes.engine._decoder._fill_positions = fill
    sampling = Sampling(0.8, 0.95, 200, 20)
    completions, versions = changes.engine.generate(prompts, 5, sampling, 1, changes)
    assert versions == (factories.version(0), factories.version(1), factories.version(2))
    longest = 0
    for prompt, group in zip(prompts, completions, strict=True):
        assert len(group) == 5  # none was lost
        for answer in group:
            expected = [plain_logprobs(module, prompt, answer, sampling) for module in changes.modules]
            drawn, first = np.frombuffer(answer.logprobs, "<f4"), 0
            assert sum(part.num_tokens for part in answer.segments) == len(answer.token_ids)
            for part in answer.segments:
                own = slice(first, first + part.num_tokens)
                np.testing.assert_allclose(drawn[own], expected[part.version][own], atol=1e-4, rtol=0)
                first += part.num_tokens
            longest = max(longest, len(answer.token_ids))
            stamped = [part.version for part in answer.segments for _ in range(part.num_tokens)]
            assert stamped == ([0] * 3 + [1] * 6 + [2] * 5 + [0] + [1] * 5)[: len(stamped)]
    assert longest == 20
    other = plain_logprobs(changes.modules[0], prompts[0], completions[0][0], sampling)
    assert not np.allclose(other, np.frombuffer(completions[0][0].logprobs, "<f4"), atol=1e-2)


def test_adapters_change_in_mid_answer_too(tmp_path: Path) -> None:
    module = load_module("builtin:addition", tmp_path, torch.float32)
    engine = TransformersEngine(module, TOKENIZER.stop_ids, PAD_ID, lora=LORA)
    engine.load(WEIGHTS, factories.BASE)
    write_tensors(adapters(module), tmp_path / "adapters")

    def change(may_load: bool) -> None:
        if may_load and engine.version == factories.BASE:
            engine.load(tmp_path / "adapters", factories.version(1))

    completions, versions = engine.generate(EVEN, 4, FREE, 0, change)
    assert versions == (factories.BASE, factories.version(1))
    longer = [(p, a) for p, group in zip(EVEN, completions, strict=True) for a in group if len(a.token_ids) > 1]
    assert longer
    for prompt, answer in longer:
        expected = plain_logprobs(module, prompt, answer, FREE)  # the module has the adapted weights now
        np.testing.assert_allclose(np.frombuffer(answer.logprobs, "<f4")[1:], expected[1:], atol=1e-4, rtol=0)


def test_prompts_that_were_not_begun_before_a_change_are_left(tmp_path: Path) -> None:
    changes = Changes(tmp_path, {2: 1})
    changes.engine.batch_tokens = 1  # a prompt at a time, the shortest first
    completions, versions = changes.engine.generate(PROMPTS, 3, Sampling(1.0, 1.0, 0, 12), 1, changes)
    assert [len(group) for group in completions] == [3, 0, 0]
    assert versions == (factories.version(0), factories.version(1))


def test_no_change_is_taken_in_beyond_what_a_group_can_name(tmp_path: Path) -> None:
    changes = Changes(tmp_path, {})
    asked: list[bool] = []

    def change(may_load: bool) -> None:
        asked.append(may_load)
        if may_load:
            changes.engine.load(tmp_path / "1.safetensors", factories.version(1 + len(asked)))

    completions, versions = changes.engine.generate(PROMPTS[:1], 40, Sampling(1.0, 1.0, 0, 80), 1, change)
    assert len(versions) == 64 and max(len(answer.token_ids) for answer in completions[0]) == 80
    assert asked == [True] * 63 + [False] * 16


def test_where_memory_runs_out_smaller_batches_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Changes(tmp_path, {}).engine
    run, sizes = engine._decoder.run, []

    def starved(prompts, *args):
        sizes.append(len(prompts))
        if len(prompts) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return run(prompts, *args)

    monkeypatch.setattr(engine._decoder, "run", starved)
    before = engine.batch_tokens
    completions, _ = engine.generate(PROMPTS, 2, FREE, 1)
    for prompt, group in zip(PROMPTS, completions, strict=True):
        assert len(group) == 2
        for answer in group:
            expected = plain_logprobs(engine._module, prompt, answer, FREE)
            np.testing.assert_allclose(np.frombuffer(answer.logprobs, "<f4"), expected, atol=1e-4, rtol=0)
    assert engine.batch_tokens < before
    assert sizes[0] == 3 and sizes[-3:] == [1, 1, 1]
    monkeypatch.setattr(engine._decoder, "run", lambda *args: run([[99999]], *args[1:]))
    with pytest.raises(EngineError, match="1 x 2 answers failed"):
        engine.generate(PROMPTS[:1], 2, FREE, 1)


def test_an_answer_ends_with_the_token_that_completes_a_stop_string(module: torch.nn.Module) -> None:
    stops = StopStrings(("11", "7"), TOKENIZER.decode, (END_ID,))
    engine = TransformersEngine(module, TOKENIZER.stop_ids, PAD_ID, stops=stops)
    engine.load(WEIGHTS, factories.BASE)
    hot = Sampling(3.0, 1.0, 0, 8, stops.strings)
    drawn = engine.generate(UNEVEN, 40, hot, seed=3).completions
    ends: set[str] = set()
    for prompt, answers in zip(UNEVEN, drawn, strict=True):
        for answer in answers:
            text = TOKENIZER.decode(answer.token_ids)
            assert stops.ends_as_said(answer.token_ids, answer.finish_reason)
            assert "7" not in text[:-1] and "11" not in text[:-1]
            num_tokens = len(answer.token_ids)
            assert answer.finish_reason == "stop" or num_tokens == 8
            if answer.token_ids[-1] != END_ID:
                ends.add(next((string for string in stops.strings if text.endswith(string)), ""))
        expected = plain_logprobs(module, prompt, answers[0], hot)
        np.testing.assert_allclose(np.frombuffer(answers[0].logprobs, "<f4"), expected, atol=1e-4, rtol=0)
    assert ends == {"11", "7", ""}


def test_stop_strings_other_than_it_was_set_up_for_are_refused(engine: TransformersEngine) -> None:
    with pytest.raises(EngineError, match="stop strings"):
        engine.generate(EVEN, 1, Sampling(1.0, 1.0, 0, 8, ("1",)), seed=3)
