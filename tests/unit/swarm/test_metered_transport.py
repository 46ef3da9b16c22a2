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
from p2prl.swarm.transport import MAX_ITEM_BYTES

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


async def small(peer: str, body: bytes) -> AsyncIterator[bytes]:
    """Items that are short beside the caps of these tests."""
    for _ in range(body[0] * 10):
        yield bytes(10**5)


class Moved:
    """When how many bytes came to us."""

    def __init__(self) -> None:
        self.items: list[tuple[float, int]] = []

    async def drain(self, node: MeteredTransport, peer: str, number: int) -> None:
        async for item in node.stream(peer, "load", bytes([number]), max_bytes=2**30):
            self.items.append((now(), len(item)))

    def between(self, start: float, end: float) -> int:
        return sum(num_bytes for at, num_bytes in self.items if start <= at < end)

    def windows(self, seconds: float) -> list[int]:
        """Bytes in every window that begins at an item and ends before the last one."""
        starts = [at for at, _ in self.items if at + seconds <= self.items[-1][0]]
        return [self.between(start, start + seconds) for start in starts[:: max(1, len(starts) // 100)]]


@pytest.mark.parametrize("side", ["up", "down"])
@pytest.mark.parametrize("num_streams", [1, 6])
def test_any_five_seconds_are_within_5_percent_of_the_cap(side: str, num_streams: int):
    async def program():
        a, b = await swarm("a", "b", **{side: 10.0e6})
        a.serve_stream("load", small)
        moved = Moved()
        await asyncio.gather(*(moved.drain(b, "a", 150 // num_streams) for _ in range(num_streams)))
        windows = moved.windows(5.0)
        assert len(windows) > 50
        assert min(windows) >= 0.95 * 50e6 and max(windows) <= 1.05 * 50e6

    virtual(program)


@pytest.mark.parametrize("side", ["up", "down"])
def test_a_cap_is_changed_while_streams_run(side: str):
    async def program():
        a, b = await swarm("a", "b", **{side: 10.0e6})
        a.serve_stream("load", small)
        moved = Moved()
        draining = asyncio.gather(*(moved.drain(b, "a", 100) for _ in range(2)))
        limited = a if side == "up" else b
        began = now()
        await asyncio.sleep(5.0)
        limited.set_rates(*((2.0e6, None) if side == "up" else (None, 2.0e6)))
        await asyncio.sleep(5.0)
        limited.set_rates(None, None)
        await draining
        assert moved.between(began, began + 5.0) == pytest.approx(50e6, rel=0.05)
        assert moved.between(began + 5.0, began + 10.0) == pytest.approx(10e6, rel=0.05)
        assert now() - began < 15.0, "without a cap the rest takes no time"

    virtual(program)


@pytest.mark.parametrize("up", [10.0e6, None])
@pytest.mark.parametrize("num_streams", [1, 4, 8])
def test_of_two_that_pull_neither_gets_under_40_percent(up: float | None, num_streams: int):
    async def program():
        a, one, many = await swarm("a", "one", "many", up=up)
        a.serve_stream("load", small)
        of_one, of_many = Moved(), Moved()
        streams = [of_one.drain(one, "a", 200), *(of_many.drain(many, "a", 200) for _ in range(num_streams))]
        pulling = [asyncio.create_task(stream) for stream in streams]
        began = now()
        await asyncio.sleep(10.0 if up else 0.5)
        for task in pulling:
            task.cancel()
        await asyncio.wait(pulling)
        mine, theirs = of_one.between(began, now()), of_many.between(began, now())
        assert mine > 10**7 and 0.4 <= mine / (mine + theirs) <= 0.6

    virtual(program)


def test_small_calls_wait_for_no_cap():
    async def program():
        a, b = await swarm("a", "b", up=1.0e6, down=1.0e6)
        for node in (a, b):
            node.serve("echo", echo)
            node.serve_stream("load", small)
        pulls = [asyncio.create_task(drain(b, "a", 20)) for _ in range(4)]
        await asyncio.sleep(3.0)
        for _ in range(20):
            began = now()
            await b.call("a", "echo", b"alive?")
            assert now() - began < 0.01
        for pull in pulls:
            pull.cancel()
        await asyncio.wait(pulls)

    virtual(program)


def test_items_are_short_under_a_cap():
    async def program():
        (a,) = await swarm("a")
        assert a.up_item_bytes() == a.down_item_bytes() == MAX_ITEM_BYTES
        a.set_rates(1.0e6, 1.0e6)
        assert (a.up_item_bytes(), a.down_item_bytes()) == (50_000, 20_000)
        a.set_rates(1.0e3, 1.0e3)
        assert a.up_item_bytes() == a.down_item_bytes() == 4096, "not shorter than is worth sending"

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
