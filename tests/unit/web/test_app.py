"""Routes: the frozen list, bad input, metrics, ports; the stream and its resumption over a real server."""

import asyncio
import time
from pathlib import Path

import httpx2
import msgspec
import pytest
from blake3 import blake3

from p2prl.errors import ConfigError, PreflightFailed
from p2prl.events import Ring
from p2prl.status import PeerRow, Status, WeightsReport
from p2prl.web.app import MAX_BODY_BYTES, STATIC
from p2prl.web.login import CODE_S, Logins, ensure_token
from p2prl.web.server import listen, port_of
from p2prl.web.stream import MAX_STREAMS
from tests.unit.web.nodes import HOSTILE, TOKEN, Served, served

TOKEN_HEADER = {"Authorization": f"Bearer {TOKEN}"}
READS = ["status", "peers", "weights", "series?name=reward", "steps", "logs", "config", "recipe", "doctor"]


def client(node: Served) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(base_url=node.url, headers=TOKEN_HEADER, trust_env=False)


async def test_every_read_answers_json_and_the_types_fit() -> None:
    async with served() as node, client(node) as http:
        for path in READS:
            reply = await http.get(f"/api/v1/{path}")
            assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json"), path
            assert (await http.get(f"/api/v1/{path}", headers={"Authorization": ""})).status_code == 401
        assert msgspec.json.decode((await http.get("/api/v1/status")).content, type=Status) == node.node.status
        rows = msgspec.json.decode((await http.get("/api/v1/peers")).content, type=list[PeerRow])
        assert rows[0].name == HOSTILE
        report = msgspec.json.decode((await http.get("/api/v1/weights")).content, type=WeightsReport)
        assert report == node.node.weights()


@pytest.mark.parametrize(("path", "status"), [
    ("series", 400), ("series?name=reward&points=x", 400), ("series?name=reward&since_s=nan", 400),
    ("series?name=" + "a," * 99, 400),
    ("logs?level=loud", 400), ("logs?limit=0", 400), ("events?types=secrets", 400), ("events?since=-1", 400),
    ("nothing", 404), ("stop", 405),
])  # fmt: skip
async def test_wrong_requests_get_a_code_and_a_sentence(path: str, status: int) -> None:
    async with served() as node, client(node) as http:
        reply = await http.get(f"/api/v1/{path}")
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"code", "message", "hint"}


async def test_stop_takes_only_what_it_knows() -> None:
    async with served() as node, client(node) as http:
        assert (await http.post("/api/v1/stop", content=b"{")).status_code == 422
        assert (await http.post("/api/v1/stop", json={"timeout": 1})).status_code == 422
        assert (await http.post("/api/v1/stop", json={"timeout_s": -1})).status_code == 400
        assert (await http.post("/api/v1/stop", content=b" " * (MAX_BODY_BYTES + 1))).status_code == 413
        assert node.node.stopped == []
        assert (await http.post("/api/v1/stop", json={"timeout_s": 5})).status_code == 202
        assert node.node.stopped == [5.0]


async def test_health_readiness_and_metrics_need_no_login() -> None:
    async with served() as node, httpx2.AsyncClient(base_url=node.url, trust_env=False) as http:
        assert (await http.get("/healthz")).json() == {"ok": True}
        assert (await http.get("/readyz")).status_code == 200
        state = msgspec.structs.replace(node.node.status.state, now="joining", reasons=("no_peers",))
        node.node.status = msgspec.structs.replace(node.node.status, state=state)
        reply = await http.get("/readyz")
        assert (reply.status_code, reply.json()) == (503, {"ok": False, "waiting_for": ["no_peers"]})
        await http.get("/some/other/path")
        text = (await http.get("/metrics")).text
        assert 'p2prl_http_requests_total{code="401",route="other"} 1.0' in text
        assert 'p2prl_http_requests_total{code="503",route="/readyz"} 1.0' in text


def test_a_port_in_use_is_said_with_the_way_out() -> None:
    first = listen("127.0.0.1", 0)
    with first, pytest.raises(PreflightFailed, match=r"web.port"):
        listen("127.0.0.1", port_of(first))


async def events_after(
    node: Served, last: int | None, count: int, types: str = "step", opened: asyncio.Event | None = None
) -> list[tuple[str, str]]:
    """(event, id) of the first `count` events of a new stream."""
    headers = TOKEN_HEADER | ({"Last-Event-ID": str(last)} if last is not None else {})
    found: list[tuple[str, str]] = []
    async with httpx2.AsyncClient(base_url=node.url, headers=headers, trust_env=False) as http:
        async with http.stream("GET", f"/api/v1/events?types={types}") as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            fields: dict[str, str] = {}
            async for line in reply.aiter_lines():
                name, _, value = line.partition(": ")
                fields[name] = value
                if not line and "event" in fields:
                    found.append((fields["event"], fields["id"]))
                    fields = {}
                if found and opened:
                    opened.set()
                if len(found) == count:
                    return found
    return found


async def test_a_stream_resumes_after_the_last_id() -> None:
    ring = Ring(capacity=100)
    async with served(ring) as node:
        for step in range(50):
            ring.publish("step", {"step": step})
        assert await events_after(node, 41, 3) == [("step", "42"), ("step", "43"), ("step", "44")]


async def test_an_id_that_is_too_old_or_of_another_life_is_reset() -> None:
    ring = Ring(capacity=10, first_id=1000)
    async with served(ring) as node:
        for step in range(50):
            ring.publish("step", {"step": step})
        assert await events_after(node, 1001, 1) == [("reset", "1049")]
        assert await events_after(node, 5_000_000, 1) == [("reset", "1049")]


async def test_streams_end_at_once_when_the_daemon_stops() -> None:
    async with served() as node:
        node.ring.publish("step", {})
        opened = asyncio.Event()
        reader = asyncio.create_task(events_after(node, 0, 2, opened=opened))
        await opened.wait()
        began = time.monotonic()
    assert await reader == [("step", "1")]
    assert time.monotonic() - began < 1.5


async def test_too_many_streams_are_refused() -> None:
    async with served() as node, client(node) as http:
        async with asyncio.TaskGroup() as group:
            release = asyncio.Event()
            opened = [asyncio.Event() for _ in range(MAX_STREAMS)]
            for each in opened:
                group.create_task(hold(http, each, release))
            await asyncio.gather(*(each.wait() for each in opened))
            reply = await http.get("/api/v1/events")
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "too_many_streams")
            release.set()


async def hold(http: httpx2.AsyncClient, opened: asyncio.Event, release: asyncio.Event) -> None:
    async with http.stream("GET", "/api/v1/events") as reply:
        async for _ in reply.aiter_lines():
            opened.set()
            await release.wait()
            return


def test_a_code_is_good_once_and_for_a_minute() -> None:
    logins = Logins(TOKEN)
    code, late = logins.issue_code(0.0), logins.issue_code(0.0)
    assert logins.redeem(code, 1.0)
    assert not logins.redeem(code, 1.0)
    assert not logins.redeem(late, CODE_S)
    assert not logins.redeem("", 1.0)


def test_the_token_is_made_private_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "api.token"
    token = ensure_token(path)
    assert len(token) >= 43 and path.stat().st_mode & 0o777 == 0o600
    assert ensure_token(path) == token
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        ensure_token(path)


def test_vendored_files_are_those_of_the_readme() -> None:
    rows = [
        line.split("|")[1:-1] for line in (STATIC / "vendor/README").read_text().splitlines() if line.startswith("| ")
    ][1:]
    listed = {row[0].strip(): row[3].strip() for row in rows}
    found = {
        path.name: blake3(path.read_bytes()).hexdigest()
        for path in (STATIC / "vendor").iterdir()
        if path.suffix in (".js", ".css")
    }
    assert listed == found


def test_the_page_is_small_and_asks_nobody_else() -> None:
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 100_000
    for path in files:
        if path.parent == STATIC:
            assert "//" not in path.read_text().replace("// ", ""), path
            assert "style=" not in path.read_text() and "innerHTML" not in path.read_text()
