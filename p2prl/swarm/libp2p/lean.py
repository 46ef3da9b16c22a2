"""hivemind without torch: 70 MB and half a second for a daemon instead of 320 MB and twice the time.

In: the installed hivemind. Out: `hivemind.dht`, `hivemind.p2p` and `hivemind.utils`, importable as always.

hivemind's own `__init__` imports its trainers, and with them torch and scipy; of what the network needs, only two names
that we never use touch torch: futures between forked processes and descriptions of tensors. They become placeholders
that raise when somebody uses them. A process that has hivemind already keeps what it has.
"""

import importlib
import importlib.util
import os
import sys
import warnings
from types import ModuleType
from typing import NoReturn

PLACEHOLDERS = {"hivemind.utils.mpfuture": "MPFuture", "hivemind.utils.tensor_descr": "TensorDescriptor"}


def import_hivemind() -> None:
    """Import the network half of hivemind; its heavy half stays on the disk."""
    if "hivemind" in sys.modules:
        return
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")  # hivemind reads it once, when it is imported
    spec = importlib.util.find_spec("hivemind")
    if spec is None:
        raise ImportError("hivemind is not installed. Run: pip install hivemind==1.1.12")
    sys.modules["hivemind"] = importlib.util.module_from_spec(spec)  # its folder is known, its __init__ never runs
    for module, name in PLACEHOLDERS.items():
        stand_in = ModuleType(module, f"Stands in for {module}, which needs torch.")
        setattr(stand_in, name, _placeholder(module, name))
        sys.modules[module] = stand_in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its deprecations are not the user's to repair
        importlib.import_module("hivemind.dht")


def _placeholder(module: str, name: str) -> type:
    def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(f"{module}.{name} is not loaded here: p2prl uses hivemind's network alone")

    return type(name, (), {"__init__": refuse})
