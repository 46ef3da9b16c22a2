"""Every Prometheus object, in a registry of their own; every series is there at 0 from the start.

In: what loops count. Out: `Metrics.text()` for GET /metrics.

Labels take few values, all ours: no peer ids, no text of prompts or peers.
"""

import platform
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

STATES = ("starting", "joining", "working", "paused", "draining", "stopping", "degraded")
PAUSE_REASONS = ("user", "waiting_for_learner", "engine_failed", "no_peers", "disk_full", "clock_skew", "stale_version")
LOOPS = (
    "admission",
    "disk",
    "election",
    "lag",
    "membership",
    "prune",
    "receive",
    "rollout",
    "status",
    "train",
    "weights",
)
WEIGHTS_FAILURES = ("unreachable", "truncated", "too_large", "bad_record", "other")
STAGES = ("wait", "batch", "gradient", "optim", "publish")
REFUSALS = (
    "bad_record",
    "bad_signature",
    "duplicate",
    "other",
    "over_quota",
    "stale",
    "too_large",
    "unknown_version",
    "wrong_reward",
    "wrong_swarm",
)
DIRECTIONS = ("in", "out")
KINDS = ("group", "manifest", "blob", "control")
FRACTIONS = tuple(step / 10 for step in range(11))
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
MILLISECONDS = (0.001, 0.003, 0.01, 0.03, 0.05, 0.1, 0.3, 1.0, 3.0)
AGES = (0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0, 34.0, 55.0, 89.0)


class Metrics:
    """All series of a node. `refusals` are the reason codes of admission, `environment` the recipe's."""

    def __init__(
        self, version: str = "", *, torch: str = "", environment: str = "", refusals: tuple[str, ...] = ()
    ) -> None:
        self.registry = CollectorRegistry()
        self.environment = environment
        self._refusals = tuple(sorted({*REFUSALS, *refusals}))
        self._node(version, torch)
        self._rollouts()
        self._gossip()
        self._buffer()
        self._training()
        self._machine()

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def state(self, now: str, reasons: tuple[str, ...] = ()) -> None:
        """One state is 1, the others 0; the same for each reason."""
        for name in STATES:
            self.node_state.labels(name).set(name == now)
        for name in PAUSE_REASONS:
            self.pause_reason.labels(name).set(name in reasons)

    def refused(self, reason: str) -> None:
        """Count a refusal; a reason we don't know is "other", so that no peer can make new series."""
        known = reason if reason in self._refusals else "other"
        self.admission_groups.labels("rejected", known).inc()

    def _counter(self, name: str, text: str, labels: Mapping[str, tuple[str, ...]] | None = None) -> Counter:
        metric = Counter(f"p2prl_{name}", text, tuple(labels or ()), registry=self.registry)
        _touch(metric, labels)
        return metric

    def _gauge(self, name: str, text: str, labels: Mapping[str, tuple[str, ...]] | None = None) -> Gauge:
        metric = Gauge(f"p2prl_{name}", text, tuple(labels or ()), registry=self.registry)
        _touch(metric, labels)
        return metric

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"p2prl_{name}", text, buckets=buckets, registry=self.registry)

    def _node(self, version: str, torch: str) -> None:
        labels = {"version": (version,), "python": (platform.python_version(),), "torch": (torch,)}
        self._gauge("build_info", "1, with what this node runs", labels).labels(
            version, platform.python_version(), torch
        ).set(1)
        self.node_state = self._gauge("node_state", "1 for the state the node is in", {"state": STATES})
        self.pause_reason = self._gauge("pause_reason", "1 for each reason not to work", {"reason": PAUSE_REASONS})
        self.start_timestamp = self._gauge("start_timestamp_seconds", "When the node started, unix time")

    def _rollouts(self) -> None:
        outcome = {"task": (self.environment,), "outcome": ("ok", "error", "abandoned")}
        self.rollout_groups = self._counter("rollout_groups", "Groups made", outcome)
        self.rollout_tokens = self._counter("rollout_tokens", "Tokens used", {"kind": ("prompt", "completion")})
        self.rollout_duration = self._histogram("rollout_duration_seconds", "Time to make a group", SECONDS)
        self.rollouts_running = self._gauge("rollouts_running", "Groups being made now")
        self.rollout_reward = self._histogram("rollout_reward", "Reward of an answer", FRACTIONS)
        self.last_rollout_timestamp = self._gauge("last_rollout_timestamp_seconds", "Last group made, unix time")

    def _gossip(self) -> None:
        labels = {"direction": DIRECTIONS, "kind": KINDS}
        self.gossip_bytes = self._counter("gossip_bytes", "Bytes exchanged with peers", labels)
        self.gossip_messages = self._counter("gossip_messages", "Messages exchanged with peers", labels)
        self.gossip_duplicates = self._counter("gossip_duplicates", "Messages heard again")
        self.gossip_lag = self._histogram("gossip_lag_seconds", "From a group's making to its admission here", SECONDS)
        self.peers = self._gauge("peers", "Peers alive", {"path": ("direct", "relay")})
        self.peer_rtt = self._histogram("peer_rtt_seconds", "Round trip to a peer", MILLISECONDS)

    def _buffer(self) -> None:
        labels = {"verdict": ("admitted", "rejected", "quarantined"), "reason": ("", *self._refusals)}
        self.admission_groups = self._counter("admission_groups", "Groups judged", labels)
        self.audits = self._counter("audits", "Groups scored again", {"result": ("ok", "failed")})
        self.buffer_groups = self._gauge("buffer_groups", "Admitted groups waiting for a step")
        self.buffer_capacity_groups = self._gauge("buffer_capacity_groups", "Most groups that may wait")
        dropped = {"reason": ("stale", "full", "duplicate")}
        self.buffer_dropped_groups = self._counter(
            "buffer_dropped_groups", "Groups that were never trained on", dropped
        )
        self.buffer_age = self._histogram("buffer_age_versions", "Age of a group when trained on, versions", AGES)

    def _training(self) -> None:
        self.train_steps = self._counter("train_steps", "Optimiser steps made here")
        stage = {"stage": STAGES}
        self.train_step_duration = Histogram(
            "p2prl_train_step_duration_seconds",
            "Time of a step's stage",
            ("stage",),
            buckets=SECONDS,
            registry=self.registry,
        )
        _touch(self.train_step_duration, stage)
        self.train_tokens = self._counter("train_tokens", "Tokens trained on")
        self.train_reward_mean = self._gauge("train_reward_mean", "Mean reward of the last step's answers")
        self.train_loss = self._gauge("train_loss", "Loss of the last step")
        self.train_kl = self._gauge("train_kl", "Divergence from the sampling policy at the last step")
        self.train_entropy = self._gauge("train_entropy", "Entropy of the policy at the last step")
        self.train_grad_norm = self._gauge("train_grad_norm", "Norm of the last gradient")
        self.train_clip_ratio = self._gauge("train_clip_ratio", "Share of clipped weights at the last step")
        self.train_clip_fresh_ratio = self._gauge("train_clip_fresh_ratio", "The same, of fresh answers alone")
        self.train_ess_ratio = self._gauge("train_ess_ratio", "Effective sample size of the last step's ratios, 0-1")
        self.train_ess_weights_ratio = self._gauge("train_ess_weights_ratio", "The same of the weights that were used")
        self.train_top_weight_ratio = self._gauge("train_top_weight_ratio", "Of all weight, what one answer had")
        self.train_lr_multiplier = self._gauge("train_lr_multiplier", "What scaled the last step's learning rate")
        self.train_log_ratio = self._gauge("train_log_ratio", "Mean log-ratio to the sampler, last step's answers")
        self.train_age_versions = self._gauge("train_age_versions", "Mean age of the last step's tokens, versions")
        self.train_equal_reward_groups = self._gauge(
            "train_equal_reward_groups", "Groups of the last step whose rewards were equal: nothing to learn from them"
        )
        self.policy_version = self._gauge("policy_version", "Step of the version held here")
        self.swarm_policy_version = self._gauge("swarm_policy_version", "Step of the swarm's newest version")
        self.last_train_step_timestamp = self._gauge("last_train_step_timestamp_seconds", "Last step made, unix time")
        self.weights_bytes = self._counter("weights_bytes", "Bytes of weights exchanged", {"direction": DIRECTIONS})
        self.weights_apply_duration = self._histogram(
            "weights_apply_duration_seconds", "Time to make a version of its deltas", SECONDS
        )
        reasons = {"reason": WEIGHTS_FAILURES}
        self.weights_failures = self._counter("weights_failures", "Ways to a version that failed", reasons)

    def _machine(self) -> None:
        self.loop_restarts = self._counter("loop_restarts", "Restarts of a loop", {"loop": LOOPS})
        levels = {"level": ("debug", "info", "warning", "error", "critical")}
        self.log_messages = self._counter("log_messages", "Log lines", levels)
        self.clock_skew = self._gauge("clock_skew_seconds", "Our clock minus the swarm's median")
        self.event_loop_lag = self._gauge("event_loop_lag_seconds", "How late the event loop runs")
        self.http_requests = Counter(
            "p2prl_http_requests", "Requests to the page and the control API", ("route", "code"), registry=self.registry
        )
        self.http_requests.labels("/healthz", "200")
        self.disk_bytes = self._gauge("disk_bytes", "Bytes on disk", {"kind": ("db", "states", "blobs", "checkpoints")})
        self.gpu_memory_bytes = Gauge("p2prl_gpu_memory_bytes", "GPU memory in use", ("gpu",), registry=self.registry)
        self.gpu_utilization = Gauge("p2prl_gpu_utilization_ratio", "GPU use, 0 to 1", ("gpu",), registry=self.registry)


def _touch(metric: Counter | Gauge | Histogram, labels: Mapping[str, tuple[str, ...]] | None) -> None:
    """Make every combination of label values exist at 0."""
    combinations: list[tuple[str, ...]] = [()]
    for values in (labels or {}).values():
        combinations = [(*head, value) for head in combinations for value in values]
    for combination in combinations:
        if combination:
            metric.labels(*combination)
