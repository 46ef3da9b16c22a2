import pytest
import torch

from p2prl.learner import shared_prompt
from p2prl.learner.policy import Policy

VOCABULARY = 16  # the built-in policy's alphabet is larger


@pytest.fixture
def answers():
    """Three prompts of 40, 41 and 44 tokens with four answers each: ids [B, T], rows and positions of the answers."""
    source = torch.Generator().manual_seed(4)
    rows = []
    for length in (40, 41, 44):
        prompt = torch.randint(1, VOCABULARY, (length,), generator=source)
        for number in range(4):
            answer = torch.randint(1, VOCABULARY, (2 + number,), generator=source)
            rows.append((length, torch.cat([prompt, answer])))
    ids = torch.zeros(len(rows), max(len(row) for _, row in rows), dtype=torch.long)
    places = []
    for number, (length, row) in enumerate(rows):
        ids[number, : len(row)] = row
        places += [(number, position) for position in range(length, len(row))]
    row, position = torch.tensor(places).T
    return ids, row, position


def _loss_and_gradient(policy: Policy, answers) -> tuple[torch.Tensor, torch.Tensor]:
    ids, rows, positions = answers
    policy.zero_gradient()
    logits = policy.answer_logits(ids, rows, positions)
    logp = torch.log_softmax(logits, -1).gather(1, ids[rows, positions, None])
    (logp * torch.linspace(-1, 1, len(logp))[:, None]).sum().backward()
    return logits.detach(), torch.cat([value.flatten() for value in policy.take_gradient()])


def test_values_and_gradients_are_those_of_whole_rows(policy, answers) -> None:
    logits, gradient = _loss_and_gradient(policy, answers)
    policy.shares_prompts = False
    whole, expected = _loss_and_gradient(policy, answers)
    torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
    assert (gradient - expected).norm() < 1e-4 * expected.norm()
    assert expected.norm() > 0


def test_a_prompt_is_run_once(policy, answers) -> None:
    seen: list[int] = []
    policy.module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    _loss_and_gradient(policy, answers)
    whole = answers[0].numel()
    assert sum(seen) < whole / 2
    seen.clear()
    policy.shares_prompts = False
    _loss_and_gradient(policy, answers)
    assert len(seen) == 1


def test_short_or_different_prompts_are_not_shared() -> None:
    assert shared_prompt.distinct_prompts(torch.ones(8, 20, dtype=torch.long), 5) is None
    different = torch.arange(8 * 40).reshape(8, 40)
    assert shared_prompt.distinct_prompts(different, 30) is None
    distinct, number = shared_prompt.distinct_prompts(torch.ones(8, 40, dtype=torch.long), 30) or pytest.fail("shared")
    assert (len(distinct), number.tolist()) == (1, [0] * 8)
