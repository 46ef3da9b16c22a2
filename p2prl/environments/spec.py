"""What a recipe says of its environment, as the environment process gets it, and what comes of it.

In: a recipe's section, folders of data files. Out: an `Environment` that this machine may use in that recipe's swarm.

Every node must make the same prompts, so: the version a recipe names is the one installed; a package's environment has
a version; a data file has its hash; one that differs between Pythons is refused without `same_python`.
"""

import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from p2prl.environments.conversation import TurnRules
from p2prl.environments.mixture import Mixture, converses
from p2prl.environments.reasoning_gym import ReasoningGym
from p2prl.environments.registry import Environment, full_name, load_environment
from p2prl.errors import ConfigError
from p2prl.recipe import EnvironmentSection

_INSTALLABLE = re.compile(r"[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+")  # nothing that a shell would read otherwise


class Member(msgspec.Struct, frozen=True):
    name: str
    version: str = ""
    params: dict[str, Any] = {}
    weight: float = 1.0


class Spec(msgspec.Struct, frozen=True):
    members: tuple[Member, ...]
    mixed: bool = False
    same_python: str = ""
    folders: tuple[str, ...] = ()
    rules: TurnRules = TurnRules()


def spec_of(section: EnvironmentSection, folders: Sequence[Path]) -> Spec:
    members = tuple(Member(each.name, each.version, each.params, each.weight) for each in section.members)
    rules = TurnRules(section.max_turns, section.max_given_tokens)
    return Spec(members, bool(section.mix), section.same_python, tuple(map(str, folders)), rules)


def decode(text: str) -> Spec:
    try:
        return msgspec.json.decode(text, type=Spec)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"the environment {text[:100]} can't be read: {error}") from error


def open_environment(spec: Spec, python: str = "") -> Environment:
    """Raises ConfigError with what this machine lacks. `python`: the running version, 3.11."""
    python = python or ".".join(platform.python_version_tuple()[:2])
    if spec.same_python and spec.same_python != python:
        raise ConfigError(
            f"the recipe wants Python {spec.same_python} on every node (same_python), this is {python}; run p2prl with it"
        )
    opened = [_open(member, spec) for member in spec.members]
    made = Mixture(opened, [member.weight for member in spec.members]) if spec.mixed else opened[0]
    if spec.rules.max_turns > 1 and not converses(made):
        raise ConfigError(
            f"{made.name} says nothing to an answer, and the recipe has max_turns = {spec.rules.max_turns}; take it out"
        )
    return made


def _open(member: Member, spec: Spec) -> Environment:
    folders = [Path(folder) for folder in spec.folders]
    environment = load_environment(member.name, member.params, folders)
    _check_version(member, environment)
    if full_name(member.name, folders).startswith("dataset:") and not member.params.get("hash"):
        raise ConfigError(f"{member.name} has no hash in the recipe; `p2prl env show {member.name}` tells it")
    if isinstance(environment, ReasoningGym) and environment.unsafe and not spec.same_python:
        raise ConfigError(
            f"{member.name} is not the same everywhere ({environment.unsafe}); take another, or set "
            '[environment] same_python = "3.11", so that only nodes with that Python join'
        )
    return environment


def _check_version(member: Member, environment: Environment) -> None:
    if member.version and member.version != environment.version:
        advice = f"Install it: pip install '{member.version}'"
        if not _INSTALLABLE.fullmatch(member.version):
            advice = "What it wants is no PACKAGE==VERSION; don't trust that recipe"
        raise ConfigError(
            f"the recipe wants {member.name} from {member.version}, here it is {environment.version}: "
            f"its prompts could differ. {advice}"
        )
    if not member.version and not environment.version.startswith("p2prl=="):
        raise ConfigError(
            f'{member.name} has no version in the recipe; write version = "{environment.version}" beside its name'
        )
