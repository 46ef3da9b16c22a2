import math
import struct

import pytest

from p2prl.bench.rollout import MODELS, Agreement, Measured, Pair, figures
from p2prl.bench.rollout_run import Bench
from p2prl.bench.rollout_score import agreements
from p2prl.models.char_tokenizer import END_ID, PAD_ID, CharTokenizer
from p2prl.models.load import load_module, prepare
from p2prl.recipe import find
from p2prl.records import Sampling, Version
from p2prl.rollout.transformers_engine import TransformersEngine

AGREED = Agreement("float32", 16, 1e-7, 1e-6, 0.9999, 100)


def measured(lost: int = 0) -> Measured:
    pairs = tuple(Pair(ours, ours + 0.5, 100.0, 100.0) for ours in (96.0, 98.0, 99.0))
    return Measured("x", pairs, (0.5,), (1.0,), lost, 10**9, (AGREED,), "the plan")


def test_figures_say_what_was_reached() -> None:
    found = {figure.name: figure for figure in figures(MODELS["smollm2"], {"transformers_float32": measured()})}
    assert found["transformers_float32_speed"].value == 98.0 and found["transformers_float32_speed"].met
    assert found["transformers_float32_speed"].details["cpu_percent_of_bare"] == 98.5
    assert found["transformers_float32_ess_float32_16"].met
    assert found["transformers_float32_load"].met is None
    vllm = {figure.name: figure for figure in figures(MODELS["smollm2"], {"vllm_bfloat16": measured(lost=1)})}
    assert vllm["vllm_bfloat16_load"].met
    assert vllm["vllm_bfloat16_load_in_answer"].met is False  # an answer was lost
    assert vllm["vllm_bfloat16_ess_float32_16"].met is None


def test_the_engine_agrees_with_the_learner_and_a_wrong_log_prob_shows(tmp_path) -> None:
    import msgspec
    import torch

    recipe, _ = find("addition")
    tokenizer, files = CharTokenizer(), prepare("builtin:addition", tmp_path, lambda _: None)
    engine = TransformersEngine(load_module("builtin:addition", tmp_path, torch.float32), (END_ID,), PAD_ID)
    engine.load(files.weights, Version(0, 0, files.hash))
    prompts = [tokenizer.encode_prompt(text) for text in ("12+34=", "9+9=")]
    sampling = Sampling(1.0, 1.0, 0, 8)
    drawn = engine.generate(prompts, 8, sampling, 1).completions
    exact, *_, low = agreements(recipe, tmp_path, prompts, drawn, sampling, (16, 64))
    assert (exact.learner, exact.length, low.learner) == ("float32", 16, "bfloat16")
    assert exact.ess_ratio == pytest.approx(1.0, abs=1e-4) and exact.max_difference < 1e-4
    assert exact.mean_difference < low.mean_difference < 0.1
    first = drawn[0][0]
    values = struct.unpack(f"<{len(first.token_ids)}f", first.logprobs)
    lower = struct.pack(f"<{len(values)}f", values[0] - 1.0, *values[1:])
    drawn[0][0] = msgspec.structs.replace(first, logprobs=lower)
    wrong, *_ = agreements(recipe, tmp_path, prompts, drawn, sampling, (16,))
    assert wrong.max_difference == pytest.approx(1.0, abs=1e-3)
    weights = [math.e, *[1.0] * 15]
    assert wrong.ess_ratio == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights) / 16, abs=1e-3)


async def test_what_an_engines_libraries_print_is_no_part_of_the_report(tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('noise of a library', flush=True)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    recipe, _ = find("addition")
    plan = MODELS["builtin"]
    bench = Bench(plan, recipe, tmp_path, prepare("builtin:addition", tmp_path, lambda _: None))
    try:
        await bench.start()
        ours, cpu = await bench.timed(bench.bare(bench.batches(0, 2)))
    finally:
        await bench.engine.stop()
    assert ours > 0 and cpu > 0
    output, messages = capfd.readouterr()
    assert output == "" and "noise of a library" in messages
