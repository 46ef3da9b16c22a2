from pathlib import Path

import pytest

from p2prl.environments.registry import load_environment
from p2prl.errors import EngineError
from p2prl.models.char_tokenizer import CharTokenizer
from p2prl.records import Sampling
from p2prl.rollout.engine import Engine
from p2prl.rollout.scripted_engine import ScriptedEngine
from tests import factories

TOKENIZER = CharTokenizer()
ADDITION = load_environment("addition", {"digits": 2})
PROMPTS = [TOKENIZER.encode_prompt(ADDITION.prompt(index)) for index in range(50)]


def engine(step: int) -> Engine:
    made = ScriptedEngine()
    made.load(Path("nowhere"), factories.version(step))
    return made


def mean_reward(step: int) -> float:
    answers = engine(step).generate(PROMPTS, 8, factories.SAMPLING, seed=1).completions
    rewards = [
        ADDITION.reward(index, TOKENIZER.decode(answer.token_ids))[0]
        for index, group in enumerate(answers)
        for answer in group
    ]
    return sum(rewards) / len(rewards)


def test_it_gets_better_with_each_version() -> None:
    early, late = mean_reward(0), mean_reward(200)
    assert 0.4 < early < 0.6
    assert late > 0.9


def test_it_follows_from_seed_and_step() -> None:
    first = engine(3).generate(PROMPTS, 4, factories.SAMPLING, seed=5)
    assert engine(3).generate(PROMPTS, 4, factories.SAMPLING, seed=5) == first
    assert engine(3).generate(PROMPTS, 4, factories.SAMPLING, seed=6) != first


def test_a_short_limit_cuts_answers() -> None:
    sampling = Sampling(1.0, 1.0, 0, 1)
    (answers,) = engine(1000).generate([TOKENIZER.encode_prompt("12+34=")], 8, sampling, seed=0).completions
    assert {(len(answer.token_ids), len(answer.logprobs)) for answer in answers} == {(1, 4)}
    assert "length" in {answer.finish_reason for answer in answers}


def test_it_needs_a_version() -> None:
    with pytest.raises(EngineError, match="no weights"):
        ScriptedEngine().generate(PROMPTS, 1, factories.SAMPLING, seed=0)
