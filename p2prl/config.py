"""What a volunteer prefers: defaults < config.toml < P2PRL_SECTION__KEY < `--set section.key=value`.

In: a config file, the environment, overrides. Out: `NodeConfig` and the origin of each value. The daemon never writes
the file. A misspelt section or key is refused wherever it comes from.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from p2prl.errors import ConfigError
from p2prl.recipe import explain

ENV_PREFIX = "P2PRL_"
RESERVED_ENV = {"P2PRL_HOME"}


RATE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMG]i?)?B?(?:/s)?\s*")
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kMGT]i?)?B?\s*")
UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def parse_rate(value: object) -> object:
    """Bytes a second from "5MB/s", "800 kB/s", "20MiB" or a number; anything else is pydantic's to refuse."""
    if not isinstance(value, str):
        return value
    found = RATE.fullmatch(value)
    if found is None:
        raise ValueError(f"{value!r} is no rate: write it as 5MB/s, or 0 for no cap")
    return float(found[1]) * UNITS[found[2] or ""]


def parse_size(value: object) -> object:
    """Bytes from "100GB", "500 MiB" or a number; anything else is pydantic's to refuse."""
    if not isinstance(value, str):
        return value
    found = SIZE.fullmatch(value)
    if found is None:
        raise ValueError(f"{value!r} is no size: write it as 100GB")
    return int(float(found[1]) * UNITS[found[2] or ""])


Rate = Annotated[float, BeforeValidator(parse_rate), Field(ge=0, allow_inf_nan=False)]
Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0, le=2**53)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class NodeSection(_Section):
    name: Annotated[str, Field(max_length=64)] = ""
    """Shown to other peers; empty: two words made from the peer id."""
    role: Literal["full", "rollout", "learner", "relay"] = "full"
    """full: everything; rollout: never trains; learner: never generates; relay: neither."""
    recipe: str = ""
    """What `p2prl run` runs without an argument; empty: the last one."""


class SwarmSection(_Section):
    host: str = "0.0.0.0"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 24420
    """TCP port for peers; 0: any free one."""
    join: tuple[str, ...] = ()
    """Extra bootstrap multiaddrs."""
    relay: bool = True
    up: Rate = 0.0
    """At most so much to all peers together, as "5MB/s"; 0: no cap."""
    down: Rate = 0.0
    """At most so much from all peers together; 0: no cap."""


class LimitsSection(_Section):
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads of each child; 0: cores / children."""


class RolloutSection(_Section):
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    """auto: vLLM on a GPU where it is installed and fits, else transformers."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 in transformers on a CPU, where it agrees best with the learner; else bfloat16."""
    adapters: Literal["merged", "name"] = "merged"
    """How vLLM gets a LoRA recipe's versions: merged into its weights, as the learner has them, or by name, at once."""


class StorageSection(_Section):
    keep_checkpoints: Annotated[int, Field(ge=1, le=100)] = 3
    cache: Size = 100_000_000_000
    """At most so much of versions on disk, as "100GB"; the newest stays, and what is in use."""


class WebSection(_Section):
    host: Literal["127.0.0.1", "::1"] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8420
    hosts: tuple[str, ...] = ()
    """Further Host headers to accept."""


class LogSection(_Section):
    level: Literal["debug", "info", "warning", "error"] = "info"


class NodeConfig(_Section):
    node: NodeSection = NodeSection()
    swarm: SwarmSection = SwarmSection()
    limits: LimitsSection = LimitsSection()
    rollout: RolloutSection = RolloutSection()
    storage: StorageSection = StorageSection()
    web: WebSection = WebSection()
    log: LogSection = LogSection()


def load(path: Path, environ: Mapping[str, str], overrides: Sequence[str] = ()) -> tuple[NodeConfig, dict[str, str]]:
    """(config, origin of each `section.key`: default, the file, the variable or --set)."""
    layers = [(str(path), _from_file(path)), *_from_environment(environ), *(_from_flag(text) for text in overrides)]
    values: dict[str, dict[str, Any]] = {}
    origins = {f"{section}.{key}": "default" for section, key in _keys()}
    for origin, layer in layers:
        for section, entries in layer.items():
            if not isinstance(entries, dict):
                raise ConfigError(f"{origin}: {section!r} must be a section, as in [{section}]")
            for key, value in entries.items():
                values.setdefault(section, {})[key] = value
                origins[f"{section}.{key}"] = origin
        _validate(values, origin)
    return _validate(values, str(path)), origins


def _validate(values: dict[str, dict[str, Any]], origin: str) -> NodeConfig:
    try:
        return NodeConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{origin}: {explain(error, NodeConfig)}. See: p2prl config show") from None


def _from_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}") from None


def _from_environment(environ: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    layers: list[tuple[str, dict[str, Any]]] = []
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX) or name in RESERVED_ENV:
            continue
        section, separator, key = name.removeprefix(ENV_PREFIX).lower().partition("__")
        if not separator:
            raise ConfigError(f"unknown variable {name}: they look like P2PRL_SECTION__KEY, as P2PRL_WEB__PORT=8421")
        layers.append((name, {section: {key: _value(environ[name])}}))
    return layers


def _from_flag(text: str) -> tuple[str, dict[str, Any]]:
    name, separator, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    if not separator or not dot:
        raise ConfigError(f"--set {text!r} is not SECTION.KEY=VALUE, as in --set web.port=8421")
    return "--set", {section: {key: _value(value.strip())}}


def _value(text: str) -> Any:
    """As TOML reads it where it can (numbers, true, lists), else the text itself."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _keys() -> list[tuple[str, str]]:
    return [
        (section, key)
        for section, field in NodeConfig.model_fields.items()
        for key in field.annotation.model_fields  # pyright: ignore[reportOptionalMemberAccess,reportAttributeAccessIssue]
    ]
