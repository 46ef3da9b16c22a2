"""`p2prl bench weights`: a table or one JSON line; nothing of it is measured here."""

import json

import pytest
from click.testing import CliRunner

from p2prl.bench import transfers
from p2prl.bench import weights as benchmark
from p2prl.cli.main import group
from tests.unit.bench.test_transfers import measured
from tests.unit.bench.test_weights import pairs


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> list[benchmark.Plan]:
    """What would have been measured."""
    asked: list[benchmark.Plan] = []

    def measure(plan: benchmark.Plan, say: object) -> list[benchmark.Pair]:
        asked.append(plan)
        return pairs(plan)

    monkeypatch.setattr(benchmark, "measure", measure)
    monkeypatch.setattr(transfers, "measure", lambda say, version_mib: measured())
    return asked


def test_one_json_line_with_figures_and_a_section(plans: list[benchmark.Plan], tmp_path) -> None:
    done = CliRunner().invoke(group, ["--home", str(tmp_path), "bench", "weights", "--json", "--threads", "3"])
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    report = json.loads(line)
    assert report["schema"] == 1 and report["met"] is False, "the delayed transfer of this test is too slow"
    assert report["transfer"]["one_over_raw"] == pytest.approx(0.8)
    assert report["codec"]["threads"] == 3 and report["codec"]["steps"] == [20, 30]
    assert report["figures"]["delta_share_1e-06"]["target"] == 0.40
    assert plans[0].threads == 3 and plans[0].models_cache.startswith(str(tmp_path))


def test_quick_makes_few_steps_and_a_table_says_what_was_measured(plans: list[benchmark.Plan], tmp_path) -> None:
    done = CliRunner().invoke(group, ["--home", str(tmp_path), "bench", "weights", "--quick"])
    assert done.exit_code == 0, done.output
    assert plans[0].num_steps == benchmark.QUICK.num_steps
    assert "delta_share_1e-05" in done.output and "PULSE" in done.output
