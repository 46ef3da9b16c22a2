"""Feeds Prometheus: once a second from the state, and at the moment of what can't be read from it later.

In: the status, the transport's traffic, what loops report. Out: the series of `Metrics`.

Invariants: no peer's text becomes a label; a counter never falls.
"""

from collections.abc import Sequence
from pathlib import Path

from p2prl.metrics import LOOPS, PAUSE_REASONS, WEIGHTS_FAILURES, Metrics
from p2prl.paths import Home
from p2prl.records import Group, StepReport
from p2prl.status import Status
from p2prl.swarm.transport import Traffic

KINDS = {"announce": "control", "lease": "control", "group": "group", "weights": "blob", "manifests": "manifest"}
TRAIN_GAUGES = {
    "reward_mean": "train_reward_mean",
    "loss": "train_loss",
    "kl": "train_kl",
    "entropy": "train_entropy",
    "grad_norm": "train_grad_norm",
    "clip_fraction": "train_clip_ratio",
    "clip_fraction_fresh": "train_clip_fresh_ratio",
    "ess_ratio": "train_ess_ratio",
    "ess_ratio_weights": "train_ess_weights_ratio",
    "weight_top_share": "train_top_weight_ratio",
    "lr_multiplier": "train_lr_multiplier",
    "log_ratio_mean": "train_log_ratio",
    "age_mean": "train_age_versions",
    "equal_reward_groups": "train_equal_reward_groups",
}
STEP_STAGES = ("wait", "batch", "gradient", "optim", "publish")  # metrics `STAGE_s` of a step


class Measures:
    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self._moved: dict[tuple[str, str], int] = {}
        self._restarts: dict[str, int] = {}

    # -- once a second ----------------------------------------------------------------------------------------------

    def refresh(self, status: Status, traffic: Traffic, buffered: int, capacity: int) -> None:
        """Gauges, and counters from totals."""
        metrics = self.metrics
        reasons = tuple(reason for reason in status.state.reasons if reason in PAUSE_REASONS)
        metrics.state(status.state.now, reasons)
        for name, loop in status.state.loops.items():
            if name in LOOPS:
                metrics.loop_restarts.labels(name).inc(max(0, loop.restarts - self._restarts.get(name, 0)))
                self._restarts[name] = loop.restarts
        metrics.peers.labels("relay").set(status.swarm.peers_relayed)
        metrics.peers.labels("direct").set(max(0, status.swarm.peers_alive - status.swarm.peers_relayed))
        metrics.policy_version.set(status.policy.step)
        metrics.swarm_policy_version.set(status.training.step)
        metrics.buffer_groups.set(buffered)
        metrics.buffer_capacity_groups.set(capacity)
        for key, gauge in TRAIN_GAUGES.items():
            if key in status.training.last:
                getattr(metrics, gauge).set(status.training.last[key])
        self._traffic(traffic)

    def machine(self, lag_s: float, skew_s: float) -> None:
        self.metrics.event_loop_lag.set(lag_s)
        self.metrics.clock_skew.set(skew_s)

    def disk(self, sizes: dict[str, int]) -> None:
        """Bytes by kind, as `sizes_on_disk` gives them."""
        for kind, num_bytes in sizes.items():
            self.metrics.disk_bytes.labels(kind).set(num_bytes)

    def _traffic(self, traffic: Traffic) -> None:
        for direction, counts in (("out", traffic.sent), ("in", traffic.received)):
            totals: dict[str, int] = {}
            for name, count in counts.items():
                kind = KINDS.get(name, "control")
                totals[kind] = totals.get(kind, 0) + count
            for kind, total in totals.items():
                grown = max(0, total - self._moved.get((direction, kind), 0))
                self._moved[direction, kind] = total
                self.metrics.gossip_bytes.labels(direction, kind).inc(grown)
                if kind == "blob":
                    self.metrics.weights_bytes.labels(direction).inc(grown)

    # -- at the moment ----------------------------------------------------------------------------------------------

    def drawn(self, groups: Sequence[Group], took_s: float, now: float) -> None:
        """Groups of ours, made in one batch that took `took_s`; `now` is unix seconds."""
        metrics = self.metrics
        metrics.rollout_groups.labels(metrics.environment, "ok").inc(len(groups))
        metrics.last_rollout_timestamp.set(now)
        for group in groups:
            metrics.rollout_duration.observe(took_s)
            metrics.rollout_tokens.labels("prompt").inc(len(group.prompt_ids))
            for trajectory in group.trajectories:
                drawn = sum(segment.num_tokens for segment in trajectory.completion.segments if segment.drawn)
                metrics.rollout_tokens.labels("completion").inc(drawn)
                metrics.rollout_reward.observe(trajectory.reward)

    def not_drawn(self) -> None:
        """A batch failed."""
        self.metrics.rollout_groups.labels(self.metrics.environment, "error").inc()

    def judged(self, admitted: bool, reason: str, lag_s: float) -> None:
        """Admission's verdict on a group that was made `lag_s` seconds ago."""
        if admitted:
            self.metrics.admission_groups.labels("admitted", "").inc()
            self.metrics.gossip_lag.observe(max(0.0, lag_s))
        elif reason == "quarantined":
            self.metrics.admission_groups.labels("quarantined", "quarantined").inc()
        else:
            self.metrics.refused(reason)

    def trained(self, report: StepReport, ages: Sequence[int], now: float) -> None:
        """A step made here on groups of these ages."""
        metrics = self.metrics
        metrics.train_steps.inc()
        metrics.train_tokens.inc(report.num_tokens)
        metrics.last_train_step_timestamp.set(now)
        for stage in STEP_STAGES:
            if f"{stage}_s" in report.metrics:
                metrics.train_step_duration.labels(stage).observe(report.metrics[f"{stage}_s"])
        for age in ages:
            metrics.buffer_age.observe(age)

    def applied(self, took_s: float) -> None:
        """A version's state was made of deltas and verified."""
        self.metrics.weights_apply_duration.observe(took_s)

    def not_applied(self, code: str) -> None:
        """A path to a version failed; `code` is the error's."""
        known = code if code in WEIGHTS_FAILURES else "other"
        self.metrics.weights_failures.labels(known).inc()


def sizes_on_disk(home: Home) -> dict[str, int]:
    """Bytes of the database, of versions' states, of deltas and of checkpoints, of all recipes. Blocks: in a thread."""
    home = home.of(b"")
    places = {"db": home.database.parent.glob(f"{home.database.name}*"), "blobs": home.blobs.rglob("*")}
    places |= {"states": home.states.rglob("*"), "checkpoints": home.checkpoints.rglob("*")}
    return {kind: sum(_size(path) for path in paths) for kind, paths in places.items()}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # collected meanwhile
        return 0
