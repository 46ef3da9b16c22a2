"""The values that a recipe holds: what an environment's parameters may be, and one form in bytes for equal ones.

In: what TOML or JSON said. Out: checked parameters; canonical bytes, of which a swarm's id is the hash. Pure.

Invariants: values that are equal and of one kind are the same bytes on every machine, whatever the order of keys and the
sign of a zero; true is no number.
"""

import math
from typing import Annotated, Any

import msgspec
from pydantic import BeforeValidator, Field

_MAX_DEPTH = 6


def checked_param(value: Any, depth: int = 0) -> Any:
    """What TOML can say and msgpack carries: the same bytes on every machine."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} deep")
    if isinstance(value, dict):
        return {_param_key(key): checked_param(inner, depth + 1) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [checked_param(inner, depth + 1) for inner in value]
    if isinstance(value, int) and abs(value) > 2**53:
        raise ValueError(f"{value} is beyond 2**53")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is no finite number")
    if not isinstance(value, (bool, int, float, str)):
        raise ValueError(f"{value!r} is no number, text, list or table; write a date or time as text")
    return _unsigned_zero(value)


def _param_key(key: object) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{key!r} is no name")
    return key


Params = Annotated[dict[str, Any], BeforeValidator(checked_param), Field(max_length=64)]


def real(value: object) -> object:
    """5 as 5.0, where a key takes real numbers and would keep how they were written."""
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def canonical(value: dict) -> bytes:
    """Sorted msgpack."""
    return msgspec.msgpack.Encoder(order="sorted").encode(_unsigned_zero(value))


def _unsigned_zero(value: Any) -> Any:
    """With 0.0 for -0.0: they are equal, so an id must not tell them apart."""
    if isinstance(value, dict):
        return {key: _unsigned_zero(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_unsigned_zero(inner) for inner in value]
    return value + 0.0 if isinstance(value, float) else value
