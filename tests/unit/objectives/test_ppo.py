from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.objectives import OBJECTIVES
from p2prl.objectives.batch import normalised_advantage, token_ratio
from tests.batches import draw, solve

few = settings(max_examples=20, deadline=None)
seeds = given(st.integers(0, 10_000))


@few
@seeds
def test_they_differ_in_what_they_divide_by(seed: int) -> None:
    batch, logp = draw(seed)
    prepared = batch.prepare()
    assert prepared.advantage is not None and prepared.num_answers and prepared.num_tokens
    ratio = token_ratio(prepared, logp) * prepared.mask
    scaled = -normalised_advantage(prepared)[:, None] * ratio
    wide = {"clip": 1e9}
    torch.testing.assert_close(
        solve("grpo", wide, batch, logp)[1], scaled / prepared.length[:, None] / prepared.num_answers
    )
    torch.testing.assert_close(solve("dapo", wide, batch, logp)[1], scaled / prepared.num_tokens)
    torch.testing.assert_close(
        solve("dr_grpo", wide | {"max_length": 50}, batch, logp)[1],
        -prepared.advantage[:, None] * ratio / prepared.num_answers / 50,
    )


@few
@seeds
def test_dapos_upper_bound_is_its_own(seed: int) -> None:
    batch, logp = draw(seed)
    gradient = solve("dapo", {"clip": 0.1, "clip_high": 0.4}, batch, logp)[1]
    prepared = batch.prepare()
    ratio, advantage = token_ratio(prepared, logp), normalised_advantage(prepared)[:, None]
    inside = torch.where(advantage > 0, ratio < 1.4, ratio > 0.9)
    assert torch.equal(gradient != 0, inside & prepared.mask & (advantage != 0))


def test_clipped_tokens_are_told_apart() -> None:
    batch, logp = draw(3)
    metrics = OBJECTIVES["grpo"](batch, logp, clip=0.01)[1]
    assert 0 < metrics["token_clip_fraction_fresh"] < metrics["token_clip_fraction"] < 1
    parts = metrics["token_clip_fraction_positive"] + metrics["token_clip_fraction_negative"]
    assert parts == pytest.approx(metrics["token_clip_fraction"])
    same = replace(batch, behavior_logp=logp)
    assert OBJECTIVES["grpo"](same, logp, clip=0.01)[1]["token_clip_fraction"] == 0
