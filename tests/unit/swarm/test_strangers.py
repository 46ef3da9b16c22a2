"""Wrong networks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.swarm.strangers import Answer, wrong_network

OWN, OTHER, THIRD = (bytes([number]) * 32 for number in range(3))


@pytest.mark.parametrize(
    ("swarms", "stops"),
    [
        ([], False),
        ([OWN], False),
        ([OTHER], True),
        ([None], False),
        ([OTHER, THIRD], True),
        ([OTHER, None], False),  # the right one may be down
        ([OTHER, OWN], False),
    ],
)
def test_only_when_every_bootstrap_answered_wrongly(swarms: list[bytes | None], stops: bool) -> None:
    answers = [Answer(f"/a/{number}", swarm, "other") for number, swarm in enumerate(swarms)]
    text = wrong_network(answers, [answer.address for answer in answers], OWN, "mine")
    assert bool(text) == stops
    if stops:
        assert "'other'" in text
        assert "'mine'" in text
        assert OTHER.hex()[:8] in text


def test_addresses_of_earlier_runs_stop_nobody_and_may_save_him() -> None:
    assert wrong_network([Answer("/old", OTHER)], [], OWN, "mine") == ""
    answers = [Answer("/named", OTHER), Answer("/old", OWN)]
    assert wrong_network(answers, ["/named"], OWN, "mine") == ""
    assert wrong_network(answers[:1], ["/named"], OWN, "mine")


@given(st.lists(st.sampled_from([OWN, OTHER, None]), max_size=6), st.integers(0, 6))
def test_a_node_is_stopped_only_by_answers_of_others_alone(swarms: list[bytes | None], num_named: int) -> None:
    answers = [Answer(f"/a/{number}", swarm) for number, swarm in enumerate(swarms)]
    named = [f"/a/{number}" for number in range(num_named)]
    stopped = bool(wrong_network(answers, named, OWN, "mine"))
    answered = [swarms[number] if number < len(swarms) else None for number in range(num_named)]
    assert stopped == (bool(named) and None not in answered and OWN not in swarms)
