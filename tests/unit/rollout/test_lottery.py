from hypothesis import given
from hypothesis import strategies as st

from p2prl.environments.registry import HELD_OUT_FROM
from p2prl.records import Version
from p2prl.rollout.lottery import prompt_index
from tests import factories

MAKER = factories.identity(0).peer_id


def test_it_is_pinned() -> None:
    """Peers of all releases must agree: a change here needs a new wire schema."""
    assert prompt_index(MAKER, factories.BASE, 0) == 259889063762
    assert prompt_index(MAKER, factories.BASE, 0, 1000) == 650


@given(st.integers(0, 2**53), st.integers(0, 2**53), st.one_of(st.none(), st.integers(1, 2**50)))
def test_it_never_draws_a_held_out_prompt(step: int, counter: int, num_prompts: int | None) -> None:
    index = prompt_index(MAKER, Version(1, step, bytes(32)), counter, num_prompts)
    assert 0 <= index < min(num_prompts or HELD_OUT_FROM, HELD_OUT_FROM)


def test_it_depends_on_maker_version_and_counter() -> None:
    draws = {
        prompt_index(factories.identity(maker).peer_id, factories.version(step), counter)
        for maker in range(5)
        for step in range(5)
        for counter in range(5)
    }
    assert len(draws) == 125


def test_it_spreads_over_a_small_data_set() -> None:
    drawn = {prompt_index(MAKER, factories.BASE, counter, 10) for counter in range(200)}
    assert drawn == set(range(10))
