"""`p2prl bench staleness`: options to a study, JSON and table out."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from p2prl.bench.staleness import FULL_OBJECTIVES, NO_MAX_AGE, Run, Settings
from p2prl.bench.staleness_summary import summarise
from p2prl.cli.bench_staleness import show, specs_of, staleness
from p2prl.cli.main import group


def given(*words: str) -> dict:
    params = staleness.make_context("staleness", list(words), resilient_parsing=False).params
    return {name: value for name, value in params.items() if name != "as_json"}


def test_the_full_study_and_the_quick_one() -> None:
    full, quick = specs_of(given()), specs_of(given("--quick"))
    assert len(full) == len(FULL_OBJECTIVES) * 7 * 5
    assert {spec.objective for spec in quick} == {"gepo_vcpo", "gepo", "grpo", "tis"}
    assert {(spec.age, spec.seed) for spec in quick} == {(0, 0), (0, 1), (32, 0), (32, 1)}
    assert {spec.settings for spec in full} == {Settings(num_steps=300)}
    assert {spec.settings for spec in quick} == {Settings(num_steps=250)}
    assert Settings().final_answers == 2048 and Settings().max_age == NO_MAX_AGE


def test_what_is_said_counts_in_the_quick_study_too() -> None:
    (spec,) = specs_of(
        given("--quick", "--objectives", "a3po", "--ages", "8", "--seeds", "1", "--law", "weibull", "--max-age", "4")
    )
    assert (spec.objective, spec.age, spec.seed, spec.law, spec.settings.max_age) == ("a3po", 8, 0, "weibull", 4)


@pytest.mark.parametrize("words", [["--ages", "0,x"], ["--seeds", "0"], ["--law", "gamma"], ["--steps", "-1"]])
def test_nonsense_is_a_usage_error(words: list[str]) -> None:
    assert CliRunner().invoke(staleness, words).exit_code == 2


def test_a_whole_study_in_the_homes_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps each, in one worker; the second time without matplotlib, and with a table."""
    words = ["--home", str(tmp_path), "bench", "staleness", "--objectives", "gepo", "--ages", "0,1", "--seeds", "1"]
    words += ["--steps", "2", "--groups", "2", "--workers", "1"]
    made = CliRunner().invoke(group, [*words, "--json"])
    assert made.exit_code == 0, made.output
    told = json.loads(made.stdout)
    assert told.keys() == {"schema", "runs", "summary"} and told["schema"] == 1
    assert [(run["objective"], run["age"], run["law"], run["seed"]) for run in told["runs"]] == [
        ("gepo", 0, "fixed", 0),
        ("gepo", 1, "fixed", 0),
    ]
    for run in told["runs"]:
        assert 0 < run["reward_final"] <= run["reward_best"] <= 1
        assert run["collapsed"] is (run["reward_final"] < run["reward_best"] / 2)
    assert (told["summary"][0]["age"], told["summary"][0]["loss_vs_fresh_percent"]) == (0, 0)
    folder = tmp_path / "cache" / "bench" / "staleness"
    assert json.loads((folder / "staleness.json").read_bytes()) == told
    assert {path.name for path in folder.glob("*.png")} == {"reward_by_age.png", "over_steps.png", "collapse.png"}

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    again = CliRunner().invoke(group, words)
    assert again.exit_code == 0, again.output
    assert "2 of 2 runs are finished already" in again.stderr and "p2prl[plots]" in again.stderr
    assert [line.split()[:3] for line in again.stdout.splitlines() if line.startswith("gepo")] == [
        ["gepo", "0", "1"],
        ["gepo", "1", "1"],
    ]


def test_the_table_marks_what_is_significant_and_what_collapsed(capsys: pytest.CaptureFixture[str]) -> None:
    def run(age: int, seed: int, final: float) -> Run:
        return Run("tis", age, "fixed", seed, final, 0.8, final < 0.4, 250, 0, {}, 1.0, ((0, 0.7),), Settings())

    runs = [run(age, seed, 0.8 - age / 50 + seed / 1000) for age in (0, 32) for seed in range(3)]
    show(summarise(runs), color=False)
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("tis")]
    assert rows[0] == ["tis", "0", "3", "0.8010", "0.0010", "+0.0", "+0.0", "to", "+0.0", "0"]
    assert rows[1][:6] == ["tis", "32", "3", "0.1610", "0.0010", "+79.9"] and rows[1][-2:] == ["*", "3"]
