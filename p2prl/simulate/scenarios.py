"""What a simulated swarm goes through: pure data, so that a scenario can be drawn at random, printed and run again.

In: a test or a benchmark. Out: a `Scenario` for `swarm.simulate`.

Nodes are numbers from 0. `LEADER` is whoever leads when the event comes, `LAST` the node of the last such event. Times
are seconds of the scenario.
"""

import msgspec

from p2prl.swarm.memory_transport import Conditions

LEADER = -1
LAST = -2


class Kill(msgspec.Struct, frozen=True, tag=True):
    """kill -9: nothing is said, nothing more is written; what was in its store stays."""

    at: float
    node: int


class Restart(msgspec.Struct, frozen=True, tag=True):
    """A killed or departed node starts again from its home, under a new boot id."""

    at: float
    node: int


class Join(msgspec.Struct, frozen=True, tag=True):
    """A node that was not there at the start comes."""

    at: float
    node: int


class Leave(msgspec.Struct, frozen=True, tag=True):
    """A node drains and stops."""

    at: float
    node: int


class Partition(msgspec.Struct, frozen=True, tag=True):
    """Nothing passes between `side` and all the others until `Heal`."""

    at: float
    side: tuple[int, ...]


class Silence(msgspec.Struct, frozen=True, tag=True):
    """The node's machine hangs as far as others can tell: it is cut off, and its engine and learner stand still."""

    at: float
    node: int
    for_s: float


class Heal(msgspec.Struct, frozen=True, tag=True):
    """The end of every partition."""

    at: float


Event = Kill | Restart | Join | Leave | Partition | Silence | Heal


class Pace(msgspec.Struct, frozen=True):
    """How long the scripted children take, in virtual seconds."""

    engine_start_s: float = 2.0
    generate_s: float = 0.6  # one batch of groups
    load_s: float = 0.05
    learner_start_s: float = 4.0
    step_s: float = 0.8
    follow_s: float = 0.1
    judge_s: float = 0.005


class Learning(msgspec.Struct, frozen=True):
    """The recipe's numbers that set how much flows."""

    group_size: int = 2
    groups_per_step: int = 16
    longest_wait_s: float = 4.0
    max_age: int = 64
    max_in_flight: int = 2


class Scenario(msgspec.Struct, frozen=True):
    """`stagger_s` lies between the starts of two nodes; the first `num_bootstraps` are known to all."""

    num_nodes: int
    duration_s: float
    seed: int = 0
    conditions: Conditions = Conditions()
    events: tuple[Event, ...] = ()
    pace: Pace = Pace()
    learning: Learning = Learning()
    num_bootstraps: int = 3
    stagger_s: float = 0.05

    @property
    def first_nodes(self) -> tuple[int, ...]:
        """Those there at the start."""
        late = {event.node for event in self.events if isinstance(event, Join)}
        return tuple(node for node in range(self.num_nodes) if node not in late)
