"""Objectives by name, those of other packages too (entry point group `p2prl.objectives`).

In: a name. Out: an `Objective`, `(batch, logp, **options) -> (loss, metrics)`.

Invariants: a name means one objective: an installed package that takes a name twice is an error, not a choice; other
packages are looked up, and loaded, only when a name is not built in or all names are asked for.
"""

from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points

from p2prl.errors import ConfigError
from p2prl.objectives.a3po import a3po, decoupled_ppo
from p2prl.objectives.gepo import gepo
from p2prl.objectives.gepo_vcpo import gepo_vcpo
from p2prl.objectives.objective import Objective, nearest
from p2prl.objectives.ppo import dapo, dr_grpo, grpo
from p2prl.objectives.sequence import gspo, mis, reinforce, tis, vespo
from p2prl.objectives.trust import cispo, dppo, m2po, minpro, r2vpo
from p2prl.objectives.vcpo import vcpo

ENTRY_POINT_GROUP = "p2prl.objectives"

BUILT_IN: dict[str, Objective] = {
    "gepo": gepo,
    "vcpo": vcpo,
    "gepo_vcpo": gepo_vcpo,
    "a3po": a3po,
    "decoupled_ppo": decoupled_ppo,
    "reinforce": reinforce,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": gspo,
    "tis": tis,
    "mis": mis,
    "cispo": cispo,
    "m2po": m2po,
    "vespo": vespo,
    "dppo": dppo,
    "minpro": minpro,
    "r2vpo": r2vpo,
}


class Objectives(Mapping[str, Objective]):
    """All of them by name; an unknown name is a ConfigError with the nearest."""

    def __getitem__(self, name: str) -> Objective:
        return find_objective(name)

    def __contains__(self, name: object) -> bool:
        return name in BUILT_IN or name in _installed()

    def __iter__(self) -> Iterator[str]:
        return iter([*BUILT_IN, *_installed()])

    def __len__(self) -> int:
        return len(BUILT_IN) + len(_installed())


OBJECTIVES = Objectives()


def find_objective(name: str) -> Objective:
    """The built-in objective, else an installed package's; ConfigError names the nearest."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    others = _installed()
    if name not in others:
        raise ConfigError(f"there is no objective {name!r}; {nearest(name, [*BUILT_IN, *others])}")
    loaded = others[name].load()
    return loaded if isinstance(loaded, Objective) else Objective(loaded)


def _installed() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in BUILT_IN or point.name in found:
            other = "p2prl itself" if point.name in BUILT_IN else found[point.name].value
            raise ConfigError(
                f"{point.value} registers an objective {point.name!r}, which {other} has too; "
                "uninstall one of them, or ask its author for another name"
            )
        found[point.name] = point
    return found
