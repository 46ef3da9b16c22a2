"""A recipe's parameters as the types that reasoning-gym's data sets want.

In: a data set's configuration class, values that TOML can say. Out: keyword arguments for it.

Lists become tuples where the class has tuples, texts become dates, times and enumerations, tables become the small
classes inside (`board_format_opts`, the specifications of `composite`).
"""

import dataclasses
import datetime
import enum
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

from p2prl.environments.registry import refuse_unknown
from p2prl.errors import ConfigError

_OURS = ("seed", "size")  # follow from the index


def converted(config: type, params: Mapping[str, object], owner: str) -> dict[str, Any]:
    """Raises ConfigError for an unknown parameter and for a value that its type can't be made of."""
    return _fields(config, params, owner, ours=_OURS)


def known_params(config: type) -> list[str]:
    return sorted({field.name for field in dataclasses.fields(config)} - set(_OURS))


def _fields(config: Any, params: Mapping[str, object], owner: str, ours: tuple[str, ...] = ()) -> dict[str, Any]:
    hints = get_type_hints(config)
    refuse_unknown("parameter", params, hints.keys() - set(ours), owner)
    made = {}
    for key, value in params.items():
        try:
            made[key] = _as(hints[key], value, f"{owner}, {key}")
        except (ValueError, TypeError, KeyError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{owner}: {key} = {value!r} is no {_words(hints[key])}; change it") from error
    return made


def _as(kind: Any, value: Any, owner: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _as(next(choice for choice in inner if choice is not type(None)), value, owner)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind(**_fields(kind, _table(value), owner))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return kind[value] if value in kind.__members__ else kind(value)
    if kind in (datetime.date, datetime.time):
        return kind.fromisoformat(value)
    if isinstance(value, list):
        items = [_as(inner[0], item, owner) if inner and origin is not tuple else _pair(item) for item in value]
        return tuple(items) if tuple in (kind, origin) else items
    if dict in (kind, origin):
        _refuse_ours(_table(value), owner)
    return value


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError("not a table")
    return value


def _refuse_ours(table: Mapping[str, Any], owner: str) -> None:
    for name in _OURS:
        if name in table:
            raise ConfigError(f"{owner}: {name} follows from the prompt's index; leave it out")


def _words(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)
