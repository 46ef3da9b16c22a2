"""What a fresh batch's effective sample size is measured on: groups of version 0 that wait beside the step's."""

from collections.abc import Callable
from typing import Any, cast

from p2prl import codec
from p2prl.node.state import NodeState
from p2prl.node.train_loop import RHO_ON_GROUPS, TrainLoop
from p2prl.records import Verdict, Version
from tests import factories


def admit(state: NodeState, counter: int, version: Version) -> bytes:
    group = factories.group(counter=counter, versions=(version,))
    sealed = codec.seal(group, state.identity, state.swarm)
    group_id = codec.sealed_id(sealed)
    state.store.save_group(group, group_id, sealed, own=True, now=factories.NOW)
    state.store.save_verdict(Verdict(group_id, True, ""), factories.NOW)
    return group_id


def test_it_is_measured_on_the_fresh_groups_that_the_step_does_not_take(make_state: Callable[[], NodeState]) -> None:
    state = make_state()
    admitted = [admit(state, counter, state.head) for counter in range(5)]
    unknown = admit(state, 99, Version(7, 3, bytes(32)))
    assert unknown not in admitted
    loop = TrainLoop(state, *cast("list[Any]", [None] * 4))
    assert [group.counter for group in loop._fresh(admitted[:2])] == [2, 3, 4]
    assert loop._fresh([bytes(32)] * RHO_ON_GROUPS) == ()
    assert len(loop._fresh([bytes(32)] * (RHO_ON_GROUPS - 1))) == 1
