"""Which runs a study has, how an objective is named, what changes a run's key."""

import subprocess
import sys

import msgspec
import pytest

from p2prl.bench.staleness import FULL_OBJECTIVES, RunSpec, Settings, plan, recipe_of
from p2prl.errors import ConfigError
from p2prl.learner.objective_options import check_objective
from p2prl.objectives.registry import BUILT_IN
from p2prl.recipe import find

SPEC = RunSpec("gepo", "fixed", 32, 1)


def test_a_study_is_every_combination_once_seed_by_seed() -> None:
    specs = plan(("gepo", "tis", "gepo"), (32, 0, 32), 2, "fixed", Settings())
    assert [(spec.seed, spec.age, spec.objective) for spec in specs] == [
        (seed, age, objective) for seed in (0, 1) for age in (0, 32) for objective in ("gepo", "tis")
    ]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"objectives": ()}, "at least one objective"),
        ({"ages": ()}, "at least one objective"),
        ({"ages": (0, -1)}, "not -1"),
        ({"law": "gamma"}, "'gamma'"),
        ({"objectives": ("gepo", "tis:medium")}, "'medium'"),
        ({"objectives": ("gepo:clip=wide",)}, "objective.clip"),
        ({"settings": Settings(learning_rate=-1.0)}, "learner.learning_rate"),
    ],
)
def test_what_makes_no_study_is_named(change: dict, why: str) -> None:
    given = {"objectives": ("gepo",), "ages": (0,), "num_seeds": 1, "law": "fixed", "settings": Settings()} | change
    with pytest.raises(ConfigError, match=why):
        plan(**given)


@pytest.mark.parametrize(
    ("text", "section"),
    [
        ("gepo_vcpo", ("gepo_vcpo", "mean", "sequence", 0.2, "none", {})),
        ("gepo_vcpo:min_variance", ("gepo_vcpo", "min_variance", "sequence", 0.2, "none", {})),
        ("gepo_vcpo:weights:mean", ("gepo_vcpo", "mean", "weights", 0.2, "none", {})),
        ("gepo_vcpo:step_size=weights", ("gepo_vcpo", "mean", "weights", 0.2, "none", {})),
        (
            "gepo_vcpo:min_variance:baseline_over=all",
            ("gepo_vcpo", "min_variance", "sequence", 0.2, "none", {"baseline_over": "all"}),
        ),
        ("vcpo:none", ("vcpo", "mean", "none", 0.2, "none", {})),
        ("gepo", ("gepo", "mean", "none", 0.2, "none", {})),
        ("gepo:ess:unclipped", ("gepo", "mean", "sequence", None, "none", {})),
        ("grpo:clip=0.3", ("grpo", "mean", "none", 0.3, "none", {})),
        (
            "a3po:cap=4.0:cap_mode=clamp",
            ("a3po", "mean", "none", 0.2, "none", {"cap": 4.0, "cap_mode": "clamp"}),
        ),
        ("gepo:age_band=true", ("gepo", "mean", "none", 0.2, "none", {"age_band": True})),
        ("decoupled_ppo", ("decoupled_ppo", "mean", "none", 0.2, "recompute", {})),
        ("decoupled_ppo:prox=a3po", ("decoupled_ppo", "mean", "none", 0.2, "a3po", {})),
    ],
)
def test_names_and_choices(text: str, section: tuple) -> None:
    made = recipe_of(RunSpec(text, "fixed", 0, 0)).objective
    assert (made.name, made.baseline, made.step_size, made.clip, made.prox, made.options) == section


@pytest.mark.parametrize("text", [*FULL_OBJECTIVES, *BUILT_IN])
def test_every_registered_objective_can_be_studied(text: str) -> None:
    check_objective(recipe_of(RunSpec(text, "fixed", 0, 0)))


def test_the_recipe_is_the_demos_but_for_what_is_studied() -> None:
    made, base = recipe_of(SPEC), find("addition")[0]
    assert (made.model, made.environment, made.sampling) == (base.model, base.environment, base.sampling)
    assert (made.learner.groups_per_step, made.learner.learning_rate, made.learner.betas) == (32, 3e-4, (0.9, 0.99))


def test_a_key_changes_with_what_changes_the_result_and_with_nothing_else() -> None:
    others = [
        msgspec.structs.replace(SPEC, **change)
        for change in (
            {"objective": "grpo"},
            {"law": "weibull"},
            {"age": 0},
            {"seed": 2},
            {"settings": Settings(num_steps=3)},
            {"settings": Settings(eval_answers=8)},
        )
    ]
    keys = {spec.key() for spec in (SPEC, *others)}
    assert len(keys) == len(others) + 1
    assert len({spec.name for spec in (SPEC, *others)}) == len(others) + 1
    assert RunSpec("gepo", "fixed", 32, 1).key() == SPEC.key()


def test_the_parent_stays_free_of_torch() -> None:
    script = (
        "import sys; from p2prl.bench import staleness_plots, staleness_pool, staleness_summary; "
        "from p2prl.cli import bench_staleness; staleness_summary.paired_loss([(1.0, 1.0), (1.0, 0.9)]); "
        "print([name for name in ('torch', 'transformers', 'hivemind') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
