"""What peers take is kept while they take it, and not for ever."""

from hypothesis import given
from hypothesis import strategies as st

from p2prl.weights.pulled import MAX_CONTENTS, Pulled, PulledRules

RULES = PulledRules(least_s=2.0, most_s=10.0, longest_s=100.0)


def name(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_who_was_quick_needs_it_no_more_and_who_is_slow_may_pause() -> None:
    pulled = Pulled(RULES)
    pulled.took(name(1), 0.0)
    assert pulled.now(2.0) == {name(1)}
    assert pulled.now(2.1) == frozenset()
    for now in range(2, 8):
        pulled.took(name(2), now)
    assert pulled.now(12.0) == {name(2)}, "five seconds more"
    assert pulled.now(12.1) == frozenset()
    for now in range(20, 50):
        pulled.took(name(3), now)
    assert pulled.now(59.0) == {name(3)}
    assert pulled.now(59.1) == frozenset()


def test_nobody_keeps_it_for_ever() -> None:
    pulled = Pulled(RULES)
    for now in range(200):
        pulled.took(name(1), now)
        assert (name(1) in pulled.now(now)) == (now <= 100)
    pulled.took(name(1), 220.0)
    assert pulled.now(220.0) == {name(1)}, "a new row"


@given(st.lists(st.tuples(st.integers(0, 2 * MAX_CONTENTS), st.floats(0, 5)), max_size=600))
def test_the_table_is_bounded_and_true(takes: list[tuple[int, float]]) -> None:
    pulled, now, last = Pulled(RULES), 0.0, {}
    for number, after in takes:
        now += after
        pulled.took(name(number), now)
        last[name(number)] = now
        found = pulled.now(now)
        assert name(number) in found or now > RULES.longest_s
        assert len(found) <= MAX_CONTENTS and all(now - last[each] <= RULES.most_s for each in found)
