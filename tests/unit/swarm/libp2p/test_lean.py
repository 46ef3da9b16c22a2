"""The daemon's network brings hivemind along, and neither torch nor hivemind's trainers."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "scipy", "transformers", "hivemind.averaging", "hivemind.moe", "hivemind.optim")


def _run(script: str) -> str:
    command = [sys.executable, "-W", "error", "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@pytest.mark.parametrize("room", ["p2prl.swarm.libp2p.transport", "p2prl.node.build", "p2prl.cli.run"])
def test_the_daemon_loads_no_torch(room: str) -> None:
    script = f"import sys, {room}, p2prl.swarm.libp2p.transport; print([n for n in {HEAVY} if n in sys.modules])"
    assert _run(script) == "[]"


def test_what_stands_in_for_torch_says_so_when_used() -> None:
    script = (
        "from p2prl.swarm.libp2p import lean\nlean.import_hivemind()\nfrom hivemind.utils import MPFuture\n"
        "try:\n    MPFuture()\nexcept RuntimeError as error:\n    print(error)"
    )
    assert _run(script) == "hivemind.utils.mpfuture.MPFuture is not loaded here: p2prl uses hivemind's network alone"


def test_a_hivemind_that_is_there_already_stays_as_it_is() -> None:
    script = (
        "import sys, types\nmine = sys.modules['hivemind'] = types.ModuleType('hivemind')\n"
        "from importlib.util import module_from_spec, spec_from_file_location\n"
        "import pathlib, p2prl\n"
        "path = pathlib.Path(p2prl.__file__).parent / 'swarm' / 'libp2p' / 'lean.py'\n"
        "spec = spec_from_file_location('lean', path)\nlean = module_from_spec(spec)\nspec.loader.exec_module(lean)\n"
        "lean.import_hivemind()\nprint(sys.modules['hivemind'] is mine, 'hivemind.dht' in sys.modules)"
    )
    assert _run(script) == "True False"
