"""What must hold in every simulated swarm, whatever happened to it.

In: a `Trace`. Out: a sentence for each thing that is broken; none when all is well.
"""

from collections import Counter
from collections.abc import Iterable

from p2prl.simulate.trace import Trace


def broken(trace: Trace) -> tuple[str, ...]:
    """Of a swarm that had time to settle: no partition stands and no leader has just died."""
    return tuple([*_faults(trace), *_one_chain(trace), *_used_once(trace), *_lost(trace)])


def disturbed(trace: Trace) -> frozenset[str]:
    """Groups that a fall or a losing branch took from under a learner: admitted somewhere, in no manifest that counts."""
    waiting = {group for fall in trace.falls for group in fall.waiting}
    rolled_back = {group for step in trace.steps if not step.on_chain for group in step.groups}
    return frozenset(waiting | rolled_back)


def _faults(trace: Trace) -> Iterable[str]:
    for fault in trace.faults:
        yield f"{fault.at:.2f} node {fault.node}: {fault.event}: {fault.why}"


def _one_chain(trace: Trace) -> Iterable[str]:
    for end in trace.ends:
        if end.alive and end.behind is None:
            yield f"node {end.node} ended at {end.version}, which is not on the chain of the best head"
    for number, step in enumerate(trace.chain, 1):
        if step.step != number:
            yield f"the chain has {step.version} where step {number} belongs"


def _used_once(trace: Trace) -> Iterable[str]:
    for group, times in Counter(trace.trained).items():
        if times > 1:
            yield f"group {group[:8]} was trained on {times} times in one chain"


def _lost(trace: Trace) -> Iterable[str]:
    """A living maker's group was trained on, or its maker still waits for it; or it came to its max age."""
    too_old = {group for group, reason in trace.groups.dropped.items() if reason == "too_old"}
    kept = {group for end in trace.ends for group in end.waiting} | set(trace.trained) | too_old
    alive = {end.node for end in trace.ends if end.alive}
    for group in sorted(disturbed(trace) - kept):
        maker = trace.groups.makers.get(group)
        if maker in alive:
            yield f"group {group[:8]} of node {maker} was admitted once, then neither trained on nor waited for"
