"""What a command imports is told by Python itself; a failing command is no figure."""

import pytest

from p2prl.bench import commands
from p2prl.errors import P2prlError


def test_imports_are_found() -> None:
    assert {"json", "csv"} <= commands.imported(("-c", "import json.decoder, csv"))
    assert "csv" not in commands.imported(("-c", "import json"))


def test_help_imports_nothing_heavy() -> None:
    assert not commands.imported(("-m", "p2prl", "--help")) & set(commands.HEAVY)


def test_a_command_that_imports_torch_never_meets_its_target() -> None:
    times = {name: [0.01] for name in ("click", "python", "help")}
    heavy = commands._figure("help", 0.3, times, ("-c", "import numpy"), "a heavy command")
    assert (heavy.met, heavy.broken) == (False, "it imports numpy")
    assert commands._figure("help", 0.3, times, ("-c", "import json"), "a light command").met


def test_a_failing_command_raises() -> None:
    with pytest.raises(P2prlError, match="ended with 3"):
        commands.wall_s(("-c", "raise SystemExit(3)"))
