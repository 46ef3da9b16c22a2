import pytest
import torch

from p2prl.environments.addition import Addition
from p2prl.errors import LearnerError
from p2prl.models.builtin import make_builtin
from p2prl.models.warm_start import WarmStart, make_warm_start, sampled_reward

EASY = Addition("p2prl==0", digits=1, max_digit=2)  # nine sums: learnt in a few steps


class Echo:
    """Rewards every answer by its length, so that the sampler's own bounds show."""

    def prompt(self, index: int) -> str:
        return "1+1="

    def answer(self, index: int) -> str:
        return "2"

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        return float(len(answer)), ""


def test_answers_are_at_most_as_long_as_the_right_one_and_its_end() -> None:
    torch.manual_seed(0)
    module = make_builtin()
    mean = sampled_reward(module, Echo(), 0, 1500, seed=0)
    assert 1.0 < mean < 2.0
    assert sampled_reward(module, Echo(), 0, 1500, seed=0) == mean
    assert sampled_reward(module, Echo(), 0, 1500, seed=1) != mean


def test_it_stops_within_tolerance_of_the_target_and_is_bf16() -> None:
    said: list[str] = []
    plan = WarmStart(target=0.5, tolerance=0.1, num_prompts=200, measure_from=0, batch=16, measure_each=2)
    module = make_warm_start(EASY, plan, said.append)
    again = make_warm_start(EASY, plan, lambda _: None)
    for parameter, other in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, parameter.bfloat16().float())
        assert torch.equal(parameter, other)
    assert 0.4 <= sampled_reward(module, EASY, 0, 200, seed=plan.seed) <= 0.6
    assert "sampled reward 0." in said[-1]


def test_after_a_jump_over_the_target_it_goes_back() -> None:
    said: list[str] = []
    plan = WarmStart(target=0.3, tolerance=0.05, num_prompts=200, measure_from=0, batch=16, measure_each=20, lr=3e-3)
    make_warm_start(EASY, plan, said.append)
    rewards = [float(line.rpartition(" ")[2]) for line in said]
    assert any(reward > 0.35 for reward in rewards)
    assert 0.25 <= rewards[-1] <= 0.35


def test_without_success_it_says_so() -> None:
    with pytest.raises(LearnerError, match="try another --seed"):
        make_warm_start(EASY, WarmStart(max_steps=3, num_prompts=10, batch=4), lambda _: None)
