"""Weights over real hivemind: eight nodes, and what holders do in mid transfer: die, freeze, lie, crawl."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from p2prl import codec
from p2prl.bench.processes import Processes
from p2prl.bench.transfer_holder import BEHAVE, VERSION, Behaviour, Holder, make_transport, version_of
from p2prl.errors import PeerError
from p2prl.records import PIECE_BYTES
from p2prl.swarm.addresses import peer_of
from p2prl.weights.messages import HAVE, HaveRequest
from p2prl.weights.transfer import Options, Surroundings, fetch

MIB = 2**20
NUM_PIECES = 16
UP = 8.0 * MIB


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Two holders of their own process; the folder that all share has the version."""
    started = Processes()
    try:
        (started.root / VERSION).write_bytes(os.urandom(NUM_PIECES * PIECE_BYTES - 99))
        for _ in range(2):
            started.background("p2prl.bench.transfer_holder")
        yield started
    finally:
        started.close()


@pytest_asyncio.fixture
async def holders(processes: Processes) -> AsyncIterator[list[Holder]]:
    """Five more in this process, each with its own p2pd."""
    made = [Holder(processes.root, number) for number in range(2, 7)]
    try:
        for holder in made:
            await holder.start()
        yield made
    finally:
        await asyncio.gather(*(holder.stop() for holder in made))


@pytest.mark.timeout(180)
async def test_what_seven_holders_do_in_mid_transfer_is_survived(
    processes: Processes, holders: list[Holder], record_property, capsys
):
    root = processes.root
    content = version_of(root)
    told = [json.loads((root / f"holder{number}.json").read_text()) for number in range(2)]
    addresses = [*(each["address"] for each in told), *(holder.address for holder in holders)]
    frozen, killed, good, other, liar, crawler, reborn = peers = [peer_of(address) for address in addresses]
    _, transport = make_transport(root, "fetcher")
    blamed: list[PeerError] = []
    pings: list[float] = []
    faults_done = asyncio.Event()

    def progress(num_bytes: int, of_bytes: int) -> None:
        if num_bytes > of_bytes / 4 and not faults_done.is_set():
            faults_done.set()
            os.kill(told[0]["pid"], signal.SIGSTOP)
            os.kill(told[1]["pid"], signal.SIGKILL)
            os.kill(holders[4].p2pd_pid, signal.SIGKILL)
            holders[3].set_rates(32.0 * 2**10)

    async def beat() -> None:
        body = codec.encode(HaveRequest(bytes(32)))
        while True:
            began = time.perf_counter()
            await transport.call(good, HAVE, body)
            pings.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)

    node = Surroundings(blame=blamed.append, progress=progress)
    try:
        await transport.start()
        reports = await transport.join(addresses)
        assert all(report.peer for report in reports), reports
        for peer in peers:
            await transport.call(peer, BEHAVE, codec.encode(Behaviour(up=UP, corrupt=peer == liar)))
        beating = asyncio.create_task(beat())
        began = time.perf_counter()
        path = await fetch(transport, content, lambda: peers, root / "got", options=Options(seed=1), node=node)
        took_s = time.perf_counter() - began
        beating.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await beating
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(told[0]["pid"], signal.SIGCONT)
        await transport.stop()
    assert path.read_bytes() == (root / VERSION).read_bytes()
    assert faults_done.is_set()
    assert {error.peer for error in blamed} == {liar}
    assert {frozen, killed, crawler, reborn, other} & {error.peer for error in blamed} == set()
    p95 = sorted(pings)[int(0.95 * len(pings))]
    record_property("heartbeat_p95_s", p95)
    with capsys.disabled():
        print(f"\n{content.content_bytes / MIB / took_s:.1f} MiB/s; {len(pings)} heartbeats, p95 {p95 * 1e3:.1f} ms")


@pytest.mark.timeout(120)
async def test_a_fetcher_that_is_killed_goes_on_where_it_was(processes: Processes, tmp_path: Path):
    root = processes.root
    content = version_of(root)
    told = json.loads((root / "holder0.json").read_text())
    holder = peer_of(told["address"])
    _, transport = make_transport(root, "fetcher")
    verified: list[int] = []
    enough = asyncio.Event()

    def progress(num_bytes: int, _: int) -> None:
        verified.append(num_bytes)
        if len(verified) == 5:
            enough.set()

    try:
        await transport.start()
        await transport.join([told["address"]])
        await transport.call(holder, BEHAVE, codec.encode(Behaviour(up=4 * UP)))
        fetching = asyncio.create_task(
            fetch(transport, content, lambda: [holder], tmp_path, node=Surroundings(progress=progress))
        )
        await enough.wait()
        fetching.cancel()
        await asyncio.wait([fetching])
        before = transport.with_peer(holder).received_bytes
        path = await fetch(transport, content, lambda: [holder], tmp_path)
        assert path.read_bytes() == (root / VERSION).read_bytes()
        fetched = transport.with_peer(holder).received_bytes - before
        assert fetched <= content.content_bytes - 5 * PIECE_BYTES + 2**16
    finally:
        await transport.stop()


@pytest.mark.timeout(120)
async def test_two_that_pull_share_a_cap_that_is_kept_and_changed_live(processes: Processes, holders: list[Holder]):
    """One holder and two that fetch from it, over real streams: neither is under 40 %, any 5 s are within 5 % of the cap."""
    root, holder = processes.root, holders[0]
    content = version_of(root)
    peer = peer_of(holder.address)
    pulling = [make_transport(root, f"puller{number}")[1] for number in range(2)]
    fetching: list[asyncio.Task[Path]] = []

    async def received(cap: float) -> list[int]:
        """By each over five seconds under this cap, the first moments of it left out."""
        holder.set_rates(cap)
        await asyncio.sleep(1.0)
        began, before = time.perf_counter(), [each.with_peer(peer).received_bytes for each in pulling]
        await asyncio.sleep(5.0)
        span_s = time.perf_counter() - began
        return [
            int((each.with_peer(peer).received_bytes - old) * 5.0 / span_s)
            for each, old in zip(pulling, before, strict=True)
        ]

    try:
        holder.set_rates(3.0 * MIB)
        for number, transport in enumerate(pulling):
            await transport.start()
            await transport.join([holder.address])
            work = fetch(transport, content, lambda: [peer], root / f"pulled{number}", options=Options(seed=number))
            fetching.append(asyncio.create_task(work))
        for cap in (3.0 * MIB, 1.5 * MIB):
            shares = await received(cap)
            assert 0.95 * cap * 5 <= sum(shares) <= 1.05 * cap * 5, (cap, shares)
            assert min(shares) >= 0.4 * sum(shares), shares
        holder.set_rates(None)
        for path in await asyncio.gather(*fetching):
            assert path.read_bytes() == (root / VERSION).read_bytes()
    finally:
        for task in fetching:
            task.cancel()
        await asyncio.gather(*fetching, return_exceptions=True)
        await asyncio.gather(*(transport.stop() for transport in pulling))
