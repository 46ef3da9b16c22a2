"""The figures of `bench step` follow from the rounds; a ratio is made within a round."""

import pytest

from p2prl.bench import step
from p2prl.bench.step import VARIANTS, Measured


def measured() -> Measured:
    """Three rounds, each on a machine twice as slow as the one before."""
    seconds = {"plain": 10.0, "plain_shared": 8.0, "vcpo": 11.0, "naive": 30.0, "a3po": 8.0, "recompute": 10.0}
    rounds = tuple({name: slow * value for name, value in seconds.items()} for slow in (1, 2, 4))
    return Measured(rounds, (seconds, seconds), dict.fromkeys(VARIANTS, 5_000_000), 2000, "cpu", 2)


def test_a_busy_machine_slows_both_sides() -> None:
    short = step.short(measured())
    assert short["vcpo_over_plain"] == pytest.approx(1.1)
    assert short["vcpo_over_plain_shared"] == pytest.approx(1.375)
    assert short["naive_over_plain"] == pytest.approx(3.0)
    assert short["cpu_time"]["vcpo_over_plain"] == pytest.approx(1.1)
    assert short["a3po_over_recompute"] == pytest.approx(0.8)
    assert short["tokens_per_s"]["vcpo"] == pytest.approx(2000 / 22)
    assert short["peak_memory_bytes"]["plain"] == 5_000_000


@pytest.mark.parametrize(("name", "target"), [("smollm2", 1.20), ("builtin", None)])
def test_each_figure_has_its_reference_and_its_target(name: str, target: float | None) -> None:
    found = {figure.name: figure for figure in step.figures(name, step.MODELS[name], measured())}
    vcpo = found[f"{name}_vcpo_over_plain"]
    assert vcpo.target == target and vcpo.met is (None if target is None else True)
    assert vcpo.details["over_plain_shared"] == pytest.approx(1.375)
    assert found[f"{name}_a3po_over_recompute"].met is True
    assert found[f"{name}_naive_over_plain"].details["over_vcpo"] == pytest.approx(30 / 11)
    assert found[f"{name}_peak_memory"].value == 5.0
    assert all(figure.reference is not None and figure.reference_how and figure.how for figure in found.values())
