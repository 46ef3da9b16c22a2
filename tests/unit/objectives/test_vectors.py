"""Every objective against an independent numpy reference, in float64 and float32."""

import json
from pathlib import Path

import pytest
import torch

from p2prl.objectives import OBJECTIVES, Batch, ess_ratio

VECTORS = Path(__file__).parents[2] / "vectors"
CASES = json.loads((VECTORS / "objectives.json").read_text())["cases"]
ESS = json.loads((VECTORS / "ess.json").read_text())
NAMES = {
    "gepo_unclipped": ("gepo", {"clip": None}),
    "gepo_clip_0.2": ("gepo", {"clip": 0.2}),
    "gepo_vcpo_clip0.2": ("gepo_vcpo", {"clip": 0.2, "baseline": "min_variance"}),
    "gepo_vcpo_unclipped": ("gepo_vcpo", {"clip": None, "baseline": "min_variance"}),
}


def batch_of(case: dict, dtype: torch.dtype) -> tuple[Batch, torch.Tensor]:
    given = case["input"]
    batch = Batch(
        group=torch.tensor(given["group"]),
        mask=torch.tensor(given["mask"]).bool(),
        behavior_logp=torch.tensor(given["behavior_logp"], dtype=dtype),
        reward=torch.tensor(given["reward"], dtype=dtype),
        age=torch.tensor(given["age"]),
        score_norm=torch.tensor(given["score_norm"], dtype=dtype),
    )
    return batch, torch.tensor(given["logp"], dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
def test_loss_and_gradient_are_the_reference(case: int, name: str, dtype: torch.dtype, tolerance: float) -> None:
    objective, options = NAMES[name]
    batch, logp = batch_of(CASES[case], dtype)
    expected = CASES[case]["expect"][name]

    loss, _ = OBJECTIVES[objective](batch, logp, **options)
    loss.backward()

    near(loss.detach(), expected["loss"], tolerance)
    assert logp.grad is not None
    near(logp.grad, expected["grad"], tolerance)


def near(value: torch.Tensor, expected: object, tolerance: float) -> None:
    wanted = torch.tensor(expected, dtype=torch.float64)
    assert bool(((value.double() - wanted).abs() <= tolerance * (1 + wanted.abs())).all())


@pytest.mark.parametrize("case", range(len(CASES)))
def test_expectation_is_the_reference(case: int) -> None:
    batch, _ = batch_of(CASES[case], torch.float64)
    prepared = batch.prepare()
    assert prepared.log_expectation is not None
    wanted = CASES[case]["expect"]["gepo_unclipped"]["log_expectation"]
    groups = sorted(set(CASES[case]["input"]["group"]))
    for number, group in enumerate(groups):
        rows = (batch.group == group) & prepared.live
        near(prepared.log_expectation[rows], [wanted[number]] * int(rows.sum()), 1e-9)


@pytest.mark.parametrize("case", range(len(ESS)))
def test_effective_sample_size_is_the_reference(case: int) -> None:
    log_ratio = torch.tensor(ESS[case]["log_ratio"], dtype=torch.float64)
    assert ess_ratio(log_ratio) == pytest.approx(ESS[case]["ess_ratio"], rel=1e-9)
