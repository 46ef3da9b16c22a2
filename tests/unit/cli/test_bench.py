"""`p2prl bench`: lists what is built, imports it late, shows figures."""

import subprocess
import sys

import pytest
from click.testing import CliRunner

from p2prl.bench.figures import Figure
from p2prl.cli.bench import BENCHMARKS, SUMMARIES, bench
from p2prl.cli.bench_node import bound, show


def figure(**over) -> Figure:
    given = {
        "name": "join",
        "value": 0.51,
        "unit": "s",
        "how": "a clock",
        "reference": 0.31,
        "reference_how": "hivemind",
    }
    return Figure(**(given | {"target": 3.0} | over))


def test_each_listed_benchmark_is_there() -> None:
    assert BENCHMARKS.keys() == SUMMARIES.keys()
    listing = CliRunner().invoke(bench, ["--help"])
    assert listing.exit_code == 0
    for name in BENCHMARKS:
        assert name in listing.output
        assert CliRunner().invoke(bench, [name, "--help"]).exit_code == 0


def test_an_unknown_benchmark_is_a_usage_error() -> None:
    assert CliRunner().invoke(bench, ["nod"]).exit_code == 2


def test_listing_imports_no_benchmark() -> None:
    script = (
        "import sys; from click.testing import CliRunner; from p2prl.cli.bench import bench; "
        "CliRunner().invoke(bench, ['--help']); print([name for name in sys.modules if name.startswith('p2prl.bench')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("over", "text"), [({}, "< 3"), ({"at_least": True, "target": 95.0}, ">= 95"), ({"target": None}, "")]
)
def test_bound(over: dict, text: str) -> None:
    assert bound(figure(**over)) == text


def test_the_table_says_value_bound_verdict_and_how(capsys: pytest.CaptureFixture[str]) -> None:
    show([figure(), figure(name="idle_cpu", value=4.0, unit="%", target=2.0, broken="it was not idle")], color=False)
    shown = capsys.readouterr().out
    rows = {line.split()[0]: line.rstrip() for line in shown.splitlines() if line}
    assert "0.51 s" in rows["join"] and "< 3" in rows["join"] and rows["join"].endswith("met")
    assert rows["idle_cpu"].endswith("missed")
    assert "a clock. Reference: hivemind." in shown.replace("\n", " ")
    assert "it was not idle" in shown
    assert "\x1b[" not in shown
