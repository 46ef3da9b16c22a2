"""What happened in a simulated swarm, for tests to judge and for two runs to be compared.

In: samples of the nodes and all messages of the network while it runs. Out: a `Trace`.

Invariant: everything here is in virtual time and nothing depends on this process: the same seed gives the same digest.
"""

import msgspec
from blake3 import blake3


class HeadMove(msgspec.Struct, frozen=True):
    """`node` follows another version since `at`."""

    at: float
    node: int
    version: str
    term: int
    step: int
    num_groups: int


class LeaderMove(msgspec.Struct, frozen=True):
    """Since `at`, `node` believes that `leader` (-1: nobody) leads `term`."""

    at: float
    node: int
    term: int
    leader: int


class Step(msgspec.Struct, frozen=True):
    """A version that some node knows; `on_chain` when it lies on the chain that won."""

    version: str
    term: int
    step: int
    learner: int
    groups: tuple[str, ...]
    at: float
    age_mean: float
    age_max: float
    on_chain: bool


class Fall(msgspec.Struct, frozen=True):
    """A node was killed or silenced. `waiting`: groups admitted there, in no manifest of its chain.

    `recovered_s`: until some other node held a version of a higher term; None: never, or the node did not lead.
    """

    at: float
    node: int
    led: bool
    term: int
    waiting: tuple[str, ...]
    recovered_s: float | None = None


class Fault(msgspec.Struct, frozen=True):
    """A loop of a node failed, or something was logged as an error."""

    at: float
    node: int
    event: str
    why: str


class End(msgspec.Struct, frozen=True):
    """How a node ended. `behind`: versions to the head of the chain that won, None when it is on another."""

    node: int
    alive: bool
    version: str
    behind: int | None
    waiting: tuple[str, ...]  # ids of its own groups that it still waits for


class Groups(msgspec.Struct, frozen=True):
    """Over all nodes and lives. `refused` by reason, as counted by those who refused."""

    made: int
    trained: int
    refused: dict[str, int]
    makers: dict[str, int]  # group id -> its maker, of every group made
    dropped: dict[str, str]  # group id -> why its maker gave it up


class Trace(msgspec.Struct, frozen=True):
    heads: tuple[HeadMove, ...]
    leaders: tuple[LeaderMove, ...]
    steps: tuple[Step, ...]
    falls: tuple[Fall, ...]
    faults: tuple[Fault, ...]
    ends: tuple[End, ...]
    groups: Groups
    sent_bytes: dict[str, int]
    warnings: dict[str, int]  # how often each was logged by any node, with a peer's fault's code
    num_messages: int
    digest: str

    @property
    def chain(self) -> tuple[Step, ...]:
        """The versions of the chain that won, in order."""
        return tuple(step for step in self.steps if step.on_chain)

    @property
    def trained(self) -> tuple[str, ...]:
        """The groups of that chain, in the order of training."""
        return tuple(group for step in self.chain for group in step.groups)


class Recorder:
    """Gathers while the swarm runs."""

    def __init__(self) -> None:
        self.heads: list[HeadMove] = []
        self.leaders: list[LeaderMove] = []
        self.falls: list[Fall] = []
        self.faults: list[Fault] = []
        self.warnings: dict[str, int] = {}
        self.num_messages = 0
        self._digest = blake3()
        self._head_of: dict[int, str] = {}
        self._leader_of: dict[int, tuple[int, int]] = {}

    def message(self, at: float, event: str, source: str, target: str, kind: str) -> None:
        """For `MemoryNetwork`: every message, call and loss."""
        self.num_messages += 1
        self._digest.update(f"{at:.6f} {event} {source} {target} {kind}\n".encode())

    def head(self, move: HeadMove) -> None:
        if self._head_of.get(move.node) == move.version:
            return
        self._head_of[move.node] = move.version
        self.heads.append(move)
        for index, fall in enumerate(self.falls):
            if fall.led and fall.recovered_s is None and fall.node != move.node and move.term > fall.term:
                self.falls[index] = msgspec.structs.replace(fall, recovered_s=move.at - fall.at)

    def leader(self, move: LeaderMove) -> None:
        if self._leader_of.get(move.node) != (move.term, move.leader):
            self._leader_of[move.node] = (move.term, move.leader)
            self.leaders.append(move)

    def warned(self, what: str) -> None:
        self.warnings[what] = self.warnings.get(what, 0) + 1

    def gone(self, node: int) -> None:
        """Its next life begins anew."""
        self._head_of.pop(node, None)
        self._leader_of.pop(node, None)

    def digest(self, rest: object) -> str:
        """Of every message and of what became of the nodes."""
        self._digest.update(msgspec.msgpack.encode(rest))
        return self._digest.hexdigest()
