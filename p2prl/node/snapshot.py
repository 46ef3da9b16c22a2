"""One `Status` from the node's state: what page, command line and demo show.

In: NodeState, the supervisor, the loops. Out: a Status; rows of peers, of versions.
"""

from collections.abc import Iterator

import msgspec

from p2prl import __version__, status
from p2prl.node.state import NodeState
from p2prl.node.supervisor import Supervisor
from p2prl.records import Version
from p2prl.status import finite, rfc3339
from p2prl.weights.chain import Needs
from p2prl.weights.holdings import Awaited, Holding, holdings

KINDS = {
    "announce": "announce", "lease": "announce", "group": "group", "weights": "weights", "manifests": "weights",
}  # fmt: skip
MAX_VERSIONS = 32  # in a report; those of which something is here come all
FAILURES = {"rollout": "engine_failed", "train": "learner_failed"}  # loop -> code of its failure


def make_status(state: NodeState, supervisor: Supervisor, waiting: str, last: dict[str, float]) -> status.Status:
    rewards = state.chain.first_last_rewards(state.head_id)
    first, last_reward = rewards or (None, None)
    now = _now(state, supervisor)
    head = state.head
    loaded = state.engine_version
    up_cap, down_cap = state.transport.rates
    manifest = state.manifests.get(state.head_id)
    metrics = finite(last or (manifest.metrics if manifest else {}))
    return status.Status(
        version=__version__,
        node=status.NodeStatus(
            peer_id=state.me,
            name=state.name,
            role=state.config.node.role,
            boot_id=state.boot_id.hex(),
            started_at=rfc3339(state.started_at),
        ),
        swarm=status.SwarmStatus(
            id=state.swarm.hex(),
            recipe=state.recipe.name,
            policy_version=str(head),
            term=state.election.term,
            leader=state.election.leader,
            role="leader" if state.leads else "follower",
            peers_alive=len(state.live()) - 1,
            addresses=tuple(state.transport.addresses()),
        ),
        state=status.StateStatus(
            now=now,
            reasons=tuple(sorted({waiting, *(item.code for item in _health(state, supervisor))} - {""})),
            loops={
                name: status.LoopStatus(ok=health.ok, restarts=health.restarts, error=health.error)
                for name, health in supervisor.health.items()
            },
        ),
        policy=status.PolicyStatus(
            version=str(loaded) if loaded else "",
            step=loaded.step if loaded else 0,
            behind=max(0, head.step - loaded.step) if loaded else 0,
            staleness_p50=metrics.get("age_p50", metrics.get("age_mean", 0.0)),
            staleness_p95=metrics.get("age_p95", metrics.get("age_max", 0.0)),
        ),
        rates=status.RateStatus(
            rollout_tokens_per_s=state.tokens_per_s,
            up_bytes_per_s=state.up_bytes_per_s,
            down_bytes_per_s=state.down_bytes_per_s,
            up_cap_bytes_per_s=up_cap,
            down_cap_bytes_per_s=down_cap,
        ),
        lag=_lag(sorted(supervisor.lags)),
        given=status.GivenStatus(
            groups=state.counts.groups,
            admitted=state.counts.admitted,
            refused=dict(state.counts.refused),
            waiting=state.num_waiting(),
            tokens=state.counts.tokens,
            sent_bytes=sum(state.transport.traffic().sent.values()),
        ),
        training=status.TrainingStatus(
            step=head.step,
            reward_mean=metrics.get("reward_mean"),
            reward_first=first,
            reward_last=last_reward,
            eval_reward=state.eval_reward,
            eval_error=state.eval_error if state.eval_reward is not None else None,
            eval_version=str(state.eval_step) if state.eval_reward is not None else "",
            num_groups=state.num_groups,
            buffered=len(state.store.admitted_untrained()),
            refused=dict(state.counts.refused_here),
            last=metrics,
        ),
        traffic=status.TrafficStatus(**_traffic(state)),
        failover=status.FailoverStatus(
            term_changed_at=tuple(status.TermChange(term=term, at=at) for term, at in state.term_changes)
        ),
        fetches=tuple(_fetches(state)),
        health=_health(state, supervisor),
    )


def peer_rows(state: NodeState) -> list[status.PeerRow]:
    rows, now = [], state.clock.unix()
    for member in state.membership.members():
        info, peer = member.info, member.peer_id
        counts, traffic = state.standings.counts(peer), state.transport.with_peer(peer)
        rows.append(
            status.PeerRow(
                peer_id=member.peer_id,
                name=info.name if info else "",
                role=info.role if info else "",
                path=member.path or "direct",
                rtt_s=member.rtt_s,
                version=str(info.held) if info else "",
                step=info.held.step if info else 0,
                leader=member.peer_id == state.election.leader,
                groups=counts.admitted,
                refused=counts.refused,
                faults=state.faults.of(peer),
                trust=round(state.standings.score(peer, now), 3),
                quarantined=state.standings.quarantined(peer, now),
                sent_bytes=traffic.sent_bytes,
                received_bytes=traffic.received_bytes,
                software=info.software if info else "",
                seen_s=state.now() - (member.heard_at if member.heard_at is not None else member.since),
            )
        )
    known = {row.peer_id for row in rows}
    for peer in state.faults.peers():
        if peer not in known:  # no member: who did harm is shown all the same
            traffic = state.transport.with_peer(peer)
            rows.append(
                status.PeerRow(
                    peer_id=peer,
                    faults=state.faults.of(peer),
                    sent_bytes=traffic.sent_bytes,
                    received_bytes=traffic.received_bytes,
                )
            )
    return rows


def _fetches(state: NodeState) -> Iterator[status.FetchStatus]:
    """The oldest version first; of a content that several name, the newest's."""
    if not state.transfers:
        return
    named = {content.content_hash: (m.version, content) for m in state.manifests.values() for content in m.contents}
    running = [(*named[name], progress) for name, progress in state.transfers.items() if name in named]
    for version, content, progress in sorted(running, key=lambda each: (each[0].step, each[1].kind)):
        yield status.FetchStatus(
            version=str(version),
            kind=content.kind,
            num_bytes=progress.num_bytes,
            of_bytes=progress.of_bytes,
            bytes_per_s=progress.bytes_per_s,
            num_peers=progress.num_peers,
        )


def weights_report(state: NodeState) -> status.WeightsReport:
    needs = Needs(
        state.recipe.learner.max_age,
        state.config.storage.cache,
        states=frozenset(state.in_use),
        contents=frozenset(state.transfers),
        pulled=state.pulled.now(state.now()),
    )
    line, on_line = [manifest for _, manifest in state.line()], state.chain.is_on_chain
    beside = [manifest for name, manifest in state.manifests.items() if not on_line(state.head_id, name)]
    held = state.weights.held
    parts = dict(held.parts) | {name: progress.num_bytes for name, progress in state.transfers.items()}
    found = holdings(line, msgspec.structs.replace(held, parts=parts), needs, state.base, beside)
    infos = [member.info for member in state.membership.members() if member.peer_id != state.me]
    peers = {info.peer_id: info.held for info in infos if info is not None}
    shown = [each for number, each in enumerate(found.versions) if number < MAX_VERSIONS or each.kept]
    return status.WeightsReport(
        head=str(state.head),
        full_bytes=state.base_path.stat().st_size if state.base_path.exists() else 0,
        held_bytes=found.num_bytes,
        budget_bytes=state.config.storage.cache,
        newest=sum(held.step >= state.head.step for held in peers.values()),
        num_peers=len(peers),
        awaited=_awaited_row(found.awaited) if found.awaited else None,
        versions=tuple(_version_row(each, peers) for each in shown),
    )


def _awaited_row(awaited: Awaited) -> status.AwaitedRow:
    return status.AwaitedRow(
        version=str(awaited.version),
        num_files=awaited.total.num_files,
        whole_files=awaited.whole.num_files,
        num_bytes=awaited.total.num_bytes,
        here_bytes=awaited.here_bytes,
    )


def _version_row(each: Holding, peers: dict[str, Version]) -> status.VersionRow:
    ways = [
        status.WayRow(kind=part.kind, base_step=part.base_step, num_bytes=part.num_bytes, held=part.is_held)
        for part in each.parts
    ]
    return status.VersionRow(
        step=each.version.step,
        version=str(each.version),
        published_at=each.published_at,
        ways=tuple(ways),
        state_bytes=each.state_bytes,
        held_bytes=each.held_bytes,
        kept=each.kept,
        holders=tuple(sorted(peer for peer, held in peers.items() if held == each.version)),
    )


def _now(state: NodeState, supervisor: Supervisor) -> str:
    if state.draining:
        return "draining"
    if any(item.level == "error" for item in _health(state, supervisor)):
        return "degraded"
    if state.generates and not state.engine_ready:
        return "starting" if state.joined else "joining"
    if not state.joined and not state.generates:
        return "joining"  # alone, a node that generates works on: the reason says that nobody is there
    return "working"


def _health(state: NodeState, supervisor: Supervisor) -> tuple[status.HealthItem, ...]:
    """What the loops noted, and the loops that failed and are not well again."""
    items = [
        status.HealthItem(code=code, level=level, message=message, fix=fix, since=rfc3339(since))
        for code, (level, message, fix, since) in state.health.items()
    ]
    for name, health in supervisor.health.items():
        if not health.ok:
            code = FAILURES.get(name, "loop_failed")
            message = f"the {name} loop failed and is started again: {health.error}"
            items.append(status.HealthItem(code=code, level="error", message=message, since=rfc3339(health.failed_at)))
    return tuple(sorted(items, key=lambda item: (item.code, item.message)))


def _lag(lags: list[float]) -> status.LagStatus:
    """Of sorted samples."""
    if not lags:
        return status.LagStatus()
    p50, p99 = (lags[min(len(lags) - 1, int(share * len(lags)))] for share in (0.5, 0.99))
    return status.LagStatus(p50_s=p50, p99_s=p99, max_s=lags[-1], num_samples=len(lags))


def _traffic(state: NodeState) -> dict[str, dict[str, int]]:
    """By kind: announce (gossip), group (bodies), weights, control."""
    traffic = state.transport.traffic()
    totals: dict[str, dict[str, int]] = {"sent": {}, "received": {}}
    for way, counts in (("sent", traffic.sent), ("received", traffic.received)):
        for name, count in counts.items():
            kind = KINDS.get(name, "control")
            totals[way][kind] = totals[way].get(kind, 0) + count
    return totals
