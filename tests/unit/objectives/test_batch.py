"""What a batch drops, keeps and refuses. Invariances of objectives over it: tests/property/test_objectives.py."""

from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.errors import BatchError, P2prlError
from p2prl.objectives import Batch
from p2prl.objectives.batch import log_ratio, normalised_advantage, tail_moments
from tests.batches import draw


def same(first: Batch, second: Batch) -> None:
    for field in fields(Batch):
        torch.testing.assert_close(getattr(first, field.name), getattr(second, field.name))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_preparing_twice_changes_nothing(seed: int) -> None:
    prepared = draw(seed)[0].prepare()
    same(prepared.prepare(), prepared)


def test_empty_answers_count_nowhere() -> None:
    batch, logp = draw(1)
    batch = replace(batch, mask=torch.ones_like(batch.mask))
    full = batch.prepare()
    batch.mask[4:6] = False
    prepared = batch.prepare()
    assert (full.num_answers, full.num_tokens) == (12, 72)
    assert (prepared.num_answers, prepared.num_tokens) == (10, 60)
    assert prepared.group_size is not None and prepared.advantage is not None
    assert prepared.group_size.tolist() == [4] * 4 + [2] * 4 + [4] * 4
    rest = batch.reward[6:8]
    torch.testing.assert_close(prepared.advantage[6:8], rest - rest.mean())
    assert len(log_ratio(prepared, logp)) == 10


def test_the_spread_is_that_of_a_sample_and_0_for_one() -> None:
    batch, _ = draw(2)
    reward = torch.rand(12, dtype=torch.float64)
    batch = replace(batch, mask=torch.ones_like(batch.mask), reward=reward, group=torch.tensor([0] * 11 + [1]))
    prepared = batch.prepare()
    assert prepared.group_spread is not None
    torch.testing.assert_close(prepared.group_spread[0], reward[:11].std())
    assert prepared.group_spread[11] == 0 and normalised_advantage(prepared)[11] == 0


def test_what_the_caller_knows_is_kept() -> None:
    batch, _ = draw(3)
    own = torch.arange(12, dtype=torch.float64)
    prepared = replace(batch, advantage=own, log_expectation=-own, num_answers=100.0, num_tokens=1000.0).prepare()
    assert prepared.advantage is own and (prepared.num_answers, prepared.num_tokens) == (100.0, 1000.0)
    assert prepared.log_expectation is not None and torch.equal(prepared.log_expectation, -own)


def test_split_refuses_to_cut_a_group_where_the_baseline_needs_it() -> None:
    batch, _ = draw(5)
    batch = replace(batch, mask=torch.ones_like(batch.mask))
    with pytest.raises(BatchError, match="whole groups"):
        batch.split(torch.arange(3))
    assert len(batch.split([9, 8, 11, 10]).reward) == 4
    assert len(replace(batch, score_norm=None).split(torch.arange(3)).reward) == 3


def test_a_group_without_its_empty_answers_is_whole() -> None:
    batch, _ = draw(5)
    mask = torch.ones_like(batch.mask)
    mask[0] = False
    assert len(replace(batch, mask=mask).split(torch.arange(1, 4)).reward) == 3


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(1e-6, 2.0))
def test_the_tail_moment_drops_the_fewest_tokens_that_must_go(seed: int, limit: float) -> None:
    batch, logp = draw(seed)
    prepared = batch.prepare()
    moment = tail_moments(prepared, logp)[prepared.mask]
    drift = (logp - batch.behavior_logp)[prepared.mask].square()
    ranked = drift.sort().values
    means = ranked.cumsum(0) / torch.arange(1, len(ranked) + 1)
    keep = int((means < limit).sum())
    assert int((moment < limit).sum()) == keep
    torch.testing.assert_close(drift[moment < limit].sort().values, ranked[:keep])


@pytest.mark.parametrize(
    "change",
    [
        {"mask": torch.ones(12, dtype=torch.bool)},
        {"behavior_logp": torch.zeros(12, 2)},
        {"prox_logp": torch.zeros(11, 6)},
        {"reward": torch.zeros(3)},
        {"score_norm": torch.zeros(12, 1)},
        {"age": torch.full((12, 6), -1), "mask": torch.ones(12, 6, dtype=torch.bool)},
        {"age": torch.zeros(12, 6)},
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(change: dict) -> None:
    batch, _ = draw(7)
    with pytest.raises(BatchError, match="batch") as caught:
        replace(batch, **change).prepare()
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, P2prlError)
