"""The figures of `bench weights` follow from the pairs; a ratio of seconds is made within a step."""

import msgspec
import pytest

from p2prl.bench import weights
from p2prl.bench.deltas import SCHEMES, Pair
from p2prl.bench.weights import QUICK, Plan


def pairs(plan: Plan) -> list[Pair]:
    """Of each rate three steps, each on a machine twice as slow as the one before."""
    found = []
    for rate in plan.rates:
        for step, slow in enumerate((1, 2, 4), plan.first_step):
            num_bytes = {"delta": 1000 * slow, "zstd": 750_000, "xor_zstd": 9000, "pulse": 8000}
            seconds = {"delta": 0.3 * slow, "apply": 0.4 * slow, "zstd": 1.0 * slow, "xor_zstd": 0.1, "pulse": 0.1}
            found.append(Pair(rate, step, 500_000, 2000 * slow, 1_000_000, num_bytes, seconds, seconds))
    return found


def test_sizes_are_means_over_steps_and_seconds_are_ratios_within_one() -> None:
    plan = Plan()
    section = weights.short(plan, pairs(plan))
    assert section["steps"] == [20, 30]
    assert section["rates"].keys() == {"1e-06", "1e-05"}
    found = section["rates"]["1e-06"]
    assert found["delta_share"] == pytest.approx(7 / 3 * 1e-3)
    assert found["zstd_share"] == pytest.approx(0.75)
    assert found["changed"] == pytest.approx(7 / 3 * 0.004)
    assert found["bits_a_change"] == pytest.approx(4.0)
    assert found["encode_over_zstd"] == pytest.approx(0.3)
    assert found["apply_over_zstd"] == found["apply_over_zstd_cpu"] == pytest.approx(0.4)
    assert found["zstd_s"] == pytest.approx(2.0)


def test_each_figure_has_its_reference_and_its_target() -> None:
    plan = Plan()
    found = {figure.name: figure for figure in weights.figures(plan, pairs(plan))}
    assert len(found) == 6
    assert {name: figure.target for name, figure in found.items() if "share" in name} == {
        "delta_share_1e-06": 0.40,
        "delta_share_1e-05": 1.0,
    }
    assert found["delta_share_1e-06"].value == pytest.approx(7 / 30)
    assert found["delta_share_1e-06"].reference == pytest.approx(0.8)
    assert found["delta_share_1e-06"].met and found["encode_over_zstd_1e-05"].met
    assert all(figure.reference is not None and figure.reference_how and figure.how for figure in found.values())


def test_a_few_steps_flatter_so_their_sizes_have_no_target() -> None:
    found = {figure.name: figure for figure in weights.figures(QUICK, pairs(QUICK))}
    assert found["delta_share_1e-06"].target is None
    assert found["apply_over_zstd_1e-06"].target == 1.0


def test_every_scheme_is_in_the_section() -> None:
    found = weights.short(QUICK, pairs(QUICK))["rates"]["1e-05"]
    assert {f"{name}_share" for name in SCHEMES} | {f"{name}_s" for name in SCHEMES} <= found.keys()


def test_pairs_survive_the_pipe() -> None:
    sent = msgspec.json.encode([msgspec.to_builtins(pair) for pair in pairs(Plan())])
    assert msgspec.json.decode(sent, type=list[Pair]) == pairs(Plan())
