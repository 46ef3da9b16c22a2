"""Each invariant sees its own break: a trace that is well, spoilt in one way."""

import async_solipsism
import msgspec
import pytest

from p2prl.simulate.invariants import broken, disturbed
from p2prl.simulate.scenarios import LEADER, Kill, Learning, Scenario
from p2prl.simulate.swarm import run
from p2prl.simulate.trace import Fault, Trace


@pytest.fixture(scope="module")
def trace() -> Trace:
    scenario = Scenario(
        5, 22.0, 1, events=(Kill(9.0, LEADER),), learning=Learning(groups_per_step=4, longest_wait_s=1.0)
    )
    return run(scenario, async_solipsism.EventLoop)


def with_step(trace: Trace, index: int, **changes: object) -> Trace:
    steps = list(trace.steps)
    steps[index] = msgspec.structs.replace(steps[index], **changes)
    return msgspec.structs.replace(trace, steps=tuple(steps))


def test_all_is_well_first(trace: Trace) -> None:
    assert broken(trace) == ()
    assert len(trace.chain) > 3


def test_a_group_trained_on_twice(trace: Trace) -> None:
    group = trace.steps[0].groups[0]
    (told,) = broken(with_step(trace, 1, groups=(*trace.steps[1].groups, group)))
    assert told == f"group {group[:8]} was trained on 2 times in one chain"


def test_a_hole_in_the_chain(trace: Trace) -> None:
    assert any("belongs" in told for told in broken(with_step(trace, 0, on_chain=False)))


def test_a_node_on_another_chain(trace: Trace) -> None:
    alive = next(end for end in trace.ends if end.alive)
    ends = tuple(msgspec.structs.replace(end, behind=None) if end is alive else end for end in trace.ends)
    (told,) = broken(msgspec.structs.replace(trace, ends=ends))
    assert told.startswith(f"node {alive.node} ended at")


def test_a_loop_that_failed(trace: Trace) -> None:
    faults = (Fault(3.0, 2, "loop train failed", "KeyError: 'x'"),)
    (told,) = broken(msgspec.structs.replace(trace, faults=faults))
    assert told == "3.00 node 2: loop train failed: KeyError: 'x'"


@pytest.mark.parametrize(("reason", "is_lost"), [("wrong_reward", True), ("too_old", False), ("", True)])
def test_a_group_that_was_admitted_and_is_gone(trace: Trace, reason: str, is_lost: bool) -> None:
    maker = next(end.node for end in trace.ends if end.alive)
    (fall,) = trace.falls
    falls = (msgspec.structs.replace(fall, waiting=("f" * 64,)),)
    dropped = {"f" * 64: reason} if reason else {}
    groups = msgspec.structs.replace(trace.groups, makers={**trace.groups.makers, "f" * 64: maker}, dropped=dropped)
    spoilt = msgspec.structs.replace(trace, falls=falls, groups=groups)
    assert "f" * 64 in disturbed(spoilt)
    assert bool(broken(spoilt)) is is_lost


def test_a_scenario_is_plain_data() -> None:
    scenario = Scenario(5, 10.0, 1, events=(Kill(9.0, LEADER),))
    text = msgspec.json.encode(scenario)
    assert msgspec.json.decode(text, type=Scenario) == scenario
