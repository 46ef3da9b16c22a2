"""What the environment gave between turns is seen, never learned from: for every objective, and in every figure."""

import struct

import msgspec
import pytest
import torch

from p2prl.learner.collate import collate
from p2prl.learner.logprobs import token_logprobs
from p2prl.learner.step import compute_part
from p2prl.models.char_tokenizer import END_ID
from p2prl.objectives.registry import OBJECTIVES
from p2prl.recipe import Recipe
from p2prl.records import Completion, Segment, StepInput, Trajectory

GIVEN = (4, 9, 3)


def with_turns(step: StepInput, given_logprob: float = 0.0) -> StepInput:
    """Each answer goes on: it is given three tokens, and answers once more as before."""
    groups = []
    for group in step.groups:
        trajectories = []
        for trajectory in group.trajectories:
            old = trajectory.completion
            data = old.logprobs + struct.pack("<3f", *[given_logprob] * 3) + old.logprobs
            segments = (*old.segments, Segment(0, 3, drawn=False), *old.segments)
            made = Completion(old.token_ids + GIVEN + old.token_ids, data, segments, old.finish_reason)
            trajectories.append(Trajectory(made, trajectory.reward))
        groups.append(msgspec.structs.replace(group, trajectories=tuple(trajectories)))
    return msgspec.structs.replace(step, groups=tuple(groups))


def recipe_of(recipe: Recipe, name: str, **over) -> Recipe:
    section = recipe.objective.model_copy(update={"name": name, "options": {}, "prox": "recompute", **over})
    return recipe.model_copy(update={"objective": section})


def part_of(policy, recipe: Recipe, step: StepInput):
    made = compute_part(policy, collate(step, 64), recipe)
    assert made.gradient and not made.faults, made.faults
    return made


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_no_given_log_prob_moves_the_gradient_or_a_figure(policy, tools, recipe: Recipe, name: str) -> None:
    step, chosen = tools.make_step(policy, 3, 7), recipe_of(recipe, name)
    plain = part_of(policy, chosen, with_turns(step))
    other = part_of(policy, chosen, with_turns(step, -7.5))
    for mine, theirs in zip(plain.gradient, other.gradient, strict=True):
        assert torch.equal(mine, theirs)
    assert (plain.sums, plain.maxima, plain.ess, plain.num_tokens) == (
        other.sums,
        other.maxima,
        other.ess,
        other.num_tokens,
    )
    drawn = sum(2 * len(t.completion.token_ids) for group in step.groups for t in group.trajectories)
    assert plain.num_tokens == drawn


@pytest.mark.parametrize("baseline", ["mean", "min_variance"])
def test_the_last_turn_alone_is_learned_as_an_answer_to_all_before_it(
    policy, tools, recipe: Recipe, baseline: str
) -> None:
    """With everything before it in the prompt the gradient is the same: given tokens are context and no more."""
    step = tools.make_step(policy, 2, 3, group_size=4)
    shared = (5, 6, END_ID)  # the same first turn for all, so that it can be a prompt
    as_turns, as_prompt = [], []
    for group in step.groups:
        turns = tuple(_after(each, shared) for each in group.trajectories)
        as_turns.append(msgspec.structs.replace(group, trajectories=turns))
        as_prompt.append(msgspec.structs.replace(group, prompt_ids=(*group.prompt_ids, *shared, *GIVEN)))
    one = msgspec.structs.replace(step, groups=tuple(as_turns))
    other = msgspec.structs.replace(step, groups=tuple(as_prompt))
    chosen = recipe_of(recipe, "gepo_vcpo", baseline=baseline, prox="none")
    first, second = part_of(policy, chosen, one), part_of(policy, chosen, other)
    assert first.num_tokens == second.num_tokens
    for mine, theirs in zip(first.gradient, second.gradient, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def _after(trajectory: Trajectory, shared: tuple[int, ...]) -> Trajectory:
    """The answer as what follows a given beginning of it; none of that beginning was drawn by this policy."""
    old, num = trajectory.completion, len(shared) + len(GIVEN)
    segments = (Segment(0, num, drawn=False), *old.segments)
    made = Completion((*shared, *GIVEN, *old.token_ids), bytes(4 * num) + old.logprobs, segments, old.finish_reason)
    return Trajectory(made, trajectory.reward)


def test_log_probs_are_those_of_tokens_behind_what_was_given(policy, tools) -> None:
    rows = collate(with_turns(tools.make_step(policy, 1, 1, group_size=2)), 64)
    picked = torch.arange(2)
    found = token_logprobs(policy, rows, rows.batch.split(picked), picked)
    assert (found.logp[~rows.batch.mask] == 0).all() and (found.entropy[~rows.batch.mask] == 0).all()
    whole = torch.log_softmax(policy.module(input_ids=rows.ids[:1], use_cache=False).logits.float(), -1)[0]
    begin, num = int(rows.prompt_length[0]), int(rows.length[0])
    right = whole[begin - 1 : num - 1].gather(1, rows.ids[0, begin:num, None])[:, 0]
    mask = rows.batch.mask[0, : num - begin]
    torch.testing.assert_close(found.logp[0, : num - begin][mask], right[mask], rtol=1e-4, atol=1e-5)
