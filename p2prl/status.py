"""What a node says of itself: one snapshot for the page, the command line and the demo. No torch in it.

In: the node's loops (through `node/`). Out: JSON over HTTP and in events; the command line decodes it with these types.

Every field has a default, unknown fields are ignored and none is renamed within a schema number, so that a command line
and a daemon of different releases understand each other. Text that came from peers is plain text: whoever shows it
escapes it. Times in JSON are RFC 3339 UTC, except where a name says unix.
"""

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote

import msgspec

SCHEMA = 1
READY = ("working", "paused")


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what the control API shows."""


class NodeStatus(Record, frozen=True, kw_only=True):
    peer_id: str = ""
    name: str = ""
    role: str = "full"
    boot_id: str = ""
    started_at: str = ""


class SwarmStatus(Record, frozen=True, kw_only=True):
    """`policy_version` is the swarm's head, TERM.STEP.HASH8; `role` is "leader" or "follower" in this term."""

    id: str = ""
    recipe: str = ""
    policy_version: str = ""
    term: int = 0
    leader: str = ""
    role: str = "follower"
    peers_alive: int = 0
    peers_relayed: int = 0
    reachability: str = "unknown"
    addresses: tuple[str, ...] = ()


class LoopStatus(Record, frozen=True, kw_only=True):
    ok: bool = True
    restarts: int = 0
    last_at: str | None = None
    error: str = ""


class StateStatus(Record, frozen=True, kw_only=True):
    """`now`: starting, joining, working, paused, draining, stopping or degraded; `reasons` are codes."""

    now: str = "starting"
    reasons: tuple[str, ...] = ()
    until: str | None = None
    loops: dict[str, LoopStatus] = {}


class PolicyStatus(Record, frozen=True, kw_only=True):
    """The version this node generates with; `behind` counts steps to the swarm's head; staleness in versions."""

    version: str = ""
    step: int = 0
    behind: int = 0
    staleness_p50: float = 0.0
    staleness_p95: float = 0.0


class RateStatus(Record, frozen=True, kw_only=True):
    """A cap is None where there is none."""

    rollout_tokens_per_s: float = 0.0  # over the last minute
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0
    up_cap_bytes_per_s: float | None = None
    down_cap_bytes_per_s: float | None = None


class LagStatus(Record, frozen=True, kw_only=True):
    """How late the daemon's event loop ran over the last half minute, seconds."""

    p50_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0
    num_samples: int = 0


class GivenStatus(Record, frozen=True, kw_only=True):
    """What this node gave: groups made, admitted by learners, refused by reason, and waiting for a manifest."""

    groups: int = 0
    admitted: int = 0
    refused: dict[str, int] = {}
    waiting: int = 0
    tokens: int = 0
    sent_bytes: int = 0


class TrainingStatus(Record, frozen=True, kw_only=True):
    """Along the chain this node follows. `last` holds the metrics of the last step."""

    step: int = 0
    reward_mean: float | None = None
    reward_first: float | None = None
    reward_last: float | None = None
    eval_reward: float | None = None
    eval_error: float | None = None  # its standard error
    eval_version: str = ""
    num_groups: int = 0
    buffered: int = 0
    refused: dict[str, int] = {}  # of all makers' groups that this node judged, by reason
    last: dict[str, float] = {}


class TrafficStatus(Record, frozen=True, kw_only=True):
    """Bytes by kind since the start: announce, group, weights, control."""

    sent: dict[str, int] = {}
    received: dict[str, int] = {}


class TermChange(Record, frozen=True, kw_only=True):
    term: int = 0
    at: float = 0.0  # unix seconds: a verified manifest of this term was first held


class FailoverStatus(Record, frozen=True, kw_only=True):
    term_changed_at: tuple[TermChange, ...] = ()


class FetchStatus(Record, frozen=True, kw_only=True):
    """A content of a version on its way to us: `num_bytes` of `of_bytes` are verified, `num_peers` send it now."""

    version: str = ""
    kind: str = ""
    num_bytes: int = 0
    of_bytes: int = 0
    bytes_per_s: float = 0.0
    num_peers: int = 0


class HealthItem(Record, frozen=True, kw_only=True):
    """What is wrong and what to do about it; `level` is "warning" or "error"."""

    code: str = ""
    level: str = "warning"
    message: str = ""
    fix: str = ""
    since: str = ""


class Status(Record, frozen=True, kw_only=True):
    """The snapshot. Made by `node/`, shown by `web/` and `cli/`."""

    schema: int = SCHEMA
    version: str = ""
    node: NodeStatus = NodeStatus()
    swarm: SwarmStatus = SwarmStatus()
    state: StateStatus = StateStatus()
    policy: PolicyStatus = PolicyStatus()
    rates: RateStatus = RateStatus()
    lag: LagStatus = LagStatus()
    given: GivenStatus = GivenStatus()
    training: TrainingStatus = TrainingStatus()
    traffic: TrafficStatus = TrafficStatus()
    failover: FailoverStatus = FailoverStatus()
    fetches: tuple[FetchStatus, ...] = ()
    health: tuple[HealthItem, ...] = ()

    @property
    def ready(self) -> bool:
        return self.state.now in READY

    @property
    def invite(self) -> str:
        """What another node needs to join: the swarm's id and addresses of this one."""
        peers = "&".join(f"peer={quote(address, safe='/:.-')}" for address in self.swarm.addresses)
        return f"p2prl://{self.swarm.id}" + (f"?{peers}" if peers else "")


class PeerRow(Record, frozen=True, kw_only=True):
    """One peer as this node sees it. Name, software and version are the peer's own words.

    `groups` and `refused` are of its making, judged here since the start; `trust` is a share, .8 for a stranger; `faults`
    are what no honest node does.
    """

    peer_id: str = ""
    name: str = ""
    role: str = ""
    path: str = "direct"
    rtt_s: float | None = None
    version: str = ""
    step: int = 0
    leader: bool = False
    groups: int = 0
    refused: int = 0
    faults: int = 0
    trust: float = 0.0
    quarantined: bool = False
    sent_bytes: int = 0
    received_bytes: int = 0
    software: str = ""
    seen_s: float = 0.0


class StepRow(Record, frozen=True, kw_only=True):
    """One version's step, as a "step" event: `at` is unix seconds, `metrics` hold loss, ess_ratio, lr_multiplier and more."""

    step: int = 0
    version: str = ""
    term: int = 0
    learner: str = ""
    reward_mean: float | None = None
    num_groups: int = 0
    at: float = 0.0
    wall_s: float = 0.0
    metrics: dict[str, float] = {}


class WayRow(Record, frozen=True, kw_only=True):
    """One way to get a version: "anchor", or "delta" from the version of step `base_step`. `held`: its file is here."""

    kind: str = ""
    base_step: int | None = None
    num_bytes: int = 0
    held: bool = False


class VersionRow(Record, frozen=True, kw_only=True):
    """A version of the head's chain: its ways, what of it lies here and why, which peers have it as their newest.

    `state_bytes` is 0 where its state is not here; `published_at` is unix seconds, the learner's clock.
    """

    step: int = 0
    version: str = ""
    published_at: float = 0.0
    ways: tuple[WayRow, ...] = ()
    state_bytes: int = 0
    held_bytes: int = 0
    kept: str = ""
    holders: tuple[str, ...] = ()


class AwaitedRow(Record, frozen=True, kw_only=True):
    """A better version than the head: how many files its cheapest way takes, and what of them is here."""

    version: str = ""
    num_files: int = 0
    whole_files: int = 0
    num_bytes: int = 0
    here_bytes: int = 0


class WeightsReport(Record, frozen=True, kw_only=True):
    """What lies on this disk and who has what. `newest`: peers whose newest is our head or a later one."""

    schema: int = SCHEMA
    head: str = ""
    full_bytes: int = 0  # of the base model's weights
    held_bytes: int = 0
    budget_bytes: int = 0
    newest: int = 0
    num_peers: int = 0
    awaited: AwaitedRow | None = None
    versions: tuple[VersionRow, ...] = ()  # the newest first


class Check(Record, frozen=True, kw_only=True):
    """One line of a doctor's report: `level` is "ok", "warn" or "fail"."""

    level: str = "ok"
    name: str = ""
    message: str = ""
    fix: str = ""


class DoctorReport(Record, frozen=True, kw_only=True):
    schema: int = SCHEMA
    checks: tuple[Check, ...] = ()

    @property
    def worst(self) -> str:
        return max((check.level for check in self.checks), key=("ok", "warn", "fail").index, default="ok")


class ConfigValue(Record, frozen=True, kw_only=True):
    """One resolved key and where its value came from; secrets are never among them."""

    key: str = ""
    value: str | int | float | bool | list[str] | None = None
    origin: str = "default"


def rfc3339(unix: float) -> str:
    """Unix seconds as RFC 3339 UTC with milliseconds."""
    return datetime.fromtimestamp(unix, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that JSON has a word for: a diverged learner, or a lying one, keeps nobody's status from being read."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def encode(value: object) -> bytes:
    """A record (or a list or dict of them) as JSON; floats that JSON has no word for become null."""
    return msgspec.json.encode(value)
