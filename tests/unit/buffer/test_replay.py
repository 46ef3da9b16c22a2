import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl import recipe
from p2prl.buffer.replay import Entry, ReplayRules, age_quantiles, choose, rules_of
from p2prl.records import Segment, Trajectory
from tests.factories import completion, group, version

RULES = ReplayRules(groups_per_step=4, longest_wait_s=10.0, max_age=5)


def entry(number: int, maker: str = "a", age: int | None = 0, admitted_at: float = 0.0) -> Entry:
    return Entry(bytes([number]) * 32, maker, age, admitted_at)


def numbers(ids: tuple[bytes, ...]) -> list[int]:
    return [group_id[0] for group_id in ids]


entries = st.lists(
    st.builds(entry, st.integers(0, 40), st.sampled_from("abcd"), st.none() | st.integers(0, 8), st.floats(0, 100)),
    max_size=40,
    unique_by=lambda made: made.id,
)
rules = st.builds(ReplayRules, st.integers(1, 12), st.floats(0.1, 50), st.integers(1, 8))


@given(entries, st.floats(100, 200), rules, st.floats(0, 150), st.randoms(use_true_random=False))
def test_bounds(
    given_entries: list[Entry], now: float, limits: ReplayRules, since: float, source: random.Random
) -> None:
    choice = choose(given_entries, now, limits, since=since)
    by_id = {made.id: made for made in given_entries}
    batch = [by_id[group_id] for group_id in choice.batch]
    usable = [made for made in given_entries if made.age is not None and made.age <= limits.max_age]
    assert len(batch) <= limits.groups_per_step
    assert len(set(choice.batch)) == len(batch)
    assert all(made in usable for made in batch)
    assert set(choice.dropped) == {made.id for made in given_entries} - {made.id for made in usable}
    if len({made.maker for made in usable}) >= 3 and batch:
        most = max(Counter(made.maker for made in batch).values())
        assert most <= max(1, len(batch) // 2)
    assert bool(batch) == (choice.wait_s == 0.0)
    if not batch and usable:  # it comes at the time it names
        assert 0 < choice.wait_s <= limits.longest_wait_s
        assert choose(given_entries, now + choice.wait_s + 1e-6, limits, since=min(since, now)).batch
    shuffled = list(given_entries)
    source.shuffle(shuffled)
    assert choose(shuffled, now, limits, since=since) == choice


def test_the_youngest_go_first_and_of_those_the_newest() -> None:
    found = [entry(1, age=3), entry(2, age=1), entry(3, age=1, admitted_at=1.0), entry(4, age=0), entry(5, age=2)]
    assert numbers(choose(found, 2.0, RULES).batch) == [4, 3, 2, 5]


def test_a_maker_whose_groups_grew_old_is_not_starved_by_fresh_ones() -> None:
    fresh = [entry(number, "a") for number in range(8)] + [entry(10 + number, "b") for number in range(8)]
    old = [entry(20 + number, "c", age=5 - number % 2) for number in range(4)]
    batch = numbers(choose([*fresh, *old], 0.0, ReplayRules(6, 10.0, 5)).batch)
    assert [number // 10 for number in batch] == [0, 1, 2, 0, 1, 2]
    assert {number for number in batch if number >= 20} == {21, 23}, "its youngest first"


def test_a_small_batch_waits_its_time() -> None:
    found = [entry(1, admitted_at=3.0), entry(2, admitted_at=5.0)]
    early = choose(found, 9.0, RULES)
    assert (early.batch, early.wait_s) == ((), 4.0)
    assert numbers(choose(found, 13.0, RULES).batch) == [2, 1]
    assert choose(found, 13.0, RULES, since=12.0).wait_s == 9.0


def test_one_peer_gets_at_most_half_of_a_step() -> None:
    crowd = [entry(number, "a") for number in range(10)]
    assert len(choose(crowd, 0.0, RULES).batch) == 4
    assert len(choose([*crowd, entry(20, "b", age=5)], 0.0, RULES).batch) == 4
    found = [*crowd, entry(20, "b", age=5), entry(21, "c", age=4)]
    assert sorted(numbers(choose(found, 0.0, RULES).batch))[-2:] == [20, 21]
    wide = ReplayRules(groups_per_step=8, longest_wait_s=10.0, max_age=5)
    assert choose(found, 0.0, wide).batch == ()
    assert len(choose(found, 10.0, wide).batch) == 4  # two of a, and what the others gave


def test_what_is_too_old_or_unknown_is_dropped() -> None:
    choice = choose([entry(1, age=6), entry(2, age=None), entry(3, age=5)], 100.0, RULES)
    assert numbers(choice.dropped) == [1, 2]
    assert numbers(choice.batch) == [3]
    assert choose([entry(1, age=6)], 100.0, RULES).batch == ()


def test_rules_come_from_the_recipe() -> None:
    addition, _ = recipe.find("addition")
    assert rules_of(addition) == ReplayRules(
        addition.learner.groups_per_step, addition.learner.longest_wait_s, addition.learner.max_age
    )


@pytest.mark.parametrize("limit", [1, 2, 3, 5])
def test_small_steps_with_many_makers(limit: int) -> None:
    found = [entry(number, "abcdef"[number]) for number in range(6)]
    assert len(choose(found, 0.0, ReplayRules(limit, 10.0, 5)).batch) == limit


def test_age_quantiles_count_tokens_not_groups() -> None:
    young, old = group(rewards=(1.0,)), group(rewards=(1.0, 0.0, 0.0))
    assert age_quantiles([young, old], [(0,), (7,)], (0.25, 0.26, 0.5, 0.95)) == (0.0, 7.0, 7.0, 7.0)
    assert age_quantiles([], [], (0.5, 0.95)) == (0.0, 0.0)


def test_age_quantiles_follow_the_segments() -> None:
    mixed = completion(3, 4, 5, 6, segments=(Segment(0, 3), Segment(1, 1)))
    one = group(versions=(version(1), version(5)), trajectories=(Trajectory(mixed, 1.0),))
    assert age_quantiles([one], [(4, 0)], (0.25, 0.5)) == (0.0, 4.0)
