"""Whatever happens to a small swarm: once left in peace it is on one chain, goes on, and has lost nothing."""

import async_solipsism
import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from p2prl.simulate.invariants import broken
from p2prl.simulate.scenarios import (
    LAST,
    LEADER,
    Event,
    Heal,
    Kill,
    Learning,
    Leave,
    Pace,
    Partition,
    Restart,
    Scenario,
    Silence,
)
from p2prl.simulate.swarm import run
from p2prl.swarm.memory_transport import Conditions

PEACE_S = 25.0  # a failover, an election lost to chance, a step
CATCH_UP_S = 8.0  # where a tenth of all messages is lost: a call that fails is made again after seconds
# Three versions came within 6 s of the end, and one node had none of them yet.
THREE_BEHIND = Scenario(
    10,
    33.5,
    4187,
    Conditions(latency_s=0.15, loss=0.1),
    (Partition(6.5, (0,)), Heal(8.5), Heal(8.6)),
    Pace(generate_s=3.0),
    Learning(groups_per_step=8, longest_wait_s=2.0),
)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    num_nodes = draw(st.integers(6, 10))
    someone = st.one_of(st.just(LEADER), st.integers(0, num_nodes - 1))
    seconds = st.integers(1, 12).map(float)
    events: list[Event] = []
    now = 6.0
    for _ in range(draw(st.integers(1, 5))):
        now += draw(seconds) / 2
        kind = draw(st.sampled_from(("kill", "crash", "cut", "silence", "leave")))
        if kind == "kill" and len(events) < num_nodes:
            events.append(Kill(now, draw(someone)))
        elif kind == "crash":
            events += [Kill(now, draw(someone)), Restart(now + draw(seconds), LAST)]
        elif kind == "cut":
            side = draw(st.sets(st.integers(0, num_nodes - 1), min_size=1, max_size=num_nodes - 1))
            events += [Partition(now, tuple(sorted(side))), Heal(now + draw(seconds))]
        elif kind == "silence":
            events.append(Silence(now, draw(someone), draw(seconds)))
        else:
            events += [Leave(now, draw(st.integers(0, num_nodes - 1)))]
    last = max((e.at + (e.for_s if isinstance(e, Silence) else 0.0) for e in events), default=now)
    events.append(Heal(last + 0.1))
    return Scenario(
        num_nodes,
        last + PEACE_S,
        draw(st.integers(0, 2**16)),
        Conditions(
            latency_s=draw(st.sampled_from((0.005, 0.05, 0.15))),
            loss=draw(st.sampled_from((0.0, 0.03, 0.1))),
            duplicate=draw(st.sampled_from((0.0, 0.1))),
        ),
        tuple(sorted(events, key=lambda happening: happening.at)),
        Pace(generate_s=3.0),
        Learning(groups_per_step=8, longest_wait_s=2.0),
    )


def check(scenario: Scenario) -> None:
    trace = run(scenario, async_solipsism.EventLoop)
    event(f"{sum(fall.led for fall in trace.falls)} leaders fell")
    event("a branch lost" if len(trace.chain) < len(trace.steps) else "one branch")
    assert broken(trace) == ()
    assert trace.chain
    assert scenario.duration_s - trace.chain[-1].at < 12.0, "nothing was published any more"
    newest = sum(step.at > scenario.duration_s - CATCH_UP_S for step in trace.chain)
    assert all(end.behind is not None and end.behind <= max(2, newest) for end in trace.ends if end.alive)
    # A version whose manifests died with those who had them is the one reason an honest group may meet.
    assert set(trace.groups.refused) <= {"unknown_version"}, "an honest group was refused"


# Both derandomised: the same scenarios in each run, so that a failure here is always the last change's.
@pytest.mark.timeout(600)
@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(scenarios())
def test_a_small_swarm_recovers_from_anything(scenario: Scenario) -> None:
    check(scenario)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(scenarios())
@example(THREE_BEHIND)
def test_many_small_swarms_recover_from_anything(scenario: Scenario) -> None:
    check(scenario)
