"""Every series is there at 0; label values are ours; the names are frozen."""

import re

from hypothesis import given
from hypothesis import strategies as st

from p2prl.metrics import Metrics

NAMES = """
admission_groups audits buffer_age_versions buffer_capacity_groups buffer_dropped_groups buffer_groups build_info
clock_skew_seconds disk_bytes event_loop_lag_seconds gossip_bytes gossip_duplicates gossip_lag_seconds gossip_messages
gpu_memory_bytes gpu_utilization_ratio http_requests last_rollout_timestamp_seconds last_train_step_timestamp_seconds
log_messages loop_restarts node_state pause_reason peer_rtt_seconds peers policy_version rollout_duration_seconds
rollout_groups rollout_reward rollout_tokens rollouts_running start_timestamp_seconds swarm_policy_version
train_age_versions train_clip_fresh_ratio train_clip_ratio train_entropy train_equal_reward_groups train_ess_ratio
train_ess_weights_ratio train_grad_norm train_kl train_log_ratio train_loss train_lr_multiplier train_reward_mean
train_step_duration_seconds train_steps train_tokens train_top_weight_ratio weights_apply_duration_seconds
weights_bytes weights_failures
""".split()


def test_the_names_are_frozen_and_all_start_at_zero() -> None:
    metrics = Metrics("0.1.0", environment="addition")
    assert sorted(family.name for family in metrics.registry.collect()) == sorted(f"p2prl_{name}" for name in NAMES)
    lines = [
        line for line in metrics.text().decode().splitlines() if not line.startswith("#") and "_created" not in line
    ]
    assert {line for line in lines if not line.endswith(" 0.0")} == {
        line for line in lines if "p2prl_build_info" in line
    }
    for name in set(NAMES) - {"gpu_memory_bytes", "gpu_utilization_ratio"}:
        assert any(line.startswith(f"p2prl_{name}") for line in lines), name


def test_one_state_is_one() -> None:
    metrics = Metrics()
    metrics.state("paused", ("no_peers",))
    ones = re.findall(r'^p2prl_(?:node_state|pause_reason)\{.*"(\w+)"\} 1.0$', metrics.text().decode(), re.MULTILINE)
    assert ones == ["paused", "no_peers"]


@given(st.lists(st.text(max_size=20), max_size=5))
def test_no_reason_of_a_peer_makes_a_series(reasons: list[str]) -> None:
    metrics = Metrics(refusals=("bad_lottery",))
    before = metrics.text().count(b"\n")
    for reason in [*reasons, "bad_lottery"]:
        metrics.refused(reason)
    assert metrics.text().count(b"\n") == before
    assert b'reason="bad_lottery",verdict="rejected"} 1.0' in metrics.text()


def test_two_nodes_in_one_process_do_not_share() -> None:
    first, second = Metrics(), Metrics()
    first.train_steps.inc()
    assert b"p2prl_train_steps_total 0.0" in second.text()
