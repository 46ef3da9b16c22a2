"""Every objective trains from a recipe; what can't is refused before the first step, with the key to change."""

import pytest
import torch

from p2prl.errors import ConfigError
from p2prl.learner.collate import collate
from p2prl.learner.committee import merge
from p2prl.learner.objective_options import check_objective, objective_call, objective_options
from p2prl.learner.step import apply_part, compute_part
from p2prl.objectives.registry import BUILT_IN
from p2prl.recipe import ObjectiveSection, Recipe

# The proximal policy that an objective can't do without, and options of each kind.
PROX = {"decoupled_ppo": "recompute", "m2po": "recompute"}
OPTIONS = {
    "gepo": {"clip": "none", "age_band": True},
    "vcpo": {"cap": 4, "length_norm": False, "leave_one_out": True},
    "gepo_vcpo": {"leave_one_out": True, "age_band": True},
    "a3po": {"cap_mode": "clamp", "dual_clip": 3.0},
    "gspo": {"clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"clip_high": 0.28},
    "dppo": {"divergence": "kl"},
}


def with_objective(recipe: Recipe, **section) -> Recipe:
    return recipe.model_copy(update={"objective": ObjectiveSection.model_validate(section)})


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_objective_trains_from_a_recipe(policy, recipe, tools, name: str) -> None:
    section = {"name": name, "prox": PROX.get(name, "none"), "options": OPTIONS.get(name, {})}
    changed = with_objective(recipe, **section)
    check_objective(changed)
    step = tools.make_step(policy, 4, 8, age=1)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():  # the policy has moved since
        for parameter in policy.module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=source) * 0.003)
    part = merge([compute_part(policy, collate(step, 64), changed)])
    done = apply_part(policy, part, changed, 1.0)
    assert done.skipped == ""
    assert done.metrics["grad_norm"] > 0
    assert 0 < done.metrics["ess_ratio_weights"] <= 1


def test_options_come_before_the_recipes_own_keys() -> None:
    section = ObjectiveSection(name="gepo_vcpo", options={"clip": "none", "baseline": "min_variance"})
    assert objective_options(section) == {"clip": None, "baseline": "min_variance"}
    assert objective_options(ObjectiveSection(name="a3po", options={"cap": 3})) == {"clip": 0.2, "cap": 3}


def test_the_longest_answer_is_the_samplers(recipe) -> None:
    assert objective_call(with_objective(recipe, name="dr_grpo"))[1]["max_length"] == recipe.sampling.max_new_tokens
    given = with_objective(recipe, name="dr_grpo", options={"max_length": 32})
    assert objective_call(given)[1]["max_length"] == 32


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"name": "gepo_vpco"}, "did you mean 'gepo_vcpo'"),
        ({"name": "a3po", "options": {"cpa": 5.0}}, "did you mean 'cap'"),
        ({"name": "a3po", "options": {"cap": -1.0}}, "cap is -1"),
        ({"name": "a3po", "options": {"cap": "five"}}, "can't use the options"),
        ({"name": "a3po", "options": {"cap_mode": "clap"}}, "did you mean 'clamp'"),
        ({"name": "a3po", "options": {"dual_clip": 0.5}}, "dual_clip"),
        ({"name": "decoupled_ppo"}, "objective.prox = 'recompute'"),
        ({"name": "m2po"}, "objective.prox = 'recompute'"),
        ({"name": "m2po", "prox": "a3po"}, "objective.prox = 'recompute'"),
    ],
)
def test_what_no_step_could_be_made_with_is_refused(recipe, section: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_objective(with_objective(recipe, **section))
