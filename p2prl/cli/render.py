"""Records to text for a terminal: tables by padding, sizes and times as people read them.

In: records, peers' words among them. Out: lines without control characters.
"""

from collections.abc import Sequence
from datetime import UTC, datetime

from p2prl.status import PeerRow, Status

MAX_CELL_CHARS = 64


def plain(text: object) -> str:
    """Text of peers, safe for a terminal: control and formatting characters written out, capped."""
    words = str(text)
    if not words.isprintable():
        words = "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in words)
    return words if len(words) <= MAX_CELL_CHARS else words[: MAX_CELL_CHARS - 3] + "..."


def table(header: Sequence[str], rows: Sequence[Sequence[object]], right: Sequence[int] = ()) -> str:
    """Columns as wide as their widest cell; those in `right` are right-aligned."""
    cells = [list(header), *[[plain(cell) for cell in row] for row in rows]]
    widths = [max(len(row[index]) for row in cells) for index in range(len(header))]
    lines = []
    for row in cells:
        padded = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def size(num_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def span(seconds: float) -> str:
    """23 ms, 8 s, 12m 3s, 3h 12m, 2d 4h."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    for large, small, names in ((86400, 3600, "dh"), (3600, 60, "hm"), (60, 1, "ms")):
        if whole >= large:
            return f"{whole // large}{names[0]} {whole % large // small}{names[1]}"
    raise AssertionError(seconds)


def short(peer_id: str) -> str:
    return f"{peer_id[:4]}...{peer_id[-6:]}" if len(peer_id) > 14 else peer_id or "-"


def reward(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def status_text(status: Status, now: datetime) -> str:
    """The screen of `p2prl status`."""
    node, swarm, state, policy = status.node, status.swarm, status.state, status.policy
    since = _since(node.started_at, now)
    reasons = f" ({', '.join(reason.replace('_', ' ') for reason in state.reasons)})" if state.reasons else ""
    behind = f"{policy.behind} behind" if policy.behind else "up to date"
    reach = "" if swarm.reachability == "unknown" else f"{swarm.reachability}  "
    given, training, rates = status.given, status.training, status.rates
    refused = ", ".join(f"{number} {reason}" for reason, number in sorted(given.refused.items())) or "none"
    rows = [
        ("state", f"{state.now}{reasons}  {swarm.role} in term {swarm.term}"),
        ("version", f"{policy.version or '-'} ({behind}); swarm {swarm.policy_version or '-'}"),
        ("network", f"{reach}{swarm.peers_alive} peer{'s' * (swarm.peers_alive != 1)} ({swarm.peers_relayed} relayed)  "
                    f"up {size(rates.up_bytes_per_s)}/s  down {size(rates.down_bytes_per_s)}/s"),
        ("rollouts", f"{rates.rollout_tokens_per_s:.0f} tokens/s (last minute)  "
                     f"age p50 {policy.staleness_p50:g} p95 {policy.staleness_p95:g}"),
        ("you gave", f"{given.groups} groups: {given.admitted} admitted, {given.waiting} waiting, refused: {refused}  "
                     f"{given.tokens} tokens  {size(given.sent_bytes)} sent"),
        ("training", f"step {training.step}  {training.num_groups} groups used  {training.buffered} waiting"),
        ("reward", f"{reward(training.reward_mean)} now  {reward(training.reward_first)} first  "
                   f"{reward(training.reward_last)} last  held-out {reward(training.eval_reward)}"),
        ("health", _health(status)),
    ]  # fmt: skip
    head = f"p2prl {plain(status.version)}  {plain(node.name)}  {short(plain(node.peer_id))}"
    head += f"  swarm {plain(swarm.recipe)} ({plain(swarm.id[:8])})  {plain(node.role)}  up {since}"
    lines = [head, *(f"{name:<9}{_line(text)}" for name, text in rows)]
    for item in status.health:
        mark = "x" if item.level == "error" else "!"
        lines.append(f"  {mark} {_line(item.message)}" + (f"; {_line(item.fix)}" if item.fix else ""))
    return "\n".join(lines)


def _health(status: Status) -> str:
    if not status.health:
        return "good"
    errors = sum(item.level == "error" for item in status.health)
    warnings = len(status.health) - errors
    counted = [(errors, "error"), (warnings, "warning")]
    return ", ".join(f"{number} {name}{'s' * (number > 1)}" for number, name in counted if number)


def _line(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _since(started_at: str, now: datetime) -> str:
    try:
        return span(max(0.0, (now - datetime.fromisoformat(started_at)).total_seconds()))
    except (ValueError, TypeError):
        return "-"


PEER_COLUMNS = tuple("PEER NAME ROLE PATH RTT VERSION GROUPS REFUSED TRUST FAULTS RECEIVED SENT SEEN".split())
DROPPED_FIRST = ("SENT", "RECEIVED", "PATH", "REFUSED", "FAULTS", "SEEN")  # on a narrow terminal, in this order


def peers_text(peers: Sequence[PeerRow], width: int | None = None) -> str:
    """A table as wide as it gets, or at most `width`, with the less important columns left out."""
    shown = list(PEER_COLUMNS)
    text = _peers_table(peers, shown)
    for name in DROPPED_FIRST:
        if width is None or max(map(len, text.splitlines())) <= width:
            break
        shown.remove(name)
        text = _peers_table(peers, shown)
    return text


def _peers_table(peers: Sequence[PeerRow], shown: Sequence[str]) -> str:
    rows = [
        (
            short(peer.peer_id),
            peer.name or "-",
            peer.role + (", leader" if peer.leader else ""),
            peer.path,
            "-" if peer.rtt_s is None else span(peer.rtt_s),
            peer.version or "-",
            peer.groups,
            peer.refused,
            "quarantine" if peer.quarantined else f"{peer.trust:.2f}",
            peer.faults,
            size(peer.received_bytes),
            size(peer.sent_bytes),
            "now" if peer.seen_s < 2 else span(peer.seen_s),
        )
        for peer in peers
    ]
    numbers = ("RTT", "GROUPS", "REFUSED", "TRUST", "FAULTS", "RECEIVED", "SENT")
    kept = [PEER_COLUMNS.index(name) for name in shown]
    right = [place for place, name in enumerate(shown) if name in numbers]
    return table(shown, [[row[index] for index in kept] for row in rows], right=right)


def utc_now() -> datetime:
    return datetime.now(UTC)
