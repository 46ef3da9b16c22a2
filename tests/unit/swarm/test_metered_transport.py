"""Over a real (in-process) network under virtual time: shares, caps, and what moved between whom."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import async_solipsism
import pytest

from p2prl.clock import LoopClock
from p2prl.errors import PeerError
from p2prl.swarm.memory_transport import Conditions, MemoryNetwork
from p2prl.swarm.metered_transport import MESSAGES, REQUESTS, MeteredTransport

QUICK = Conditions(latency_s=0.001, jitter_s=0.0)


def virtual(program: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        return runner.run(program())


async def swarm(*names: str, **rates: float | None) -> list[MeteredTransport]:
    network, clock = MemoryNetwork(1, QUICK), LoopClock()
    nodes = [MeteredTransport(network.transport(name), clock, **rates) for name in names]
    for node in nodes:
        await node.start()
        await node.join(nodes[0].addresses())
    return nodes


async def echo(peer: str, body: bytes) -> bytes:
    return body


async def megabytes(peer: str, body: bytes) -> AsyncIterator[bytes]:
    for _ in range(body[0]):
        yield bytes(10**6)


async def drain(node: MeteredTransport, peer: str, number: int) -> int:
    return sum([len(item) async for item in node.stream(peer, "load", bytes([number]), max_bytes=2**30)])


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_peer_over_its_share_is_refused_and_shown_and_others_are_served():
    async def program():
        a, b, c = await swarm("a", "b", "c")
        a.serve("echo", echo)
        faults: list[tuple[str, str]] = []
        a.on_fault = lambda peer, error: faults.append((peer, error.code))
        most = int(REQUESTS.requests_per_s * (REQUESTS.burst_s + REQUESTS.max_wait_s))
        calls = [asyncio.create_task(b.call("a", "echo", b"x", timeout_s=60.0)) for _ in range(2 * most)]
        done = await asyncio.gather(*calls, return_exceptions=True)
        refused = [result for result in done if isinstance(result, PeerError)]
        assert most * 0.9 < len(done) - len(refused) < most * 1.1
        assert faults == [("b", "over_quota")] * len(refused) and refused
        assert "requests a second" in str(refused[0])
        assert await c.call("a", "echo", b"y") == b"y"
        await asyncio.sleep(REQUESTS.burst_s)
        assert await b.call("a", "echo", b"again") == b"again"

    virtual(program)


@pytest.mark.parametrize("side", ["up", "down"])
def test_streams_keep_to_the_cap_and_follow_its_change(side: str):
    async def program():
        a, b = await swarm("a", "b", **{side: 10.0e6})
        a.serve_stream("load", megabytes)
        started = now()
        assert await drain(b, "a", 110) == 110 * 10**6
        assert (now() - started) == pytest.approx(10.0, rel=0.05), "10 MB at once, the rest at the rate"
        for node in (a, b):
            node.set_rates(None, None)
        started = now()
        await drain(b, "a", 100)
        assert now() - started < 1.0

    virtual(program)


def test_gossip_of_a_flooding_publisher_is_dropped():
    async def program():
        a, b = await swarm("a", "b")
        heard: list[bytes] = []
        faults: list[str] = []
        a.on_fault = lambda peer, error: faults.append(error.code)
        a.subscribe("news", lambda publisher, data: heard.append(data))
        await asyncio.sleep(1.0)
        for number in range(5000):
            await b.publish("news", number.to_bytes(2, "big"))
        await asyncio.sleep(1.0)
        most = MESSAGES.requests_per_s * (MESSAGES.burst_s + MESSAGES.max_wait_s)
        assert most * 0.9 < len(heard) < most * 1.2
        assert faults == ["over_quota"] * (5000 - len(heard))

    virtual(program)


def test_bytes_are_counted_by_peer_on_both_sides():
    async def program():
        a, b = await swarm("a", "b")
        a.serve("echo", echo)
        a.serve_stream("load", megabytes)
        await b.call("a", "echo", b"12345")
        await drain(b, "a", 3)
        here, there = a.with_peer("b"), b.with_peer("a")
        assert (here.sent_bytes, here.received_bytes) == (5 + 3 * 10**6, 6)
        assert (there.sent_bytes, there.received_bytes) == (6, 5 + 3 * 10**6)

    virtual(program)
