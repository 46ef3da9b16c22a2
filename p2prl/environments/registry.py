"""From an environment's name and parameters to an `Environment`.

In: what the recipe says (`addition`, `reasoning_gym:chain_sum`, a bare `chain_sum`), parameters, folders of data files.
Out: prompts and rewards by index.

Invariants: an environment is deterministic: the same version, parameters and index give the same prompt and rewards
on every machine, since receivers recompute rewards. Indices from `HELD_OUT_FROM` on are for evaluation only: an
environment gives them other prompts than training ones, as far as it has enough of them.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol, runtime_checkable

from p2prl.errors import ConfigError

HELD_OUT_FROM = 2**40
SOURCES = ("builtin", "reasoning_gym", "dataset", "verifiers")  # and the packages with the entry point group


class Environment(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str:
        """The package it comes from: `package==version`."""
        ...

    @property
    def num_prompts(self) -> int | None:
        """Training indices are below it; None: as many as there are indices. Held-out ones are not counted."""
        ...

    def prompt(self, index: int) -> str: ...

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        """Reward in [0, 1] of an answer's text, and why."""
        ...


@runtime_checkable
class Answered(Protocol):
    """An environment that knows an answer that earns much; for checks, never in the flow."""

    def answer(self, index: int) -> str | None: ...


@runtime_checkable
class Conversing(Protocol):
    """An environment that answers back. What it says follows from the index and the answers alone, so that whoever asks
    again, here or elsewhere, hears the same; nothing is kept from one question to the next."""

    def respond(self, index: int, answers: Sequence[str]) -> str | None:
        """What it says after these answers, one a turn; None: it is over."""
        ...

    def reward_turns(self, index: int, answers: Sequence[str]) -> tuple[float, str]:
        """As `Environment.reward`, of a whole conversation."""
        ...

    def reference(self, index: int) -> Sequence[str] | None:
        """Answers that earn much, where it knows some; for checks, never in the flow."""
        ...


@runtime_checkable
class Replaying(Protocol):
    """A `Conversing` one that plays a conversation once where `respond` would be asked after each turn."""

    def responses(self, index: int, answers: Sequence[str]) -> Sequence[str]:
        """What `respond` says after the first of these answers, the first two, ...; shorter where it is over sooner."""
        ...


def load_environment(name: str, params: Mapping[str, object], folders: Sequence[Path] = ()) -> Environment:
    """Raises ConfigError for an unknown name, parameter or value, or a package that isn't installed."""
    source, _, rest = full_name(name, folders).partition(":")
    match source:
        case "builtin":
            from p2prl.environments.addition import Addition

            refuse_unknown("parameter", params, ("digits", "max_digit"), "environment addition")
            checked_inside = dict(params)
            return Addition(package_version("p2prl"), **checked_inside)  # pyright: ignore[reportArgumentType]
        case "reasoning_gym":
            from p2prl.environments.reasoning_gym import load_dataset

            return load_dataset(rest, params)
        case "dataset":
            from p2prl.environments.dataset import load_rows_environment

            return load_rows_environment(rest, params, folders)
        case "verifiers":
            from p2prl.environments.verifiers import load_taskset

            return load_taskset(rest, params)
    from p2prl.environments.plugins import load_plugin

    return load_plugin(source, rest, params)


def full_name(name: str, folders: Sequence[Path] = ()) -> str:
    """SOURCE:NAME of a name; a bare one must be one environment's alone."""
    from p2prl.environments import catalogue

    source, colon, rest = name.partition(":")
    if name in ("addition", "builtin:addition"):  # the built-in keeps its name, whatever else is installed
        return "builtin:addition"
    if colon and rest and (source in SOURCES[1:] or source in catalogue.plugin_sources()):
        return name
    known = catalogue.names(folders)
    found = [full for full in known if full.partition(":")[2] == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"there are {len(found)} environments named {name!r}: say which, {' or '.join(found)}")
    bare = [] if colon else ["addition", *(full.partition(":")[2] for full in known)]
    near = f"{source}:NAME" if source in SOURCES and not rest else nearest(name, [*known, *bare])
    raise ConfigError(f"there is no environment {name!r}; did you mean {near!r}? `p2prl env list` shows all")


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
            hint = f"did you mean {nearest(name, known)!r}?" if known else "it has none"
            raise ConfigError(f"{owner} has no {kind} {name!r}; {hint}")


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like the given one, so that a message can offer it."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return close[0] if close else known[0]
