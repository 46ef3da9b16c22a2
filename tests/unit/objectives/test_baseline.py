"""The baseline against brute force, and the theory of its variance on a policy small enough to enumerate."""

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.objectives import Batch
from p2prl.objectives.baseline import least_variance_advantage
from tests.batches import draw


def brute(size: torch.Tensor, reward: torch.Tensor, skip: int | None) -> float:
    rows = [row for row in range(len(size)) if row != skip]
    top = max((float(size[row]) for row in rows), default=0.0)
    if not top > 0:
        return float(reward.mean())
    shares = [(float(size[row]) / top) ** 2 for row in rows]
    return sum(share * float(reward[row]) for share, row in zip(shares, rows, strict=True)) / sum(shares)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.booleans(), st.booleans(), st.floats(0, 40))
def test_it_is_the_weighted_mean_of_each_group(seed: int, alone: bool, length_norm: bool, spread: float) -> None:
    batch, _ = draw(seed)
    source = torch.Generator().manual_seed(seed)
    omega = torch.exp(spread * torch.randn(12, generator=source, dtype=torch.float64))
    prepared = replace(batch, reward=torch.rand(12, generator=source, dtype=torch.float64)).prepare()
    found = least_variance_advantage(prepared, omega, leave_one_out=alone, length_norm=length_norm)
    assert prepared.score_norm is not None
    size = omega * prepared.score_norm / (prepared.length if length_norm else 1)
    for number in range(3):
        rows = ((prepared.group == number) & prepared.live).nonzero().flatten().tolist()
        for place, row in enumerate(rows):
            wanted = brute(size[rows], prepared.reward[rows], place if alone else None)
            value = 0.0 if len(rows) == 1 else float(prepared.reward[row]) - wanted
            assert float(found[row]) == pytest.approx(value, abs=1e-9)


@pytest.mark.parametrize("scale", [1e-200, 1e-30, 1e30, 1e200])
def test_neither_tiny_nor_huge_scores_are_lost(scale: float) -> None:
    batch, _ = draw(3)
    prepared = batch.prepare()
    assert prepared.score_norm is not None
    omega = torch.rand(12, dtype=torch.float64)
    for alone in (False, True):
        usual = least_variance_advantage(prepared, omega, leave_one_out=alone)
        scaled = replace(prepared, score_norm=prepared.score_norm * scale)
        torch.testing.assert_close(least_variance_advantage(scaled, omega, leave_one_out=alone), usual)


def test_left_out_answers_do_not_choose_their_own_baseline() -> None:
    batch, _ = draw(4)
    batch = replace(batch, mask=torch.ones_like(batch.mask), reward=torch.rand(12, dtype=torch.float64))
    omega = torch.ones(12, dtype=torch.float64)
    before = batch.reward - least_variance_advantage(batch.prepare(), omega, leave_one_out=True)
    moved = batch.reward.clone()
    moved[5] += 10
    after = moved - least_variance_advantage(replace(batch, reward=moved).prepare(), omega, leave_one_out=True)
    torch.testing.assert_close(after[5], before[5])
    assert not torch.isclose(after[4], before[4])


class Enumerable:
    """Answers of one to three tokens, each "go on" or "stop", under a policy and a sampler with a logit each place."""

    def __init__(self, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        self.policy = torch.randn(7, generator=source, dtype=torch.float64).requires_grad_()
        self.sampler = torch.randn(7, generator=source, dtype=torch.float64) * 0.7 + self.policy.detach()
        self.answers = [()]
        done = []
        for _ in range(2):
            grown = [(*answer, token) for answer in self.answers for token in (0, 1)]
            done += [answer for answer in grown if answer[-1] == 1]
            self.answers = [answer for answer in grown if answer[-1] == 0]
        self.answers = done + [(*answer, token) for answer in self.answers for token in (0, 1)]
        self.reward = torch.rand(len(self.answers), generator=source, dtype=torch.float64)

    def log_prob(self, logits: torch.Tensor, answer: tuple[int, ...]) -> list[torch.Tensor]:
        """Of each token; the logit depends on what came before."""
        result = []
        for place, token in enumerate(answer):
            before = int("1" + "".join(map(str, answer[:place])), 2) - 1
            value = torch.nn.functional.logsigmoid(logits[before] if token else -logits[before])
            result.append(value)
        return result

    def batch(self) -> tuple[Batch, torch.Tensor, torch.Tensor]:
        """Every answer once; scores [A, 7]; log ratios [A]."""
        longest = max(map(len, self.answers))
        q = torch.zeros(len(self.answers), longest, dtype=torch.float64)
        scores, ratios = [], []
        for row, answer in enumerate(self.answers):
            q[row, : len(answer)] = torch.stack(self.log_prob(self.sampler, answer))
            total = torch.stack(self.log_prob(self.policy, answer)).sum()
            scores.append(torch.autograd.grad(total, self.policy)[0])
            ratios.append(total.detach() - q[row].sum())
        score = torch.stack(scores)
        batch = Batch(
            group=torch.zeros(len(q), dtype=torch.long),
            mask=torch.arange(longest) < torch.tensor([len(answer) for answer in self.answers])[:, None],
            behavior_logp=q,
            reward=self.reward,
            age=torch.zeros(len(q), longest, dtype=torch.long),
            score_norm=score.norm(dim=1),
        )
        return batch.prepare(), score, torch.stack(ratios)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("cap", "length_norm"), list(itertools.product([None, 1.1], [False, True])))
def test_what_another_constant_costs_is_quadratic(seed: int, cap: float | None, length_norm: bool) -> None:
    batch, score, ratio = Enumerable(seed).batch()
    chance = batch.behavior_logp.sum(1).exp()
    assert float(chance.sum()) == pytest.approx(1)
    assert len({int(length) for length in batch.length}) > 1
    omega = ratio.exp() if cap is None else ratio.exp().clamp(max=cap)
    if length_norm:
        score = score / batch.length[:, None]
    # Population: an answer counts with its chance, which the weight can carry as its square root.
    advantage = least_variance_advantage(batch, omega * chance.sqrt(), length_norm=length_norm)
    best = float((batch.reward - advantage)[0])
    size = (chance * omega.square() * score.square().sum(1)).sum()

    def moments(constant: float) -> tuple[torch.Tensor, torch.Tensor]:
        each = omega[:, None] * (batch.reward - constant)[:, None] * score
        second = (chance * each.square().sum(1)).sum()
        return second, second - (chance[:, None] * each).sum(0).square().sum()

    for constant in (best - 1.0, best - 0.1, best, best + 0.3, 0.0):
        excess = size * (constant - best) ** 2
        torch.testing.assert_close(moments(constant)[0] - moments(best)[0], excess, atol=1e-12, rtol=1e-9)
        if cap is None and not length_norm:  # E[omega score] = 0: the mean does not move with the constant
            torch.testing.assert_close(moments(constant)[1] - moments(best)[1], excess, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_without_cap_or_mean_the_weighted_score_has_mean_0(seed: int) -> None:
    batch, score, ratio = Enumerable(seed).batch()
    mean = (batch.behavior_logp.sum(1).exp()[:, None] * ratio.exp()[:, None] * score).sum(0)
    torch.testing.assert_close(mean, torch.zeros_like(mean), atol=1e-12, rtol=0)


def test_the_weight_twice_can_cost_more_than_the_plain_mean() -> None:
    """What the authors' code computes (W = omega^4). By the identity above the cost is the distance to the best."""
    worse = 0
    for seed in range(40):
        batch, _, ratio = Enumerable(seed).batch()
        chance, omega = batch.behavior_logp.sum(1).exp(), ratio.exp()
        once, twice = (
            float((batch.reward - least_variance_advantage(batch, weight * chance.sqrt(), length_norm=False))[0])
            for weight in (omega, omega.square())
        )
        worse += abs(twice - once) > abs(float((chance * batch.reward).sum()) - once)
    assert worse > 0
