"""How long the command line takes, and what it loads.

In: the home of a running daemon. Out: figures of `--help` and `status`, beside bare Python and `import click`.

The commands take turns, so that each meets the same moments of a busy machine.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from p2prl.bench.figures import Figure, quantile, spread
from p2prl.errors import P2prlError

NUM_ROUNDS = 15
HEAVY = ("torch", "transformers", "hivemind", "numpy", "pydantic")


def measure(home: Path) -> list[Figure]:
    """Raises P2prlError when a command fails."""
    arguments = {
        "help": ("-m", "p2prl", "--help"),
        "status": ("-m", "p2prl", "--home", str(home), "status"),
        "python": ("-c", "pass"),
        "click": ("-c", "import click"),
    }
    times: dict[str, list[float]] = {name: [] for name in arguments}
    for _ in range(NUM_ROUNDS):
        for name, words in arguments.items():
            times[name].append(wall_s(words))
    return [
        _figure("help", 0.3, times, arguments["help"], "`p2prl --help`"),
        _figure("status", 0.5, times, arguments["status"], "`p2prl status` against a running daemon"),
    ]


def wall_s(arguments: Sequence[str]) -> float:
    """Of one Python process, from spawn to exit."""
    started = time.monotonic()
    _python(arguments)
    return time.monotonic() - started


def imported(arguments: Sequence[str]) -> frozenset[str]:
    """Every top-level package that a command imports, by Python's own account."""
    lines = _python(("-X", "importtime", *arguments)).stderr.splitlines()
    modules = (line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:"))
    return frozenset(module.partition(".")[0] for module in modules)


def _figure(name: str, target_s: float, times: dict[str, list[float]], arguments: Sequence[str], what: str) -> Figure:
    heavy = sorted(imported(arguments) & set(HEAVY))
    return Figure(
        name=f"command_{name}",
        value=quantile(times[name], 0.5),
        unit="s",
        how=f"median wall time of {what}; imports none of {', '.join(HEAVY)} (by -X importtime)",
        reference=quantile(times["click"], 0.5),
        reference_how='`python -c "import click"`',
        target=target_s,
        num_samples=len(times[name]),
        details=spread(times[name]) | {"python_pass": quantile(times["python"], 0.5)},
        broken=f"it imports {', '.join(heavy)}" if heavy else "",
    )


def _python(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise P2prlError(f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done
