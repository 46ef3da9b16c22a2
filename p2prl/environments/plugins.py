"""Environments from other packages: a plain class under the entry point group `p2prl.environments`.

In: a package's name (the source), an entry point's name, parameters. Out: an `Environment`.

The class is made with the recipe's parameters as keywords. It has `prompt(index) -> str` and
`reward(index, answer) -> float | (float, reason)`; it may have `answer(index) -> str` for checks and `num_prompts: int`.
With `num_prompts` it is asked for indices below that alone, and the last tenth of them is held out; without, indices
from 2**40 on are the held-out ones, and it should give other prompts there. It must be deterministic, whatever was
asked before, and the same on every machine.

One that answers back has `respond(index, answers) -> str | None`: what it says after these answers, one text a turn; None
when it is over. It keeps nothing: `answers` is all that was said. Then a reward is of all answers,
`reward(index, answers)`, and `answer(index)` may be a list, a text a turn. The recipe sets `max_turns`:

    class Guess:
        def prompt(self, index):
            return "Guess my number, 0 to 9."
        def respond(self, index, answers):
            if answers[-1] == str(index % 10):
                return None
            return "higher" if answers[-1] < str(index % 10) else "lower"
        def reward(self, index, answers):
            return float(answers[-1] == str(index % 10)) / len(answers), f"{len(answers)} guesses"
"""

import inspect
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from p2prl.environments.catalogue import GROUP, source_of
from p2prl.environments.registry import HELD_OUT_FROM, SOURCES, nearest, refuse_unknown
from p2prl.environments.split import Split
from p2prl.errors import ConfigError


class Plugin:
    """Implements `registry.Environment` and `registry.Answered`."""

    def __init__(self, name: str, version: str, made: Any, count: object) -> None:
        self.name, self.version, self._made = name, version, made
        if count is not None and (type(count) is not int or not 1 <= count <= HELD_OUT_FROM):
            raise ConfigError(
                f"environment {name} has num_prompts = {count!r}, which is no whole number from 1 to 2**40; ask its author"
            )
        self._split = None if count is None else Split.tail(count)
        self.num_prompts: int | None = None if self._split is None else self._split.num_training

    def _own(self, index: int) -> int:
        return index if self._split is None else self._split.place(index)

    def prompt(self, index: int) -> str:
        return _text(self._made.prompt(self._own(index)), "prompt")

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        return self._rewarded(index, answer)

    def _rewarded(self, index: int, said: object) -> tuple[float, str]:
        given = self._made.reward(self._own(index), said)
        value, detail = given if isinstance(given, tuple) else (given, "the environment's own reward")
        return float(value), str(detail)

    def answer(self, index: int) -> str | None:
        own = getattr(self._made, "answer", None)
        return None if own is None else str(own(self._own(index)))


class ConversingPlugin(Plugin):
    """Implements `registry.Conversing` too, by a class with `respond`."""

    def respond(self, index: int, answers: Sequence[str]) -> str | None:
        said = self._made.respond(self._own(index), list(answers))
        return None if said is None else _text(said, "response")

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        return self.reward_turns(index, [answer])

    def reward_turns(self, index: int, answers: Sequence[str]) -> tuple[float, str]:
        return self._rewarded(index, list(answers))

    def reference(self, index: int) -> Sequence[str] | None:
        own = getattr(self._made, "answer", None)
        known = None if own is None else own(self._own(index))
        return list(map(str, known)) if isinstance(known, (list, tuple)) else None if known is None else [str(known)]

    def answer(self, index: int) -> str | None:
        """The first turn's."""
        known = self.reference(index)
        return known[0] if known else None


def _text(said: object, what: str) -> str:
    if not isinstance(said, str):
        raise TypeError(f"its {what} is {type(said).__name__}, not text")
    return str.__str__(said)  # a subclass of it can't be sent


def load_plugin(source: str, name: str, params: Mapping[str, object]) -> Plugin:
    """Raises ConfigError for an unknown one, one that can't be loaded, and two of one name."""
    return _made(_point(source, name), f"{source}:{name}", params)


def find_class(source: str, name: str) -> Any:
    """Of one that could be loaded."""
    return _point(source, name).load()


def _point(source: str, name: str) -> EntryPoint:
    points = [point for point in entry_points(group=GROUP) if point.dist and source_of(point.dist.name) == source]
    full = f"{source}:{name}"
    found = [point for point in points if point.name == name]
    if not found:
        near = nearest(name, [point.name for point in points])
        raise ConfigError(f"the package {source} has no environment {name!r}; did you mean {f'{source}:{near}'!r}?")
    if len(found) > 1 or source in SOURCES:
        raise ConfigError(
            f"there are two environments named {full!r}: {', '.join(sorted(point.value for point in found))}. "
            "Rename one entry point, or uninstall its package"
        )
    return found[0]


def _made(point: EntryPoint, full: str, params: Mapping[str, object]) -> Plugin:
    assert point.dist is not None
    version = f"{point.dist.name}=={point.dist.version}"
    try:
        kind = point.load()
        signature = inspect.signature(kind)
    except (Exception, SystemExit) as error:  # another package's code: whatever it raises, a sentence
        raise ConfigError(
            f"environment {full} ({point.value}) can't be loaded: {_said(error)}; ask its author"
        ) from error
    if not any(known.kind is inspect.Parameter.VAR_KEYWORD for known in signature.parameters.values()):
        refuse_unknown("parameter", params, signature.parameters, f"environment {full}")
    try:
        made = kind(**params)
        count = getattr(made, "num_prompts", None)
    except (Exception, SystemExit) as error:  # the same
        raise ConfigError(
            f"environment {full} can't be made from {dict(params)}: {_said(error)}; correct its parameters"
        ) from error
    missing = [name for name in ("prompt", "reward") if not callable(getattr(made, name, None))]
    if missing:
        raise ConfigError(
            f"environment {full} ({point.value}) has no method {' and no '.join(missing)}; ask its author"
        )
    kind_of = ConversingPlugin if callable(getattr(made, "respond", None)) else Plugin
    return kind_of(full, version, made, count)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"
