"""What the loops of one node share: the chain and its head, peers, the election, groups known and held.

In: verified records from the loops. Out: answers to "who leads", "what is the head", "how old is this version".
All of it is touched on the event loop alone.
"""

from dataclasses import dataclass, field
from pathlib import Path

from p2prl import __version__, logs
from p2prl.buffer.store import Store
from p2prl.clock import Clock
from p2prl.codec import ZERO_HASH
from p2prl.config import NodeConfig
from p2prl.events import Ring
from p2prl.identity import Identity
from p2prl.paths import Home
from p2prl.recipe import Recipe
from p2prl.records import WIRE_SCHEMA, Manifest, PeerInfo, Version
from p2prl.swarm import election
from p2prl.swarm.gossip import Wanted
from p2prl.swarm.head import Chain
from p2prl.swarm.membership import Membership
from p2prl.swarm.transport import Transport
from p2prl.weights.pieces import blob_path
from p2prl.weights.publish import Parent


@dataclass
class Counts:
    """Since this daemon started."""

    groups: int = 0
    tokens: int = 0
    answers: int = 0
    refused_here: dict[str, int] = field(default_factory=dict)  # what we refused of others, by reason
    refused: dict[str, int] = field(default_factory=dict)  # what others refused of ours
    admitted: int = 0  # verdicts on ours
    peer_errors: dict[str, int] = field(default_factory=dict)


@dataclass
class NodeState:
    home: Home
    config: NodeConfig
    recipe: Recipe
    identity: Identity
    boot_id: bytes
    clock: Clock
    transport: Transport
    store: Store
    events: Ring
    base: Version
    base_path: Path
    chain: Chain
    membership: Membership
    election: election.ElectionState
    name: str
    started_at: float
    wanted: Wanted = field(default_factory=Wanted)
    counts: Counts = field(default_factory=Counts)
    sealed_manifests: dict[bytes, bytes] = field(default_factory=dict)
    manifests: dict[bytes, Manifest] = field(default_factory=dict)
    head_id: bytes = ZERO_HASH  # the best version whose weights we hold
    votes: tuple[bytes, ...] = ()  # of our term, until its first manifest
    sealed_lease: bytes = b""  # the newest lease heard or sent
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
    eval_step: int = 0
    health: dict[str, tuple[str, str, str, float]] = field(default_factory=dict)  # code -> level, message, fix, since

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
        manifest = self.manifests.get(self.head_id)
        return self.base_path if manifest is None else blob_path(self.home.blobs, manifest.content_hash)

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
        live = self.live()
        infos: dict[str, PeerInfo] = {peer: info for peer, info in self.membership.infos().items() if peer in live}
        infos[self.me] = self.info(0)
        allowed = self.recipe.learner.learners
        ranked = election.rank(infos, self.swarm)
        return tuple(peer for peer in ranked if not allowed or peer in allowed)

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
        """Groups of ours that are in no manifest and young enough to be trained on; older ones are dropped."""
        waiting, old = 0, []
        for row in self.store.own_waiting():
            age = self.age_of(row.version)
            if age is not None and age <= self.recipe.learner.max_age:
                waiting += 1
            else:
                old.append(row.id)
        if old:
            self.store.drop(old, "too_old", self.clock.unix())
            self.wanted.forget(old)
        return waiting

    def emit(self, kind: str, **data: object) -> None:
        """An event for the page; a "log" goes through the log, which feeds the same ring."""
        if kind == "log":
            level, event = str(data.pop("level")), str(data.pop("event"))
            getattr(logs.get("node"), level)(event, **data)
        else:
            self.events.publish(kind, data)

    def blame(self, code: str) -> None:
        """Count a peer's fault."""
        self.counts.peer_errors[code] = self.counts.peer_errors.get(code, 0) + 1
