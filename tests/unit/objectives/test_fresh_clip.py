"""What the recipes' `clip` does to fresh answers, whose GEPO weight is not 1 (algorithms: "log it at age 0")."""

import torch

from p2prl.objectives import Batch, find_objective
from p2prl.recipe import find

GROUPS, ANSWERS = 400, 8


def clipped_when_fresh(clip: float) -> float:
    """Share of answers without a gradient, their mean log-probs spread as SmolLM2's are at version 0: -1.9 +- 0.8."""
    source = torch.Generator().manual_seed(7)
    number = GROUPS * ANSWERS
    logp = (0.8 * torch.randn(number, 1, generator=source) - 1.9).clamp(max=-0.1)
    batch = Batch(
        group=torch.arange(GROUPS).repeat_interleave(ANSWERS),
        mask=torch.ones(number, 1, dtype=torch.bool),
        behavior_logp=logp,
        reward=(torch.rand(number, generator=source) < 0.2).float(),
        age=torch.zeros(number, 1, dtype=torch.long),
    ).prepare()
    return find_objective("gepo_vcpo")(batch, logp, clip=clip, baseline="mean")[1]["clip_fraction_fresh"]


def test_a_narrow_clip_takes_the_gradient_of_fresh_answers_and_the_smollm2_recipe_does_not() -> None:
    clip = find("smollm2-chain-sum")[0].objective.clip
    assert clip is not None
    assert clipped_when_fresh(clip) < 0.02
    assert clipped_when_fresh(0.2) > 0.25
