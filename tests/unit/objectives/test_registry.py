from types import SimpleNamespace

import pytest

from p2prl.errors import ConfigError
from p2prl.objectives import find_objective, gepo, registry


def test_it_finds_the_built_in_ones() -> None:
    assert find_objective("gepo") is gepo


def test_an_unknown_name_gets_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gepo_vcpo'"):
        find_objective("gepo_vcop")


def test_an_installed_package_can_add_one(monkeypatch: pytest.MonkeyPatch) -> None:
    point = SimpleNamespace(name="mine", load=lambda: gepo)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == "p2prl.objectives" else [])
    assert find_objective("mine") is gepo
