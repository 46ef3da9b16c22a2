from importlib.metadata import EntryPoint

import pytest

from p2prl.errors import ConfigError
from p2prl.objectives import OBJECTIVES, find_objective, gepo, registry
from tests.batches import draw


def shifted(batch, logp, *, by: float = 1.0):
    """A third party's objective: a plain function."""
    return (logp * batch.advantage[:, None]).sum() + by, {"shift": by}


def install(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    points = [EntryPoint(name, f"{__name__}:shifted", "p2prl.objectives") for name in names]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "p2prl.objectives" else [])
    monkeypatch.setattr(EntryPoint, "load", lambda point: shifted)


def test_it_finds_the_built_in_ones() -> None:
    assert find_objective("gepo") is gepo is OBJECTIVES["gepo"]
    assert "gepo" in OBJECTIVES and "nothing" not in OBJECTIVES
    assert len(OBJECTIVES) == len(list(OBJECTIVES)) >= 17


@pytest.mark.parametrize("find", [find_objective, OBJECTIVES.__getitem__])
def test_an_unknown_name_gets_the_nearest(find) -> None:
    with pytest.raises(ConfigError, match="did you mean 'gepo_vcpo'"):
        find("gepo_vcop")


def test_an_installed_package_can_add_one(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "mine")
    batch, logp = draw(1)
    mine = OBJECTIVES["mine"]
    loss, metrics = mine(batch, logp, by=3.0)
    assert loss.isfinite() and metrics == {"shift": 3.0}
    assert (mine.per, mine.options) == ("answer", {"by": 1.0})
    assert "mine" in OBJECTIVES and "mine" in list(OBJECTIVES)
    with pytest.raises(ConfigError, match="did you mean 'by'"):
        mine(batch, logp, bye=1.0)
    with pytest.raises(ConfigError, match="did you mean 'mine'"):
        find_objective("mime")


@pytest.mark.parametrize("names", [("gepo",), ("mine", "mine")])
def test_a_name_taken_twice_is_an_error(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    install(monkeypatch, *names)
    with pytest.raises(ConfigError, match="uninstall one"):
        find_objective("something else")


def test_other_packages_are_not_loaded_before_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "mine")

    def load(point: EntryPoint):
        raise AssertionError("loaded")

    monkeypatch.setattr(EntryPoint, "load", load)
    assert find_objective("gepo") is gepo
    assert "mine" in list(OBJECTIVES)
    with pytest.raises(AssertionError, match="loaded"):
        find_objective("mine")
