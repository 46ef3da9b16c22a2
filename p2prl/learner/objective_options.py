"""What the recipe's [objective] makes of an objective, and whether that works, found out before any step.

In: the section. Out: the objective with the options it is called with; ConfigError for what it can't be called with.

Options of the section's table come before `clip` and `baseline`, which every objective that has them gets; "none" is
None, for which TOML has no word. An objective checks its values when it is called, so `check_objective` calls it, on a
small batch in two parts, as a step does.
"""

from typing import Any

import torch

from p2prl.errors import BatchError, ConfigError
from p2prl.learner.prox import interpolated
from p2prl.objectives.batch import Batch
from p2prl.objectives.objective import Objective
from p2prl.objectives.registry import find_objective
from p2prl.recipe import ObjectiveSection, Recipe

Call = tuple[Objective, dict[str, Any]]


def objective_call(recipe: Recipe) -> Call:
    """The recipe's objective and its options."""
    section = recipe.objective
    return find_objective(section.name), objective_options(section, recipe.most_drawn)


def objective_options(section: ObjectiveSection, max_length: int | None = None) -> dict[str, Any]:
    """Those that the objective takes of the recipe's own keys, and all of the table; `max_length` in tokens."""
    taken = find_objective(section.name).options
    own = {"clip": section.clip, "baseline": section.baseline, "max_length": max_length}
    given = {name: None if value == "none" else value for name, value in section.options.items()}
    return {name: value for name, value in own.items() if name in taken} | given


def check_objective(recipe: Recipe) -> None:
    """ConfigError when no step could be made with the recipe's objective, options and proximal policy."""
    objective, options = objective_call(recipe)
    prox = recipe.objective.prox
    objective.check(options)
    if objective.name == "m2po" and prox == "a3po":
        raise ConfigError(
            "m2po ranks all tokens of a step by their proximal policy, and 'a3po' gives that one micro-batch at a time; "
            "set objective.prox = 'recompute'"
        )
    try:
        for loss in _trial(objective, options, prox):
            if not loss.isfinite():
                raise ConfigError(f"the objective {objective.name} gives {loss.item()} with the options {options}")
    except BatchError as error:
        raise ConfigError(f"{error}; set objective.prox = 'recompute' in the recipe") from error
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise ConfigError(f"objective {objective.name}: {error}") from None
        raise ConfigError(f"the objective {objective.name} can't use the options {options}: {error}") from error


def _trial(objective: Objective, options: dict[str, Any], prox: str) -> list[torch.Tensor]:
    """Losses of two groups of two answers of two tokens."""
    logp = torch.tensor([[-0.9, -1.2], [-1.1, -0.7], [-1.0, -1.4], [-0.8, -1.3]])
    batch = Batch(
        group=torch.tensor([0, 0, 1, 1]),
        mask=torch.ones(4, 2, dtype=torch.bool),
        behavior_logp=torch.full((4, 2), -1.0),
        reward=torch.tensor([0.0, 1.0, 1.0, 0.0]),
        age=torch.tensor([[0, 1], [0, 2], [3, 3], [4, 4]]),
        prox_logp=logp.clone() if prox == "recompute" else None,
    ).prepare()
    losses = []
    for rows in ([0, 1], [2, 3]):
        part, leaf = batch.split(rows), logp[rows].clone().requires_grad_()
        if prox == "a3po":
            part = interpolated(part, leaf)
        losses.append(objective(part, leaf, **options)[0].detach())
    return losses
