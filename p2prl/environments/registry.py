"""From an environment's name and parameters to an `Environment`.

In: what the recipe says (`addition`, `reasoning_gym:chain_sum`, parameters). Out: prompts and rewards by index.

Invariants: an environment is deterministic: the same version, parameters and index give the same prompt and rewards
on every machine, since receivers recompute rewards. Indices from `HELD_OUT_FROM` on are for evaluation only.
"""

import difflib
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from p2prl.errors import ConfigError

HELD_OUT_FROM = 2**40


class Environment(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str:
        """The package it comes from: `package==version`."""
        ...

    @property
    def num_prompts(self) -> int | None:
        """None: as many as there are indices."""
        ...

    def prompt(self, index: int) -> str: ...

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        """Reward in [0, 1] of an answer's text, and why."""
        ...


def load_environment(name: str, params: Mapping[str, object]) -> Environment:
    """Raises ConfigError for an unknown name, parameter or value, or a package that isn't installed."""
    kind, _, dataset = name.partition(":")
    if name == "addition":
        from p2prl.environments.addition import Addition

        refuse_unknown("parameter", params, ("digits", "max_digit"), "environment addition")
        checked_inside = dict(params)
        return Addition(package_version("p2prl"), **checked_inside)  # pyright: ignore[reportArgumentType]
    if kind == "reasoning_gym" and dataset:
        from p2prl.environments.reasoning_gym import load_dataset

        return load_dataset(dataset, params)
    near = nearest(name, ("addition", "reasoning_gym:NAME", "reasoning_gym:chain_sum"))
    raise ConfigError(
        f"there is no environment {name!r}; did you mean {near!r}? There are `addition` and `reasoning_gym:NAME`"
    )


def package_version(package: str) -> str:
    try:
        return f"{package}=={version(package)}"
    except PackageNotFoundError:
        from p2prl import __version__

        return f"p2prl=={__version__}"


def checked_int(environment: str, key: str, value: object, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(
            f"environment {environment}: {key} = {value!r} is not a whole number from {least} to {most}; "
            "change it in the recipe"
        )
    return value


def refuse_unknown(kind: str, given: Iterable[str], known: Iterable[str], owner: str) -> None:
    known = sorted(known)
    for name in given:
        if name not in known:
            raise ConfigError(f"{owner} has no {kind} {name!r}; did you mean {nearest(name, known)!r}?")


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like the given one, so that a message can offer it."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return close[0] if close else known[0]
