"""What is timed is what a learner does; the naive step has the same gradient, or its time would say nothing."""

import json

import msgspec
import pytest
import torch

from p2prl.bench import step_run
from p2prl.bench.step import PLAN, VARIANTS, Measured, Plan
from p2prl.learner.collate import collate
from p2prl.learner.policy import Policy
from p2prl.learner.step import compute_part
from p2prl.recipe import find

TINY = Plan(recipe="addition", num_groups=3, prompt_tokens=20, answer_tokens=6, num_rounds=1, longest_s=60.0)


@pytest.fixture
def policy(tmp_path) -> Policy:
    torch.set_num_threads(1)
    return Policy.load(find("addition")[0], tmp_path / "models")


def test_the_batch_has_the_shape_of_the_plan(policy) -> None:
    rows = collate(step_run.draw(policy, TINY), 64)
    assert rows.ids.shape == (24, 26) and rows.num_dropped == 0
    assert rows.batch.live.all() and rows.batch.mask.all()
    assert sorted(rows.batch.age.unique().tolist()) == [0, 1, 2]
    assert all(len(rows.batch.reward[rows.batch.group == group].unique()) == 2 for group in range(3))


def test_the_naive_step_is_the_same_step(policy) -> None:
    rows = collate(step_run.draw(policy, TINY), 64)
    recipe = step_run.variant_recipe(find("addition")[0], "vcpo")
    batched, naive = compute_part(policy, rows, recipe), step_run.naive_part(policy, rows, recipe)
    assert batched.faults == () and batched.sums["baseline_min_variance"] == 24
    assert naive.ess.rho == pytest.approx(batched.ess.rho, rel=1e-4)
    assert any(value.any() for value in naive.gradient)
    for mine, theirs in zip(naive.gradient, batched.gradient, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


async def test_every_variant_is_timed_and_no_weight_moves(policy, tmp_path) -> None:
    (tmp_path / PLAN).write_bytes(msgspec.json.encode(TINY))
    found = msgspec.convert(json.loads(json.dumps(await step_run.measure(tmp_path))), Measured)
    assert len(found.rounds) == 1 and found.rounds[0].keys() == set(VARIANTS) == found.peak_bytes.keys()
    assert all(value > 0 for value in (*found.rounds[0].values(), *found.peak_bytes.values()))
    assert found.num_tokens == 24 * 26
    step = step_run.draw(policy, TINY)
    before = [parameter.detach().clone() for parameter in policy.module.parameters()]
    for variant in VARIANTS:
        step_run.timed(policy, step, variant, find("addition")[0])
    assert all(torch.equal(mine, now) for mine, now in zip(before, policy.module.parameters(), strict=True))
