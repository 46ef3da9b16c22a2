"""A pretend node for tests of the page and the command line: fixed answers, real ring, real server."""

import asyncio
import contextlib
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from p2prl import status as s
from p2prl.events import Ring
from p2prl.logs import LogLine
from p2prl.metrics import Metrics
from p2prl.web.app import Door, make_app
from p2prl.web.series import Series
from p2prl.web.server import Server, listen, port_of, url_of

TOKEN = "t" * 43
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m"
PEER = "12D3KooWGRUACHjNvQkRkWbzDXfHkzJ7kLUxYBSGBrtaFDPjwsLb"
STARTED_AT = 1_790_000_000.0


def status(**over: object) -> s.Status:
    fields: dict = {
        "version": "0.1.0",
        "node": s.NodeStatus(peer_id=PEER, name="quiet-otter", started_at=s.rfc3339(STARTED_AT)),
        "swarm": s.SwarmStatus(
            id="7c1e" * 16,
            recipe="addition",
            policy_version="1.42.deadbeef",
            term=1,
            leader=PEER,
            role="leader",
            peers_alive=3,
            peers_relayed=1,
            reachability="direct",
            addresses=(f"/ip4/127.0.0.1/tcp/7001/p2p/{PEER}",),
        ),
        "state": s.StateStatus(now="working"),
        "policy": s.PolicyStatus(version="1.41.cafecafe", step=41, behind=1, staleness_p50=1.0, staleness_p95=3.0),
        "rates": s.RateStatus(
            rollout_tokens_per_s=1840.0, up_bytes_per_s=1.2e6, down_bytes_per_s=3.4e6, up_cap_bytes_per_s=2e6
        ),
        "given": s.GivenStatus(
            groups=1204, admitted=1150, refused={"stale": 4}, waiting=50, tokens=31000, sent_bytes=740000
        ),
        "training": s.TrainingStatus(step=42, reward_mean=0.81, reward_first=0.74, reward_last=0.81, num_groups=1344),
        "fetches": (
            s.FetchStatus(
                version="1.43.deadbeef",
                kind="anchor",
                num_bytes=120_000_000,
                of_bytes=269_060_520,
                bytes_per_s=3.1e6,
                num_peers=2,
            ),
        ),
        "health": (s.HealthItem(code="clock_skew", message="clock is 2.4 s ahead", fix="enable NTP"),),
    }
    return s.Status(**(fields | over))


class Node:
    """Answers as `node/control.py` would; remembers that it was asked to stop."""

    def __init__(self) -> None:
        self.status = status()
        self.stopped: list[float] = []
        self.on_stop = lambda: None
        self.numbers = Series()
        for step in range(60):
            names = ("reward", "eval_reward", "version", "tokens_per_s", "staleness_p50", "staleness_p95")
            row = {name: 0.5 + step / 200 for name in names} | {"loss": 0.1, "ess_ratio": 0.9, "lr_multiplier": 0.8}
            row |= {"up_bytes_per_s": 1.2e6 + 1e4 * step, "down_bytes_per_s": 3.4e6 - 2e4 * step}
            self.numbers.record(STARTED_AT + step * 10, row)

    def stop(self, timeout_s: float) -> None:
        self.stopped.append(timeout_s)
        self.on_stop()

    def peers(self) -> list[s.PeerRow]:
        return [
            s.PeerRow(
                peer_id=PEER,
                name=HOSTILE,
                role="full",
                rtt_s=0.023,
                version="1.42.deadbeef",
                step=42,
                groups=812,
                leader=True,
            ),
            s.PeerRow(
                peer_id=PEER[::-1],
                name="amber-fox",
                role="rollout",
                path="relay",
                seen_s=8.0,
                groups=900,
                version="1.39.cafecafe",
                step=39,
                received_bytes=4_000_000,
                sent_bytes=1_200_000,
            ),
        ]

    def weights(self) -> s.WeightsReport:
        """Two anchors and the deltas between them, as a node keeps them."""
        rows = []
        for step in range(42, 29, -1):
            anchor = s.WayRow(kind="anchor", num_bytes=269_060_520, held=True)
            ways = [s.WayRow(kind="delta", base_step=step - 1, num_bytes=1_010_000 + 3000 * step, held=step > 31)]
            ways += [anchor] if step in (32, 40) else []
            has_state = step in (32, 40, 42)
            rows.append(
                s.VersionRow(
                    step=step,
                    version=f"1.{step}.deadbeef",
                    published_at=STARTED_AT + 60 * step,
                    ways=tuple(ways),
                    state_bytes=269_060_520 if has_state else 0,
                    held_bytes=(269_060_520 if has_state else 0) + (ways[0].num_bytes if step > 31 else 0),
                    kept="newest" if step == 42 else "anchor" if has_state else "within max age" if step > 31 else "",
                    holders=(PEER,) if step == 42 else (PEER[::-1],) if step == 39 else (),
                )
            )
        held_bytes = sum(row.held_bytes for row in rows)
        return s.WeightsReport(
            head="1.42.deadbeef", full_bytes=269_060_520, held_bytes=held_bytes, budget_bytes=10**10, newest=1,
            num_peers=2, versions=tuple(rows),
            awaited=s.AwaitedRow(version="1.44.deadbeef", num_files=3, whole_files=1, num_bytes=4000, here_bytes=3000),
        )  # fmt: skip

    def series(self, names: tuple[str, ...], since_s: float, points: int) -> dict[str, list[float | None]]:
        return self.numbers.columns(names, 0.0, points)

    def logs(self, level: str, component: str, since_s: float, limit: int) -> list[LogLine]:
        lines = [
            LogLine(
                t=s.rfc3339(STARTED_AT), level="info", component="rollout", event="group done", values={"reward": 0.62}
            ),
            LogLine(
                t=s.rfc3339(STARTED_AT), level="warning", component="receive", event="refused", values={"peer": HOSTILE}
            ),
        ]
        return [line for line in lines if component in ("", line.component)][-limit:]

    def config(self) -> list[s.ConfigValue]:
        return [s.ConfigValue(key="web.port", value=8420, origin="default")]

    def recipe(self) -> dict[str, object]:
        return {"name": "addition", "learner": {"learning_rate": 1e-4}}

    async def doctor(self) -> s.DoctorReport:
        return s.DoctorReport(checks=(s.Check(name="disk", message="212 GB free"), s.Check(level="warn", name="clock")))


class Served:
    """A node whose page is up."""

    def __init__(self, node: Node, ring: Ring, server: Server, url: str, port: int, metrics: Metrics) -> None:
        self.node, self.ring, self.server, self.url, self.port, self.metrics = node, ring, server, url, port, metrics


@contextlib.asynccontextmanager
async def served(ring: Ring | None = None, port: int = 0) -> AsyncIterator[Served]:
    node, ring, metrics = Node(), ring or Ring(), Metrics("0.1.0")
    sock = listen("127.0.0.1", port)
    app = make_app(lambda: node.status, node, ring, metrics, Door(TOKEN, port_of(sock)))
    url = url_of(sock)
    server = Server(app, sock)
    await server.start()
    try:
        yield Served(node, ring, server, url, int(url.rpartition(":")[2]), metrics)
    finally:
        ring.close()
        await server.stop()


@contextlib.contextmanager
def served_in_thread(home: Path) -> Iterator[Served]:
    """The same from a thread of its own, with the home's node.json and token: for the synchronous command line."""
    ready, box = threading.Event(), {}

    async def main() -> None:
        async with served() as each:
            box["served"], box["loop"], box["done"] = each, asyncio.get_running_loop(), asyncio.Event()
            ready.set()
            await box["done"].wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    assert ready.wait(30)
    state = home / "state"
    state.mkdir(parents=True, mode=0o700)
    (state / "node.json").write_text(
        json.dumps({"pid": os.getpid(), "url": box["served"].url, "started_at": STARTED_AT})
    )
    (state / "api.token").write_text(TOKEN)
    try:
        yield box["served"]
    finally:
        box["loop"].call_soon_threadsafe(box["done"].set)
        thread.join(30)
