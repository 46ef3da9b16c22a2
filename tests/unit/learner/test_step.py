import msgspec
import numpy as np
import pytest
import torch

from p2prl.learner.collate import collate
from p2prl.learner.committee import merge
from p2prl.learner.learner_process import by_group
from p2prl.learner.objective_options import objective_options
from p2prl.learner.policy import Policy
from p2prl.learner.step import apply_part, compute_part, measure_rho_on
from p2prl.recipe import Recipe


def train(policy: Policy, recipe: Recipe, step):
    part = merge([compute_part(policy, collate(step, recipe.learner.max_age), recipe)])
    return apply_part(policy, part, recipe, step.rho_on)


def small_batches(recipe: Recipe, tokens: int) -> Recipe:
    return recipe.model_copy(update={"learner": recipe.learner.model_copy(update={"micro_batch_tokens": tokens})})


def test_fresh_answers_are_on_policy(policy, recipe, tools) -> None:
    step = train(policy, recipe, tools.make_step(policy, 8, 1, rho_on=0.0))
    assert step.metrics["ess_ratio"] > 0.999
    assert step.metrics["kl"] < 1e-6
    assert step.rho_on > 0.999
    assert step.metrics["lr"] == pytest.approx(recipe.learner.learning_rate)


def test_it_learns(policy, recipe, tools) -> None:
    """15 steps from the warm start, reward about .75: it must rise, and every step must change the weights."""
    rewards = []
    for number in range(15):
        before = {name: master.clone() for name, master in policy.masters.items()}
        step = train(policy, recipe, tools.make_step(policy, 32, number))
        rewards.append(step.metrics["reward_mean"])
        assert step.skipped == ""
        assert any(not torch.equal(before[name], master) for name, master in policy.masters.items())
    early, late = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
    assert late > early + 0.02


def test_micro_batches_and_members_make_the_same_gradient(policy, recipe, tools) -> None:
    step = tools.make_step(policy, 6, 2)
    whole = compute_part(policy, collate(step, 64), recipe)
    cut = compute_part(policy, collate(step, 64), small_batches(recipe, 64))
    halves = [
        msgspec.structs.replace(step, groups=step.groups[rows], group_ids=step.group_ids[rows], ages=step.ages[rows])
        for rows in (slice(0, 2), slice(2, 6))
    ]
    merged = merge([compute_part(policy, collate(half, 64), recipe) for half in halves])
    for other in (cut, merged):
        assert (other.num_answers, other.num_tokens, other.num_groups) == (48, whole.num_tokens, 6)
        assert other.ess.rho == pytest.approx(whole.ess.rho)
        assert other.sums["loss"] == pytest.approx(whole.sums["loss"], abs=1e-5)
        for mine, theirs in zip(other.gradient, whole.gradient, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_the_module_always_holds_the_rounding_of_the_masters(policy, recipe, tools) -> None:
    train(policy, recipe, tools.make_step(policy, 4, 3))
    for name, parameter in policy.module.named_parameters():
        assert torch.equal(parameter.detach(), policy.masters[name].bfloat16().float())
    assert any(not torch.equal(master, master.bfloat16().float()) for master in policy.masters.values())


def test_a_bad_answer_does_not_stop_the_step(policy, recipe, tools) -> None:
    step = tools.with_reward(tools.make_step(policy, 4, 4), 0, 0, float("nan"))
    done = train(policy, recipe, step)
    assert done.skipped == ""
    assert done.metrics["answers"] == 31
    assert done.metrics["dropped_answers"] == 1


@pytest.mark.parametrize("name", ["gepo", "gepo_vcpo"])
def test_each_groups_log_ratios_are_told_whatever_the_micro_batches(policy, recipe, tools, name: str) -> None:
    """Those of the group whose maker lowered what it claims, by how much it did."""
    objective = recipe.objective.model_copy(update={"name": name})
    step = tools.make_step(policy, 4, 7)
    claims = step.groups[2].trajectories[3].completion
    lowered = np.frombuffer(claims.logprobs, "<f4") - 4.0
    lying = msgspec.structs.replace(claims, logprobs=lowered.astype("<f4").tobytes())
    changed = list(step.groups[2].trajectories)
    changed[3] = msgspec.structs.replace(changed[3], completion=lying)
    groups = list(step.groups)
    groups[2] = msgspec.structs.replace(groups[2], trajectories=tuple(changed))
    rows = collate(msgspec.structs.replace(step, groups=tuple(groups)), recipe.learner.max_age)
    part = compute_part(policy, rows, small_batches(recipe.model_copy(update={"objective": objective}), 64))
    told = by_group(part, 4)
    assert [len(ratios) for ratios in told] == [8] * 4
    for number, ratios in enumerate(told):
        expected = [4.0 * len(lowered)] if number == 2 else [0.0]
        assert sorted(ratios)[-1:] == pytest.approx(expected, abs=1e-3)
        assert sorted(ratios)[:-1] == pytest.approx([0.0] * 7, abs=1e-3)


def test_too_old_tokens_skip_the_step(policy, recipe, tools) -> None:
    before = {name: master.clone() for name, master in policy.masters.items()}
    done = train(policy, recipe, tools.make_step(policy, 2, 5, age=recipe.learner.max_age + 1))
    assert "none of its groups" in done.skipped
    assert done.metrics["skipped"] == 1.0
    assert all(torch.equal(before[name], master) for name, master in policy.masters.items())


def test_a_broken_gradient_skips_the_step_and_leaves_the_weights(policy, recipe, tools) -> None:
    step = tools.make_step(policy, 2, 6)
    part = compute_part(policy, collate(step, 64), recipe)
    part.gradient[0].view(-1)[0] = float("inf")
    before = {name: master.clone() for name, master in policy.masters.items()}
    done = apply_part(policy, part, recipe, 1.0)
    assert "gradient" in done.skipped and done.metrics["skipped"] == 1.0
    assert all(torch.equal(before[name], master) for name, master in policy.masters.items())


def test_broken_weights_skip_the_step(policy, recipe, tools) -> None:
    step = tools.make_step(policy, 2, 7)
    with torch.no_grad():
        next(policy.module.parameters()).fill_(float("nan"))
    done = train(policy, recipe, step)
    assert "not finite" in done.skipped


@pytest.mark.parametrize(("power", "multiplier"), [(0.5, 0.5), (1.0, 0.25)])
def test_stale_answers_take_a_smaller_step(policy, recipe, tools, power: float, multiplier: float) -> None:
    recipe = recipe.model_copy(update={"objective": recipe.objective.model_copy(update={"step_power": power})})
    done = train(policy, recipe, tools.make_step(policy, 4, 8, rho_on=4.0))
    assert done.metrics["lr_multiplier"] == pytest.approx(multiplier, abs=1e-3)
    assert done.metrics["lr"] == pytest.approx(recipe.learner.learning_rate * multiplier, rel=1e-2)
    assert policy.optimiser.param_groups[0]["lr"] == recipe.learner.learning_rate


def test_equal_rewards_give_no_gradient(policy, recipe, tools) -> None:
    step = tools.make_step(policy, 1, 9)
    for answer in range(8):
        step = tools.with_reward(step, 0, answer, 0.1)
    part = compute_part(policy, collate(step, 64), recipe)
    assert all(not value.any() for value in part.gradient)
    assert part.sums["equal_reward_groups"] == 1


def test_an_objective_gets_only_the_options_it_takes(recipe) -> None:
    both = recipe.objective
    assert objective_options(both) == {"clip": 0.2, "baseline": "mean"}
    assert objective_options(both.model_copy(update={"name": "gepo"})) == {"clip": 0.2}


def test_rho_on_is_measured_on_all_the_fresh_answers_at_hand(policy, recipe, tools) -> None:
    """Of the step and of those that wait, as if they were one batch; a rho is never averaged."""
    whole = tools.make_step(policy, 5, 8, rho_on=0.0)
    with torch.no_grad():  # as if learner and engine disagreed
        next(policy.module.parameters()).mul_(1.1)
    expected = compute_part(policy, collate(whole, 64), recipe).ess.rho
    step = msgspec.structs.replace(
        whole, groups=whole.groups[:2], group_ids=whole.group_ids[:2], ages=whole.ages[:2], fresh=whole.groups[2:]
    )
    part = compute_part(policy, collate(step, 64), small_batches(recipe, 64))
    found = measure_rho_on(policy, part, step, small_batches(recipe, 64))
    assert found == pytest.approx(expected, rel=1e-4)
    assert found < 0.999 and found != pytest.approx(part.ess.rho, rel=1e-3)
    alone = msgspec.structs.replace(step, fresh=())
    assert measure_rho_on(policy, part, alone, recipe) == part.ess.rho


def test_rho_on_without_a_usable_answer_is_not_measured(policy, recipe, tools) -> None:
    step = tools.make_step(policy, 2, 5, age=recipe.learner.max_age + 1, rho_on=0.0)
    part = compute_part(policy, collate(step, recipe.learner.max_age), recipe)
    assert measure_rho_on(policy, part, step, recipe) == 0.0
