"""The in-process network keeps the rules of `transport.py`, and its faults look like a real network's."""

import asyncio
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import async_solipsism
import pytest

from p2prl.errors import BadRecord, PeerError, TooLarge, Truncated, Unreachable
from p2prl.swarm.memory_transport import Conditions, MemoryNetwork, MemoryTransport
from p2prl.swarm.transport import MAX_CALL_BYTES, MAX_TOPIC_BYTES


def virtual(program: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        return runner.run(program())


async def swarm(network: MemoryNetwork, *names: str) -> list[MemoryTransport]:
    nodes = [network.transport(name) for name in names]
    for node in nodes:
        await node.start()
    for node in nodes[1:]:
        (report,) = await node.join(nodes[0].addresses())
        assert report.peer == names[0]
    return nodes


async def echo(peer: str, body: bytes) -> bytes:
    return peer.encode() + b":" + body


async def collect(node: MemoryTransport, peer: str, method: str, **over: Any) -> list[bytes]:
    return [item async for item in node.stream(peer, method, b"", **{"max_bytes": 2**20, **over})]


def now() -> float:
    return asyncio.get_running_loop().time()


def test_calls_carry_the_true_caller_and_only_within_the_joined_swarm():
    async def program():
        network = MemoryNetwork(1)
        a, b, c = await swarm(network, "a", "b", "c")
        a.serve("p2prl/echo", echo)
        b.serve("p2prl/echo", echo)
        assert await b.call("a", "p2prl/echo", b"hi") == b"b:hi"
        assert await c.call("b", "p2prl/echo", b"hi") == b"c:hi"
        assert await a.peers() == {"b", "c"}
        lonely = network.transport("lonely")
        await lonely.start()
        with pytest.raises(Unreachable):
            await lonely.call("a", "p2prl/echo", b"hi")
        assert [bool(r.peer) for r in await lonely.join(["/memory/x/p2p/nobody", *a.addresses()])] == [False, True]
        assert await lonely.call("b", "p2prl/echo", b"") == b"lonely:"
        assert a.traffic().received["echo"] == 2 and b.traffic().sent["echo"] > 0

    virtual(program)


def test_sizes_are_capped_and_handler_errors_come_back():
    async def program():
        a, b = await swarm(MemoryNetwork(1), "a", "b")

        async def fails(peer: str, body: bytes) -> bytes:
            raise BadRecord("no such thing") if body else KeyError("boom")

        async def floods(peer: str, body: bytes) -> bytes:
            return bytes(MAX_CALL_BYTES + 1)

        a.serve("fails", fails)
        a.serve("floods", floods)
        for body, text in ((b"x", "no such thing"), (b"", "boom")):
            with pytest.raises(PeerError, match=text):
                await b.call("a", "fails", body)
        with pytest.raises(PeerError, match="does not know"):
            await b.call("a", "unknown", b"")
        with pytest.raises(TooLarge):
            await b.call("a", "floods", b"")
        with pytest.raises(TooLarge):
            await b.call("a", "fails", bytes(MAX_CALL_BYTES + 1))
        with pytest.raises(TooLarge):
            await b.publish("t", bytes(MAX_TOPIC_BYTES + 1))

    virtual(program)


def test_a_silent_handler_ends_at_the_deadline_and_is_cancelled():
    async def program():
        a, b = await swarm(MemoryNetwork(1), "a", "b")
        ended = asyncio.Event()

        async def sleeps(peer: str, body: bytes) -> bytes:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.set()
            return b""

        a.serve("sleeps", sleeps)
        began = now()
        with pytest.raises(Unreachable):
            await b.call("a", "sleeps", b"", timeout_s=2.0)
        assert now() - began == pytest.approx(2.0)
        assert ended.is_set()

    virtual(program)


def test_a_crash_breaks_calls_at_once_and_a_partition_at_the_deadline():
    async def program():
        network = MemoryNetwork(1)
        a, b, _ = await swarm(network, "a", "b", "c")

        async def sleeps(peer: str, body: bytes) -> bytes:
            await asyncio.sleep(3600)
            return b""

        a.serve("sleeps", sleeps)
        a.serve("echo", echo)
        network.partition(["a"], ["b", "c"])
        began = now()
        with pytest.raises(Unreachable):
            await b.call("a", "echo", b"", timeout_s=3.0)
        assert now() - began == pytest.approx(3.0)
        assert await a.peers() == frozenset() and await b.peers() == {"c"}
        network.heal()
        assert await b.call("a", "echo", b"") == b"b:"

        asyncio.get_running_loop().call_later(1.0, network.crash, "a")
        began = now()
        with pytest.raises(Unreachable):
            await b.call("a", "sleeps", b"", timeout_s=60.0)
        assert now() - began < 1.5
        with pytest.raises(ValueError, match="still up"):
            network.transport("b")
        again = network.transport("a")
        await again.start()
        again.serve("echo", echo)
        with pytest.raises(Unreachable):
            await b.call("a", "echo", b"")
        await again.join(b.addresses())
        assert await b.call("a", "echo", b"") == b"b:"

    virtual(program)


def test_streams_end_whole_or_say_that_they_were_cut():
    async def program():
        network = MemoryNetwork(1)
        a, b = await swarm(network, "a", "b")
        closed = []

        async def numbers(peer: str, body: bytes):
            try:
                for i in range(5):
                    await asyncio.sleep(1.0)
                    yield b"%d" % i
            finally:
                closed.append(peer)

        async def broken(peer: str, body: bytes):
            yield b"one"
            raise BadRecord("lost the rest")

        a.serve_stream("numbers", numbers)
        a.serve_stream("broken", broken)
        assert await collect(b, "a", "numbers") == [b"0", b"1", b"2", b"3", b"4"]
        with pytest.raises(TooLarge):
            await collect(b, "a", "numbers", max_bytes=3)
        with pytest.raises(Unreachable):
            await collect(b, "a", "numbers", item_timeout_s=0.5)
        with pytest.raises(PeerError, match="lost the rest"):
            await collect(b, "a", "broken")
        assert closed == ["b"] * 3
        asyncio.get_running_loop().call_later(2.5, network.crash, "a")
        with pytest.raises(Truncated):
            await collect(b, "a", "numbers")

    virtual(program)


def test_cut_streams_are_told():
    async def program():
        a, b = await swarm(MemoryNetwork(1, Conditions(cut=1.0)), "a", "b")

        async def one(peer: str, body: bytes):
            yield b"item"

        a.serve_stream("one", one)
        with pytest.raises(Truncated):
            await collect(b, "a", "one")

    virtual(program)


def test_gossip_reaches_every_subscriber_once_and_never_its_own():
    async def program():
        nodes = await swarm(MemoryNetwork(1), *"abcde")
        heard = []

        def refuses(peer: str, data: bytes) -> None:
            heard.append(("e", peer, data))
            raise BadRecord("garbage")

        for node in nodes[:4]:
            node.subscribe("t", lambda peer, data, me=node.peer_id: heard.append((me, peer, data)))
        nodes[4].subscribe("t", refuses)
        await nodes[0].publish("t", b"x")
        await nodes[0].publish("other", b"y")
        await asyncio.sleep(5.0)
        assert sorted(heard) == [(me, "a", b"x") for me in "bcde"]

    virtual(program)


def test_loss_duplicates_and_reordering_come_at_their_rates():
    async def program():
        a, b = await swarm(MemoryNetwork(7), "a", "b")
        a._network.conditions = Conditions(loss=0.3, duplicate=0.2, jitter_s=1.0)
        heard = []
        b.subscribe("t", lambda peer, data: heard.append(int(data)))
        for i in range(1000):
            await a.publish("t", b"%d" % i)
            await asyncio.sleep(0.1)
        await asyncio.sleep(60.0)
        assert 620 < len(set(heard)) < 780
        assert 80 < len(heard) - len(set(heard)) < 200
        assert heard != sorted(heard)

    virtual(program)


def test_records_expire_outlive_their_maker_and_are_replaced():
    async def program():
        network = MemoryNetwork(1)
        a, b, c = await swarm(network, "a", "b", "c")
        assert await a.put("k", b"1", ttl_s=30.0)
        assert await b.put("k", b"2", ttl_s=90.0)
        assert await a.put("k", b"3", ttl_s=30.0)
        network.crash("a")
        assert await c.get("k") == {"a": b"3", "b": b"2"}
        await asyncio.sleep(30.0)
        assert await c.get("k") == {"b": b"2"} and await c.get("other") == {}
        alone = network.transport("alone")
        await alone.start()
        assert not await alone.put("k", b"4", ttl_s=9.0)

    virtual(program)


def test_an_outage_keeps_registrations_and_is_told():
    async def program():
        network = MemoryNetwork(1)
        a, b = await swarm(network, "a", "b")
        states = []
        a.on_state(states.append)
        a.serve("echo", echo)
        b.serve("echo", echo)
        network.outage("a")
        with pytest.raises(Unreachable):
            await a.call("b", "echo", b"")
        with pytest.raises(Unreachable):
            await b.call("a", "echo", b"")
        network.recover("a")
        assert await b.call("a", "echo", b"x") == b"b:x"
        assert states == [False, True]
        await a.stop()
        await a.stop()
        assert await b.peers() == frozenset()

    virtual(program)


def trace(seed: int) -> str:
    """Fifty nodes for nine seconds with loss, churn and a partition: a hash of everything that moved."""
    digest = hashlib.sha256()
    names = [f"node{i:02}" for i in range(50)]

    async def program():
        conditions = Conditions(loss=0.1, duplicate=0.05, cut=0.02)
        network = MemoryNetwork(seed, conditions, lambda *event: digest.update(repr(event).encode()))
        nodes = {node.peer_id: node for node in await swarm(network, *names)}

        async def talk(node: MemoryTransport, i: int) -> None:
            while node.is_up:
                await node.publish("t", b"%d" % i)
                try:
                    await node.call(names[(i * 7 + 3) % 50], "echo", b"x", timeout_s=2.0)
                except PeerError as error:
                    digest.update(error.code.encode())
                await asyncio.sleep(1.0)

        for node in nodes.values():
            node.serve("echo", echo)
            node.subscribe("t", lambda peer, data: None)
        async with asyncio.TaskGroup() as group:
            for i, name in enumerate(names):
                group.create_task(talk(nodes[name], i))
            await asyncio.sleep(3.0)
            network.partition(names[:20], names[20:])
            await asyncio.sleep(3.0)
            network.heal()
            for name in names[::7]:
                network.crash(name)
            await asyncio.sleep(3.0)
            for name in names:
                await nodes[name].stop()

    virtual(program)
    return digest.hexdigest()


def test_same_seed_same_trace_whatever_the_hash_seed():
    code = f"import runpy; print(runpy.run_path({__file__!r})['trace'](5))"
    seen = {trace(5)}
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        seen.add(done.stdout.strip())
    assert len(seen) == 1
    assert trace(6) not in seen
