"""What others rely on, collected from the code: commands, keys, routes, series, record fields, codes.

Run `python -m tests.architecture.surface` after a change on purpose: it writes the list that the test compares with.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import click
import msgspec

from p2prl import codec, config, errors, metrics, recipe, records, status
from p2prl.buffer.admission import REASONS
from p2prl.cli.main import COMMANDS, group
from p2prl.events import TYPES, Ring
from p2prl.node import manifests, receive_loop, verdicts
from p2prl.web.app import Counted, Door, make_app
from p2prl.weights import messages

LIST = Path(__file__).parents[1] / "vectors" / "surface.json"


def surface() -> dict[str, Any]:
    return {
        "commands": _commands(),
        "config": _keys(config.NodeConfig),
        "recipe": _keys(recipe.Recipe),
        "routes": sorted(_routes()),
        "metrics": sorted(family.name for family in metrics.Metrics().registry.collect()),
        "events": sorted(TYPES),
        "refusals": sorted(REASONS),
        "errors": {kind.__name__: kind.exit_code for kind in _subclasses(errors.P2prlError)},
        "peer_errors": sorted(kind.code for kind in [errors.PeerError, *_subclasses(errors.PeerError)]),
        "wire": {kind.__name__: list(kind.__struct_fields__) for kind in wire_records()},
        "api": {kind.__name__: list(kind.__struct_fields__) for kind in _subclasses(status.Record)},
    }


def wire_records() -> list[type[msgspec.Struct]]:
    """Everything that leaves the process, in the order of the modules."""
    modules = (records, receive_loop, verdicts, manifests, messages)
    return list(dict.fromkeys([codec.Envelope, *(kind for module in modules for kind in _wire_of(module))]))


def _wire_of(module: Any) -> list[type[msgspec.Struct]]:
    kinds = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, records.Wire)]
    return sorted((kind for kind in kinds if kind is not records.Wire), key=lambda kind: kind.__name__)


def _subclasses(kind: type) -> list[Any]:
    """Those of its own module: others depend on what was imported before."""
    below = [kind for child in kind.__subclasses__() for kind in (child, *_subclasses(child))]
    return sorted((one for one in below if one.__module__ == kind.__module__), key=lambda one: one.__name__)


def _commands() -> dict[str, list[str]]:
    found = {}
    for name, place in COMMANDS.items():
        if importlib.util.find_spec(place.partition(":")[0]) is None:
            continue
        command = group.get_command(click.Context(group), name)
        assert command is not None
        found[name] = _options(command)
        if isinstance(command, click.Group):
            for below in command.list_commands(click.Context(command)):
                child = command.get_command(click.Context(command), below)
                assert child is not None
                found[f"{name} {below}"] = _options(child)
    return found | {"": _options(group)}


def _options(command: click.Command) -> list[str]:
    return sorted(name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts))


def _keys(model: Any, head: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        key = f"{head}{field.alias or name}"
        nested = field.annotation
        keys += _keys(nested, f"{key}.") if hasattr(nested, "model_fields") else [key]
    return sorted(keys)


def _routes() -> frozenset[str]:
    commands: Any = None  # only asked when a request comes
    app = make_app(status.Status, commands, Ring(), metrics.Metrics(), Door(token="x" * 32, port=1))
    assert isinstance(app, Counted)
    return app.routes


if __name__ == "__main__":
    LIST.write_text(json.dumps(surface(), indent=1, sort_keys=True) + "\n")
