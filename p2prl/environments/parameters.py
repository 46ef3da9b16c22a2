"""What may be set of an environment that can be loaded, with its usual values.

In: its full name, the parameters it was made with. Out: lines as a recipe has them, `digits = 2`; what has no usual value,
or one that can't be written down, is its name alone.
"""

import enum
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from p2prl.environments import dataset, plugins, reasoning_gym, verifiers
from p2prl.environments.addition import Addition
from p2prl.environments.graders import GRADERS, option_names

MAX_VALUE_CHARACTERS = 200


def parameters(full: str, params: Mapping[str, Any]) -> tuple[str, ...]:
    source, _, name = full.partition(":")
    match source:
        case "builtin":
            usual = {name: value for name, value in keywords(Addition) if name != "version"}
        case "reasoning_gym":
            usual = reasoning_gym.usual_params(name)
        case "dataset":
            grader = params.get("grader", dataset.USUAL["grader"])
            usual = dataset.USUAL | dict.fromkeys(option_names(grader)) | dict(keywords(GRADERS[grader][0]))
        case "verifiers":
            usual = verifiers.usual_params(name)
        case _:
            usual = dict(keywords(plugins.find_class(source, name)))
    return tuple(line_of(name, value) for name, value in usual.items())


def keywords(kind: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """What may be given by name, and what it is otherwise: None where it must be given."""
    for name, known in inspect.signature(kind).parameters.items():
        if known.kind in (known.POSITIONAL_OR_KEYWORD, known.KEYWORD_ONLY):
            yield name, None if known.default is known.empty else known.default


def line_of(name: str, value: Any) -> str:
    """As TOML writes it, which has no word for None."""
    if value is None:
        return name
    try:
        said = json.dumps(
            value, ensure_ascii=False, default=lambda it: it.name if isinstance(it, enum.Enum) else str(it)
        )
    except Exception:  # noqa: BLE001  # keys that are no text, a value in itself, whatever another's __str__ raises
        return name
    return f"{name} = {said if len(said) <= MAX_VALUE_CHARACTERS else said[:MAX_VALUE_CHARACTERS] + '...'}"
