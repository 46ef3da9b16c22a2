"""Every objective against an independent numpy reference, in float64 and float32."""

import json
from pathlib import Path

import pytest
import torch

from p2prl.objectives import OBJECTIVES, Batch, ess_ratio, lr_multiplier
from p2prl.objectives.batch import log_ratio

VECTORS = Path(__file__).parents[2] / "vectors"
CASES = json.loads((VECTORS / "objectives.json").read_text())["cases"]
ESS = json.loads((VECTORS / "ess.json").read_text())
NAMES = {
    "gepo_unclipped": ("gepo", {"clip": None}),
    "gepo_clip_0.2": ("gepo", {"clip": 0.2}),
    "gepo_vcpo_clip0.2": ("gepo_vcpo", {"clip": 0.2, "baseline": "min_variance"}),
    "gepo_vcpo_unclipped": ("gepo_vcpo", {"clip": None, "baseline": "min_variance"}),
    "vcpo_cap8_base1": ("vcpo", {"cap": 8.0}),
    "vcpo_cap8_base0.55_sum": ("vcpo", {"cap": 8.0, "length_norm": False}),
    "vcpo_leave_one_out": ("vcpo", {"leave_one_out": True}),
    "a3po_eps0.2_mask5": ("a3po", {"clip": 0.2}),
    "a3po_eps0.2_clamp5": ("a3po", {"clip": 0.2, "cap_mode": "clamp"}),
    "a3po_eps0.4_mask5": ("a3po", {"clip": 0.4}),
    "a3po_dual3": ("a3po", {"clip": 0.2, "dual_clip": 3.0}),
    "decoupled_ppo_eps0.2": ("decoupled_ppo", {"clip": 0.2}),
    "grpo_eps0.2": ("grpo", {"clip": 0.2}),
    "dr_grpo_eps0.2_len32": ("dr_grpo", {"clip": 0.2, "max_length": 32}),
    "dapo_token_mean_eps0.2": ("dapo", {"clip": 0.2}),
    "gspo_3e-4_4e-4": ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}),
    "gspo_0.2": ("gspo", {"clip_low": 0.2, "clip_high": 0.2}),
    "reinforce": ("reinforce", {}),
    "tis_cap2": ("tis", {"cap": 2.0}),
    "mis_cap2": ("mis", {"cap": 2.0}),
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
        prox_logp=torch.tensor(given["prox_logp"], dtype=dtype),
    )
    return batch, torch.tensor(given["logp"], dtype=dtype, requires_grad=True)


def test_every_vector_is_used() -> None:
    assert all(case["expect"].keys() == NAMES.keys() for case in CASES)


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


@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize(("name", "rho_on"), [("vcpo_cap8_base1", 1.0), ("vcpo_cap8_base0.55_sum", 0.55)])
def test_step_size_of_a_batch_is_the_reference(case: int, name: str, rho_on: float) -> None:
    batch, logp = batch_of(CASES[case], torch.float64)
    expected = CASES[case]["expect"][name]
    rho = ess_ratio(log_ratio(batch.prepare(), logp.detach()))
    assert rho == pytest.approx(expected["ess_ratio"], rel=1e-9)
    assert lr_multiplier(rho, rho_on) == pytest.approx(expected["lr_multiplier"], rel=1e-9)
