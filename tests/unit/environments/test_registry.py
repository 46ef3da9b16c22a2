import subprocess
import sys

import pytest

from p2prl.environments.registry import load_environment, nearest
from p2prl.errors import ConfigError


def test_addition_by_name() -> None:
    environment = load_environment("addition", {"digits": 3})
    assert environment.name == "addition"
    assert environment.version.startswith("p2prl==")
    assert len(environment.prompt(5)) == 8


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("additon", {}, "no environment 'additon'; did you mean 'addition'"),
        ("", {}, "no environment ''"),
        ("reasoning_gym", {}, "did you mean 'reasoning_gym:NAME'"),
        ("reasoning_gym:", {}, "did you mean 'reasoning_gym:NAME'"),
        ("addition", {"digit": 2}, "no parameter 'digit'; did you mean 'digits'"),
        ("addition", {"version": "x"}, "no parameter 'version'"),
        ("addition", {"digits": 2.0}, "digits = 2.0 is not a whole number from 1 to 8"),
    ],
)
def test_what_is_unknown_is_named_with_the_nearest(name: str, params: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_environment(name, params)


def test_something_is_always_nearest() -> None:
    assert nearest("zzz", ["one", "two"]) in ("one", "two")


def test_addition_loads_neither_torch_nor_reasoning_gym() -> None:
    code = """
import sys
from p2prl.environments.registry import load_environment
from p2prl.environments import judge, messages, rewarder
load_environment("addition", {})
raise SystemExit(bool({"torch", "transformers", "reasoning_gym"} & sys.modules.keys()))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
