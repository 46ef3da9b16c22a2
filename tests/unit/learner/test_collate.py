import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2prl.learner.collate import collate, micro_batches
from p2prl.records import Segment


@given(st.lists(st.integers(1, 300), max_size=200), st.integers(64, 4000))
def test_every_row_is_in_one_micro_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = micro_batches(lengths, budget)
    assert sorted(row for rows in batches for row in rows) == list(range(len(lengths)))
    for rows in batches:
        assert len(rows) == 1 or len(rows) * max(lengths[row] for row in rows) <= budget


@given(st.lists(st.integers(8, 1024), min_size=64, max_size=256))
def test_padding_is_low(lengths: list[int]) -> None:
    padded = sum(len(rows) * max(lengths[row] for row in rows) for rows in micro_batches(lengths, 8192))
    assert padded <= sum(lengths) / 0.75 + 2 * 8192


def test_age_is_per_token_and_old_tokens_are_masked(policy, tools) -> None:
    step = tools.make_step(policy, 1, 1, group_size=2)
    group = step.groups[0]
    first = group.trajectories[0]
    num = len(first.completion.token_ids)
    mixed = msgspec.structs.replace(first.completion, segments=(Segment(0, num - 1), Segment(1, 1)))
    trajectories = (msgspec.structs.replace(first, completion=mixed), *group.trajectories[1:])
    group = msgspec.structs.replace(group, trajectories=trajectories, versions=group.versions * 2)
    rows = collate(msgspec.structs.replace(step, groups=(group,), ages=((9, 2),)), 5)
    assert rows.batch.age[0, :num].tolist() == [9] * (num - 1) + [2]
    assert rows.batch.mask[0].nonzero().flatten().tolist() == [num - 1]
    assert not rows.batch.live[1]


def test_an_answer_that_contradicts_itself_is_left_out(policy, tools) -> None:
    step = tools.make_step(policy, 1, 1, group_size=3)
    group = step.groups[0]
    first, second, third = group.trajectories
    short = msgspec.structs.replace(first.completion, logprobs=b"")
    lost = msgspec.structs.replace(second.completion, segments=(Segment(7, len(second.completion.token_ids)),))
    group = msgspec.structs.replace(
        group,
        trajectories=(
            msgspec.structs.replace(first, completion=short),
            msgspec.structs.replace(second, completion=lost),
            third,
        ),
    )
    rows = collate(msgspec.structs.replace(step, groups=(group,)), 64)
    assert rows.num_dropped == 2
    num = len(third.completion.token_ids)
    assert rows.ids[0, len(group.prompt_ids) : len(group.prompt_ids) + num].tolist() == list(third.completion.token_ids)


def test_nothing_to_train_on_is_an_empty_batch(policy, tools) -> None:
    step = tools.make_step(policy, 1, 1)
    rows = collate(msgspec.structs.replace(step, groups=(), ages=(), group_ids=()), 64)
    assert rows.batch.num_answers == 0
    assert rows.ids.dtype == torch.long


def test_what_was_given_between_turns_is_masked(policy, tools) -> None:
    step = tools.make_step(policy, 1, 1, group_size=2)
    group = step.groups[0]
    first = group.trajectories[0]
    num = len(first.completion.token_ids)
    assert num >= 3
    segments = (Segment(0, 1), Segment(0, 1, drawn=False), Segment(0, num - 2))
    trajectory = msgspec.structs.replace(first, completion=msgspec.structs.replace(first.completion, segments=segments))
    group = msgspec.structs.replace(group, trajectories=(trajectory, *group.trajectories[1:]))
    rows = collate(msgspec.structs.replace(step, groups=(group,)), 64)
    assert rows.batch.mask[0, :num].tolist() == [True, False, *[True] * (num - 2)]
    assert rows.batch.length[0] == num - 1 and rows.length[0] == len(group.prompt_ids) + num
