"""An engine's recorded log-probs beside those of the learner's forward on the same weights.

In: prompts, completions with their log-probs, sampling. Out: `rollout.Agreement`s per learner precision and length.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from p2prl.bench.rollout import Agreement
from p2prl.learner.policy import Policy
from p2prl.objectives.ess import EssState
from p2prl.recipe import Recipe
from p2prl.records import Completion, Sampling

COMPUTES = ("float32", "bfloat16")


def agreements(
    recipe: Recipe,
    cache: Path,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[Completion]],
    sampling: Sampling,
    lengths: Sequence[int],
) -> tuple[Agreement, ...]:
    """Per answer and token the learner's log-prob less the engine's, at age 0."""
    found = []
    longest = max(len(answer.token_ids) for answers in completions for answer in answers)
    kept = [length for number, length in enumerate(lengths) if number == 0 or lengths[number - 1] < longest]
    for compute in COMPUTES:
        learner = recipe.learner.model_copy(update={"compute": compute})
        policy = Policy.load(recipe.model_copy(update={"learner": learner}), cache)
        differences = [
            _differences(policy, prompt, answer, sampling.temperature)
            for prompt, answers in zip(prompts, completions, strict=True)
            for answer in answers
        ]
        found += [_agreement(compute, length, [each[:length] for each in differences]) for length in kept]
        del policy
    return tuple(found)


def _differences(policy: Policy, prompt: Sequence[int], answer: Completion, temperature: float) -> Tensor:
    ids = torch.tensor([[*prompt, *answer.token_ids]])
    positions = torch.arange(len(prompt), ids.shape[1])
    with torch.no_grad():
        logits = policy.answer_logits(ids, torch.zeros_like(positions), positions)
        logprobs = torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    recorded = torch.frombuffer(bytearray(answer.logprobs), dtype=torch.float32)
    return logprobs.double() - recorded.double()


def _agreement(compute: str, length: int, differences: Sequence[Tensor]) -> Agreement:
    every = torch.cat(list(differences)).abs()
    rho = EssState.of(torch.stack([each.sum() for each in differences])).rho
    return Agreement(compute, length, every.mean().item(), every.max().item(), rho, len(every))
