"""What the loops of one node share: the chain and its head, peers, the election, groups known and held.

In: verified records from the loops. Out: answers to "who leads", "what is the head", "how old is this version".
All of it is touched on the event loop alone.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from p2prl import __version__, logs
from p2prl.buffer.standings import Standings
from p2prl.buffer.store import Store
from p2prl.clock import Clock
from p2prl.codec import ZERO_HASH
from p2prl.config import NodeConfig
from p2prl.errors import PeerError
from p2prl.events import Ring
from p2prl.identity import Identity
from p2prl.metrics import Metrics
from p2prl.node.disk import Room
from p2prl.node.measures import Measures
from p2prl.paths import Home
from p2prl.recipe import Recipe
from p2prl.records import WIRE_SCHEMA, Manifest, PeerInfo, Version
from p2prl.swarm import election
from p2prl.swarm.faults import ORDINARY, Faults
from p2prl.swarm.gossip import Wanted
from p2prl.swarm.head import Chain
from p2prl.swarm.membership import Membership
from p2prl.swarm.metered_transport import MeteredTransport
from p2prl.weights.publish import Parent
from p2prl.weights.pull import Progress
from p2prl.weights.pulled import Pulled
from p2prl.weights.store import WeightStore


@dataclass
class Counts:
    """Since this daemon started."""

    groups: int = 0
    tokens: int = 0
    answers: int = 0
    refused_here: dict[str, int] = field(default_factory=dict)  # what we refused of others, by reason
    refused: dict[str, int] = field(default_factory=dict)  # what others refused of ours
    admitted: int = 0  # verdicts on ours


def log_line(level: str, event: str, values: dict[str, object]) -> None:
    getattr(logs.get("node"), level)(event, **values)


@dataclass
class NodeState:
    home: Home
    config: NodeConfig
    recipe: Recipe
    identity: Identity
    boot_id: bytes
    clock: Clock
    transport: MeteredTransport
    store: Store
    events: Ring
    base: Version
    base_path: Path
    chain: Chain
    membership: Membership
    election: election.ElectionState
    name: str
    started_at: float
    log: Callable[[str, str, dict[str, object]], None] = log_line  # level, event, values
    wanted: Wanted = field(default_factory=Wanted)
    counts: Counts = field(default_factory=Counts)
    faults: Faults = field(default_factory=Faults)
    standings: Standings = field(default_factory=lambda: Standings({}))
    measures: Measures = field(default_factory=lambda: Measures(Metrics()))
    skew_s: float = 0.0  # our clock minus the swarm's
    disk_full: bool = False  # nothing is drawn, pulled, trained or led until there is room
    sealed_manifests: dict[bytes, bytes] = field(default_factory=dict)  # as `manifests`
    manifests: dict[bytes, Manifest] = field(default_factory=dict)  # the newest of the chain, and side branches
    head_id: bytes = ZERO_HASH  # the best version whose weights we hold
    votes: tuple[bytes, ...] = ()  # that gave us the term we lead, or led last
    sealed_lease: bytes = b""  # the newest lease heard or sent
    announce_at: float = 0.0  # when our own waiting groups are announced again
    loop_lag_s: float = 0.0
    joined: bool = False
    draining: bool = False
    engine_ready: bool = False
    learner_ready: bool = False
    engine_version: Version | None = None
    tokens_per_s: float = 0.0
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0
    term_changes: list[tuple[int, float]] = field(default_factory=list)
    eval_reward: float | None = None
    eval_error: float = 0.0  # standard error of eval_reward
    eval_step: int = 0
    health: dict[str, tuple[str, str, str, float]] = field(default_factory=dict)  # code -> level, message, fix, since
    weights: WeightStore = field(init=False)
    pulled: Pulled = field(default_factory=Pulled)  # contents that peers take from us now
    transfers: dict[bytes, Progress] = field(default_factory=dict)  # contents that we fetch now
    in_use: Counter[bytes] = field(default_factory=Counter)  # hashes of states that somebody reads now
    unread: frozenset[bytes] = frozenset()  # states and contents here of versions that another release made
    _ranked: tuple[int, tuple[str, ...]] | None = None  # changes of the records, candidates by them

    def __post_init__(self) -> None:
        self.home = self.home.of(self.swarm)
        self.weights = WeightStore(self.home.states, self.home.blobs)

    @property
    def me(self) -> str:
        return self.identity.peer_id

    @property
    def swarm(self) -> bytes:
        return self.recipe.swarm_id

    @property
    def head(self) -> Version:
        return self.chain.link(self.head_id).version

    @property
    def num_groups(self) -> int:
        return self.chain.link(self.head_id).num_groups

    @property
    def parent(self) -> Parent:
        return Parent(self.head, self.head_id, self.num_groups)

    @property
    def head_path(self) -> Path:
        return self.state_path(self.head)

    def state_path(self, version: Version) -> Path:
        """Its state file, if it is here."""
        return self.base_path if version.hash == self.base.hash else self.weights.state_path(version.hash)

    def has_state(self, version: Version) -> bool:
        return version.hash == self.base.hash or self.weights.has_state(version.hash)

    @contextmanager
    def reading(self, *versions: Version) -> Iterator[None]:
        """Meanwhile their state files stay."""
        names = [version.hash for version in versions]
        self.in_use.update(names)
        try:
            yield
        finally:
            self.in_use.subtract(names)
            self.in_use += Counter()  # drops what fell to 0

    def line(self) -> Iterator[tuple[bytes, Manifest]]:
        """The head's chain with its ids, the newest first, as far as it is in memory."""
        for manifest_id in self.chain.ancestors(self.head_id):
            manifest = self.manifests.get(manifest_id)
            if manifest is None:
                return
            yield manifest_id, manifest

    def sealed_manifest(self, manifest_id: bytes) -> bytes | None:
        return self.sealed_manifests.get(manifest_id) or self.store.manifest(manifest_id)

    @property
    def leads(self) -> bool:
        return self.election.role is election.Role.LEADER

    @property
    def can_learn(self) -> bool:
        allowed = self.recipe.learner.learners
        return self.config.node.role in ("full", "learner") and (not allowed or self.me in allowed)

    @property
    def generates(self) -> bool:
        return self.config.node.role in ("full", "rollout")

    def now(self) -> float:
        return self.clock.monotonic()

    def live(self) -> frozenset[str]:
        return self.membership.live(self.now())

    def eligible(self) -> tuple[str, ...]:
        """Live candidates in rank, with us where we may learn."""
        live, changes = self.live(), self.membership.num_changes
        if self._ranked is None or self._ranked[0] != changes:  # asked many times a second, changes every few seconds
            infos = self.membership.infos()
            infos[self.me] = self.info(0)
            self._ranked = changes, election.rank(infos, self.swarm)
        allowed = self.recipe.learner.learners
        return tuple(peer for peer in self._ranked[1] if peer in live and (not allowed or peer in allowed))

    def stands_by(self) -> bool:
        """Whether we keep a warm learner and pull bodies: we lead, or are the next in rank."""
        if not self.can_learn:
            return False
        return self.leads or election.standby(self.election, self.eligible()) == self.me

    def info(self, sequence: int) -> PeerInfo:
        return PeerInfo(
            peer_id=self.me,
            boot_id=self.boot_id,
            sequence=sequence,
            name=self.name,
            role=self.config.node.role,
            addresses=tuple(self.transport.addresses())[:16],
            held=self.head,
            can_learn=self.can_learn,
            accelerator_bytes=0,
            software=f"p2prl {__version__}",
            wire_schemas=(WIRE_SCHEMA,),
        )

    def age_of(self, version: Version) -> int | None:
        return self.chain.age(self.head_id, version)

    def num_waiting(self) -> int:
        """Groups of ours that are in no manifest and young enough to be trained on."""
        return sum(1 for row in self.store.own_waiting() if self._is_young(row.version))

    def drop_old(self) -> None:
        """Give up those of our groups that are too old to be trained on."""
        old = [row.id for row in self.store.own_waiting() if not self._is_young(row.version)]
        if old:
            self.store.drop(old, "too_old", self.clock.unix())
            self.wanted.forget(old)

    def _is_young(self, version: Version) -> bool:
        age = self.age_of(version)
        return age is not None and age <= self.recipe.learner.max_age

    def note(self, code: str, message: str, fix: str, level: str = "warning") -> None:
        """What the status says is wrong, until it is popped from `health`."""
        known = self.health.get(code)
        if known is None:
            self.emit("health", code=code, message=message, fix=fix)
            self.emit("log", level=level, event=message, code=code, fix=fix)
        self.health[code] = (level, message, fix, known[3] if known else self.clock.unix())

    def note_room(self, room: Room) -> None:
        """The disk as it is now: a full one is told of, and holds the loops back."""
        if room.full:
            fix = f"free some space at {self.home.state} and {self.home.cache}; the node waits and goes on by itself"
            self.note("disk_full", room.message, fix, "error")
        elif self.disk_full:
            del self.health["disk_full"]
            self.emit("log", level="info", event="the disk has room again", free_bytes=room.free_bytes)
        self.disk_full = room.full

    def emit(self, kind: str, **data: object) -> None:
        """An event for the page; a "log" goes through the log, which feeds the same ring."""
        if kind == "log":
            self.log(str(data.pop("level")), str(data.pop("event")), data)
        else:
            self.events.publish(kind, data)

    def blame(self, error: PeerError, peer: str = "") -> None:
        """Count a peer's fault; `peer` when the error names none. It is logged once a minute."""
        peer = error.peer or peer
        if self.faults.count(error.code, peer, self.now()):
            level = "debug" if error.code in ORDINARY else "warning"
            self.emit("log", level=level, event="peer's fault", peer=peer, code=error.code, why=str(error)[:200])
