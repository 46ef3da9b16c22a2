"""Objectives by name, those of other packages too (entry point group `p2prl.objectives`).

In: a name. Out: a function `(batch, logp, **options) -> (loss, metrics)`.
"""

import difflib
from collections.abc import Callable
from importlib.metadata import entry_points

from torch import Tensor

from p2prl.errors import ConfigError
from p2prl.objectives.gepo import gepo
from p2prl.objectives.gepo_vcpo import gepo_vcpo

Objective = Callable[..., tuple[Tensor, dict[str, float]]]
ENTRY_POINT_GROUP = "p2prl.objectives"

OBJECTIVES: dict[str, Objective] = {"gepo": gepo, "gepo_vcpo": gepo_vcpo}


def find_objective(name: str) -> Objective:
    """The built-in objective, else an installed package's; ConfigError names the nearest."""
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    others = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name in others:
        return others[name].load()
    names = sorted({*OBJECTIVES, *others})
    near = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"there is no objective {name!r}; {hint}There are: {', '.join(names)}")
