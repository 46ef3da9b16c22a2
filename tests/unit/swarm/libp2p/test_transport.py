"""The transport over real p2pd processes on loopback."""

# hivemind has no types: its attributes begin as None and its protobuf modules are made at import.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from p2prl.errors import BadRecord, PeerError, PreflightFailed, TooLarge, Truncated, Unreachable
from p2prl.identity import Identity
from p2prl.swarm.libp2p.transport import Libp2pTransport
from p2prl.swarm.transport import MAX_CALL_BYTES, MAX_ITEM_BYTES, MAX_TOPIC_BYTES

pytestmark = pytest.mark.filterwarnings("ignore:path is deprecated:DeprecationWarning")  # hivemind, on Python 3.11
Maker = Callable[..., Awaitable[Libp2pTransport]]


def kill(transport: Libp2pTransport) -> int:
    pid = transport._up().pid
    os.kill(pid, signal.SIGKILL)
    return pid


async def echo(peer: str, body: bytes) -> bytes:
    return peer.encode() + b"|" + body


async def test_a_call_proves_its_caller_and_is_counted(make: Maker) -> None:
    server = await make()
    server.serve("x/echo", echo)
    client = await make(server)
    assert await client.call(server.peer_id, "x/echo", b"hi") == client.peer_id.encode() + b"|hi"
    assert server.peer_id in await client.peers()
    assert client.traffic().sent["echo"] > 0
    assert server.traffic().received["echo"] > 0


async def test_a_call_that_fails_says_why(make: Maker) -> None:
    async def broken(peer: str, body: bytes) -> bytes:
        raise KeyError("secret")

    async def refusing(peer: str, body: bytes) -> bytes:
        raise BadRecord("no such thing")

    async def long(peer: str, body: bytes) -> bytes:
        return bytes(MAX_CALL_BYTES + 1)

    async def slow(peer: str, body: bytes) -> bytes:
        await asyncio.Event().wait()
        return b""

    server = await make()
    for method, handler in {"broken": broken, "refusing": refusing, "long": long, "slow": slow}.items():
        server.serve(method, handler)
    client = await make(server)
    with pytest.raises(PeerError, match="KeyError") as failed:
        await client.call(server.peer_id, "broken", b"")
    assert failed.value.code == "handler_failed"
    assert "secret" not in str(failed.value)
    with pytest.raises(BadRecord, match="no such thing") as refused:
        await client.call(server.peer_id, "refusing", b"")
    assert refused.value.peer == server.peer_id
    with pytest.raises(TooLarge):
        await client.call(server.peer_id, "long", b"")
    with pytest.raises(TooLarge):
        await client.call(server.peer_id, "refusing", bytes(MAX_CALL_BYTES + 1))
    with pytest.raises(Unreachable):
        await client.call(server.peer_id, "slow", b"", timeout_s=0.2)
    with pytest.raises(PeerError) as unknown:
        await client.call(server.peer_id, "nothing", b"")
    assert unknown.value.code == "unknown_method"
    with pytest.raises(Unreachable):
        await client.call("nonsense0", "x", b"")
    with pytest.raises(Unreachable):
        await client.call(Identity.from_seed(bytes(32)).peer_id, "x", b"", timeout_s=2)


async def test_streams_arrive_whole_or_fail(make: Maker) -> None:
    async def numbers(peer: str, body: bytes) -> AsyncIterator[bytes]:
        for index in range(int(body)):
            yield bytes([index]) * 100_000

    async def oversize(peer: str, body: bytes) -> AsyncIterator[bytes]:
        yield b"first"
        yield bytes(MAX_ITEM_BYTES + 1)

    async def broken(peer: str, body: bytes) -> AsyncIterator[bytes]:
        yield b"first"
        raise BadRecord("gone")

    server = await make()
    server.serve_stream("numbers", numbers)
    server.serve_stream("oversize", oversize)
    server.serve_stream("broken", broken)
    client = await make(server)

    async def read(method: str, body: bytes, max_bytes: int = 2**30) -> list[bytes]:
        return [item async for item in client.stream(server.peer_id, method, body, max_bytes=max_bytes)]

    assert [item[0] for item in await read("numbers", b"20")] == list(range(20))
    assert await read("numbers", b"0") == []
    with pytest.raises(TooLarge):
        await read("numbers", b"20", max_bytes=1_000_000)
    with pytest.raises(TooLarge):
        await read("oversize", b"")
    with pytest.raises(BadRecord, match="gone"):
        await read("broken", b"")
    with pytest.raises(PeerError) as unknown:
        await read("nothing", b"")
    assert unknown.value.code == "unknown_method"


async def test_a_cut_stream_is_told_from_a_whole_one(make: Maker) -> None:
    closed = asyncio.Event()

    async def endless(peer: str, body: bytes) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"item"
                await asyncio.sleep(0.01)
        finally:
            closed.set()

    server = await make()
    server.serve_stream("endless", endless)
    client = await make(server)
    items = client.stream(server.peer_id, "endless", b"", max_bytes=2**20)
    assert await anext(items) == b"item"
    await items.aclose()
    await asyncio.wait_for(closed.wait(), 5)  # the caller left: the handler ends
    items = client.stream(server.peer_id, "endless", b"", max_bytes=2**20)
    assert await anext(items) == b"item"
    kill(server)
    with pytest.raises((Truncated, Unreachable)):
        async for _ in items:
            pass


async def test_gossip_reaches_all_others_once(make: Maker) -> None:
    first = await make()
    nodes = [first, await make(first), await make(first)]
    got: list[list[tuple[str, bytes]]] = [[] for _ in nodes]
    arrived = asyncio.Event()
    for node, inbox in zip(nodes, got, strict=True):

        def keep(publisher: str, data: bytes, inbox: list = inbox) -> None:
            inbox.append((publisher, data))
            arrived.set()
            if data == b"bad":
                raise BadRecord("refused")

        node.subscribe("a/news", keep)

    async def until(message: tuple[str, bytes], inboxes: list[list], publish: bytes) -> None:
        async with asyncio.timeout(10):
            while not all(message in inbox for inbox in inboxes):
                await nodes[1].publish("a/news", publish)
                arrived.clear()
                try:
                    await asyncio.wait_for(arrived.wait(), 0.5)  # the mesh forms within gossipsub's heartbeat
                except TimeoutError:
                    continue

    await until((nodes[1].peer_id, b"bad"), [got[0], got[2]], b"bad")
    await until((nodes[1].peer_id, b"good"), [got[0], got[2]], b"good")
    assert got[1] == []
    assert nodes[0]._topics.refused["bad_record"] >= 1
    with pytest.raises(TooLarge):
        await nodes[0].publish("a/news", bytes(MAX_TOPIC_BYTES + 1))


async def test_the_directory_keeps_one_record_a_peer(make: Maker) -> None:
    first = await make()
    second = await make(first)
    assert await first.put("members", b"one", ttl_s=30)
    assert await second.put("members", b"two", ttl_s=30)
    assert await first.put("members", b"one again", ttl_s=40)
    expected = {first.peer_id: b"one again", second.peer_id: b"two"}
    assert await first.get("members") == expected
    assert await second.get("members") == expected
    assert await second.get("nothing") == {}
    with pytest.raises(TooLarge):
        await first.put("members", bytes(5000), ttl_s=30)


async def test_joining_reports_each_address(make: Maker) -> None:
    first = await make()
    second = await make()
    peer = Identity.from_seed(bytes(32)).peer_id
    live = first.addresses()[0]
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(0)
        closed = f"/ip4/127.0.0.1/tcp/1/p2p/{peer}"
        wrong = live.rsplit("/", 1)[0] + "/" + peer
        reports = await second.join([closed, wrong, "junk", second.addresses()[0], live])
    assert [bool(report.error) for report in reports] == [True, True, True, True, False]
    assert reports[-1].peer == first.peer_id


async def test_a_dead_p2pd_comes_back_with_everything(make: Maker) -> None:
    server = await make()
    server.serve("echo", echo)
    client = await make(server)
    states: list[bool] = []
    back, heard = asyncio.Event(), asyncio.Event()

    def note(is_up: bool) -> None:
        states.append(is_up)
        if is_up:
            back.set()

    client.on_state(note)
    client.subscribe("news", lambda peer, data: heard.set())
    client.serve("echo", echo)
    old_address = client.addresses()
    assert await client.put("k", b"v", ttl_s=60)
    pid = kill(client)
    await asyncio.wait_for(back.wait(), 10)
    assert states == [False, True]
    assert client.addresses() == old_address
    assert (await client.call(server.peer_id, "echo", b"1")).endswith(b"|1")
    assert (await server.call(client.peer_id, "echo", b"2")).endswith(b"|2")
    assert (await client.get("k")) == {client.peer_id: b"v"}
    async with asyncio.timeout(10):
        while not heard.is_set():
            await server.publish("news", b"x")
            await asyncio.sleep(0.1)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


async def test_a_pending_call_fails_at_once_when_our_p2pd_dies(make: Maker) -> None:
    started = asyncio.Event()

    async def slow(peer: str, body: bytes) -> bytes:
        started.set()
        await asyncio.Event().wait()
        return b""

    server = await make()
    server.serve("slow", slow)
    client = await make(server)
    call = asyncio.create_task(client.call(server.peer_id, "slow", b"", timeout_s=60))
    await asyncio.wait_for(started.wait(), 5)
    kill(client)
    with pytest.raises(Unreachable):
        await asyncio.wait_for(call, 3)


async def test_another_swarm_shares_only_the_handshake(make: Maker) -> None:
    server = await make()
    server.serve("echo", echo)
    server.serve("p2prl/hello", echo)
    stranger = await make(server, prefix="cd" * 32)
    with pytest.raises(PeerError):
        await stranger.call(server.peer_id, "echo", b"")
    assert (await stranger.call(server.peer_id, "p2prl/hello", b"hey")).endswith(b"|hey")
    await server.put("members", b"x", ttl_s=30)
    assert await stranger.get("members") == {}


async def test_a_taken_port_or_another_key_fails_before_the_start(make: Maker, tmp_path: Path) -> None:
    file = tmp_path / "own.key"
    identity = Identity.create(file)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        transport = Libp2pTransport(identity, file, host="127.0.0.1", port=taken.getsockname()[1], prefix="00")
        with pytest.raises(PreflightFailed, match="can't listen"):
            await transport.start()
    other = Libp2pTransport(Identity.from_seed(bytes(32)), file, host="127.0.0.1", prefix="00")
    with pytest.raises(PreflightFailed, match="another key"):
        await other.start()
    await transport.stop()


async def test_stopping_leaves_nothing(make: Maker) -> None:
    transport = await make()
    session = transport._up()
    pid = session.pid
    sockets = [Path(maddr["unix"]) for maddr in (session.p2p._daemon_listen_maddr, session.p2p._client_listen_maddr)]
    assert all(path.exists() for path in sockets)
    os.kill(pid, signal.SIGSTOP)  # a frozen p2pd too
    await asyncio.wait_for(transport.stop(), 5)
    await transport.stop()
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not any(path.exists() for path in sockets)


async def test_while_the_node_stops_a_dead_p2pd_is_no_fault_and_stays_dead(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    transport = await make()
    down, states = asyncio.Event(), list[bool]()

    def note(is_up: bool) -> None:
        states.append(is_up)
        down.set()

    transport.on_state(note)
    transport.stops_while(lambda: True)
    kill(transport)
    await asyncio.wait_for(down.wait(), 5)
    supervising, *_ = transport._tasks
    await asyncio.wait_for(asyncio.wait([supervising]), 5)  # it would wait for the next p2pd
    assert states == [False] and not caplog.records
    with pytest.raises(Unreachable, match="our own network is down"):
        await transport.call(transport.peer_id, "echo", b"", timeout_s=1)


async def test_what_is_refused_before_a_handler_is_told_with_its_peer(make) -> None:
    told: list[tuple[str, str]] = []
    server = await make()
    server.on_fault(lambda peer, error: told.append((peer, error.code)))
    caller = await make(server)
    with pytest.raises(PeerError):
        await caller.call(server.peer_id, "nothing", b"")
    with pytest.raises(PeerError):
        async for _ in caller.stream(server.peer_id, "nothing", b"", max_bytes=1):
            pass
    assert told == [(caller.peer_id, "unknown_method")] * 2
