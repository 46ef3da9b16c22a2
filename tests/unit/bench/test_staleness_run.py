"""One run on the real policy: its ages, its determinism, what admission refuses."""

import math

import msgspec
import pytest

from p2prl.bench import staleness_run
from p2prl.bench.staleness import RunSpec, Settings
from p2prl.bench.staleness_sampler import Sampler

TINY = Settings(num_steps=3, groups_per_step=4, eval_answers=8, final_answers=16)


def spec(objective: str = "gepo", age: int = 0, law: str = "fixed", **settings) -> RunSpec:
    return RunSpec(objective, law, age, 0, msgspec.structs.replace(TINY, **settings))


def run(of: RunSpec):
    return staleness_run.run(of, lambda num_ticks: None)


@pytest.mark.parametrize("objective", ["gepo_vcpo", "a3po"])
def test_the_same_run_twice_is_the_same(objective: str) -> None:
    first = run(spec(objective, 2))
    run(spec("tis", 1))  # what ran between them in the process changes nothing
    assert run(spec(objective, 2)) == first
    assert run(spec(objective, 2, groups_per_step=5)) != first


def test_groups_are_as_old_as_asked_for() -> None:
    result, trace = run(spec(age=2, num_steps=5))
    assert trace["age_mean"] == [0, 1, 2, 2, 2]
    assert (result.num_updates, result.num_skipped, result.refused) == (5, 0, {})
    assert result.rho_on == pytest.approx(1, abs=1e-3)
    assert [tick for tick, _ in result.evaluations] == [0]


def test_what_is_trained_on_was_drawn_under_the_version_of_that_age(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    train = staleness_run.Learner.train
    monkeypatch.setattr(staleness_run.Learner, "train", lambda self, step: steps.append(step) or train(self, step))
    run(spec(age=2, num_steps=5))
    made = {step.parent.step: step.parent for step in steps}
    assert len(set(made.values())) == 5
    for tick, step in enumerate(steps):
        assert step.parent.step == tick
        assert {group.versions for group in step.groups} == {(made[max(0, tick - 2)],)}
        assert step.ages == ((min(tick, 2),),) * 4
    assert len({group_id for step in steps for group_id in step.group_ids}) == 20


def test_fresh_groups_are_on_policy_and_old_ones_are_not() -> None:
    fresh, stale = run(spec("gepo:none"))[1], run(spec("gepo:none", 2))[1]
    assert min(value or 0 for value in fresh["ess_ratio"]) > 0.999
    assert (stale["ess_ratio"][2] or 1) < 0.999


def test_a_bound_on_age_is_the_nodes_own() -> None:
    """Version 0's groups are good for three steps; then nothing moves until those of versions 1 to 3 come."""
    result, trace = run(spec(age=5, num_steps=10, max_age=2))
    assert trace["age_mean"] == [0, 1, 2, None, None, None, 2, 2, 2, None]
    assert result.refused == {"too_old": 4 * 4}
    assert result.num_updates == 6


def test_a_random_law_mixes_ages_in_a_step() -> None:
    result, trace = run(spec(age=2, law="lognormal", num_steps=6, groups_per_step=8))
    assert trace["age_mean"][0] == 0
    assert any(age is not None and age != int(age) for age in trace["age_mean"])
    assert result.refused == {}


def test_one_group_altered_on_its_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Sampler.draw

    def altered(self: Sampler, tick: int, wanted):
        arrivals = draw(self, tick, wanted)
        arrivals[0].group = msgspec.structs.replace(arrivals[0].group, prompt_index=7)
        return arrivals

    monkeypatch.setattr(Sampler, "draw", altered)
    assert run(spec())[0].refused == {"bad_lottery": 3}


def test_best_is_the_best_seen_and_collapse_is_half_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = iter([0.7, 0.9, 0.44])
    monkeypatch.setattr(Sampler, "reward", lambda self, num_answers: next(rewards))
    result = run(spec(eval_every=2))[0]
    assert (result.reward_final, result.reward_best, result.collapsed) == (0.44, 0.9, True)
    assert result.evaluations == ((0, 0.7), (2, 0.9))


def test_the_warm_start_is_worth_what_the_readme_says() -> None:
    result = run(spec(num_steps=1, eval_answers=512))[0]
    assert result.evaluations[0][1] == pytest.approx(0.734, abs=0.06)
    assert not math.isnan(result.reward_final)
