from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.objectives import OBJECTIVES
from p2prl.objectives.batch import normalised_advantage, sequence_log_ratio
from tests.batches import draw, solve

few = settings(max_examples=20, deadline=None)
seeds = given(st.integers(0, 10_000))


@few
@given(st.integers(0, 10_000), st.floats(0.3, 4.0))
def test_tis_bounds_the_weight_and_mis_drops_the_answer(seed: int, cap: float) -> None:
    batch, logp = draw(seed)
    prepared = batch.prepare()
    assert prepared.num_answers is not None
    weight = sequence_log_ratio(prepared, logp).exp()
    share = -normalised_advantage(prepared) / prepared.length / max(prepared.num_answers, 1)
    share = share[:, None] * prepared.mask
    torch.testing.assert_close(solve("tis", {"cap": cap}, batch, logp)[1], share * weight.clamp(max=cap)[:, None])
    kept = torch.where(weight > cap, 0.0, weight)[:, None]
    torch.testing.assert_close(solve("mis", {"cap": cap}, batch, logp)[1], share * kept)
    over = OBJECTIVES["tis"](batch, logp, cap=cap)[1]["capped_fraction"]
    assert over == pytest.approx(float((weight > cap)[prepared.live].double().mean()))


@few
@seeds
def test_reinforce_ignores_how_old_an_answer_is(seed: int) -> None:
    batch, logp = draw(seed)
    stale = replace(batch, behavior_logp=batch.behavior_logp - 3.0)
    torch.testing.assert_close(solve("reinforce", {}, stale, logp), solve("reinforce", {}, batch, logp))


@few
@seeds
def test_gspo_moves_all_tokens_of_an_answer_alike(seed: int) -> None:
    batch, logp = draw(seed)
    gradient = solve("gspo", {"clip_low": 0.2, "clip_high": 0.2}, batch, logp)[1]
    prepared = batch.prepare()
    first = gradient.gather(1, prepared.mask.long().argmax(1, keepdim=True))
    torch.testing.assert_close(gradient, first * prepared.mask)


@few
@seeds
def test_vespos_weight_is_1_on_policy_and_falls_off_on_both_sides(seed: int) -> None:
    batch, logp = draw(seed)
    fresh = replace(batch, behavior_logp=logp)
    prepared = fresh.prepare()
    assert prepared.num_tokens is not None
    wanted = -normalised_advantage(prepared)[:, None] * prepared.mask / max(prepared.num_tokens, 1)
    torch.testing.assert_close(solve("vespo", {}, fresh, logp)[1], wanted)
    for moved in (-40.0, 40.0):
        far = solve("vespo", {}, replace(batch, behavior_logp=logp - moved), logp)[1]
        assert float(far.abs().max()) < 1e-12


def test_vespos_kernel_by_hand() -> None:
    """One token, l = log 2: w = 2; A' > 0: 4 e^-3, A' < 0: 8 e^-2."""
    batch, logp = draw(1, num_groups=1, size=2, longest=1)
    reward = torch.tensor([1.0, 0.0], dtype=torch.float64)
    shifted = logp - torch.log(torch.tensor(2.0, dtype=torch.float64))
    batch = replace(batch, mask=torch.ones(2, 1, dtype=torch.bool), reward=reward, behavior_logp=shifted)
    gradient = solve("vespo", {}, batch, logp)[1]
    scale = 0.5 / (2**-0.5 + 1e-4) / 2
    wanted = torch.tensor([[-4 * scale], [8 * scale]], dtype=torch.float64) * torch.exp(
        torch.tensor([[-3.0], [-2.0]], dtype=torch.float64)
    )
    torch.testing.assert_close(gradient, wanted)
