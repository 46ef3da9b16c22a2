"""Which groups wait for a step, and since when."""

from collections.abc import Callable
from typing import Any, cast

from p2prl import codec
from p2prl.node.state import NodeState
from p2prl.node.train_loop import TrainLoop
from p2prl.records import Verdict
from tests import factories
from tests.unit.node.version_nodes import Swarm


class TwoClocks:
    """As on a machine whose wall clock NTP puts back."""

    def __init__(self) -> None:
        self.now, self.wall = 100.0, factories.NOW

    def monotonic(self) -> float:
        return self.now

    def unix(self) -> float:
        return self.wall


def test_waits_go_on_when_the_wall_clock_is_put_back(make_state: Callable[[], NodeState]) -> None:
    state, clock = make_state(), TwoClocks()
    state.clock = clock
    group = factories.group(made_at=factories.NOW - 5.0)
    sealed = codec.seal(group, state.identity, state.swarm)
    group_id = codec.sealed_id(sealed)
    state.store.save_group(group, group_id, sealed, own=True, now=factories.NOW)
    state.store.save_verdict(Verdict(group_id, True, ""), factories.NOW)
    loop = TrainLoop(state, *cast("list[Any]", [None] * 4))
    (entry,) = loop._candidates()
    assert entry.admitted_at == 95.0
    clock.now, clock.wall = 130.0, factories.NOW - 3600.0
    assert loop._candidates() == [entry]
    (fresh,) = TrainLoop(state, *cast("list[Any]", [None] * 4))._candidates()
    assert fresh.admitted_at == 130.0  # made "in the future": it waits since we saw it


def test_a_step_is_published_as_deltas_from_what_is_here(swarm: Swarm) -> None:
    state = swarm.learner.state
    loop = TrainLoop(state, *cast("list[Any]", [None] * 4))

    def wanted() -> tuple[list[int], bool]:
        bases, anchor = loop._bases()
        assert all(base.path == str(state.state_path(base.version)) for base in bases)
        return [base.version.step for base in bases], anchor

    assert wanted() == ([0], False)
    swarm.grow(15)
    assert wanted() == ([15, 0], False)  # the sixteenth since the base
    swarm.grow(3, anchors=[17])
    assert wanted() == ([18], False)
    swarm.grow(14)
    assert wanted() == ([32, 17], False)
    state.weights.drop_state(swarm.version(17).hash)
    assert wanted() == ([32], False)
    state.head_path.unlink()
    assert wanted() == ([], True)
