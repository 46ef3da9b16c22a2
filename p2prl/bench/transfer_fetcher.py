"""The fetching side of the transfer benchmark: each case in turn, from the holders that run in FOLDER.

In: FOLDER with `version` and `holderN.json` of four holders, `proxies.json` of the delayed ones. Out: seconds, rates.

    python -m p2prl.bench.transfer_fetcher FD FOLDER
"""

import asyncio
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from p2prl import codec
from p2prl.bench import bare_hivemind
from p2prl.bench.measuring import run, say
from p2prl.bench.processes import cost
from p2prl.bench.transfer_holder import BEHAVE, Behaviour, make_transport, version_of
from p2prl.errors import PeerError
from p2prl.records import PIECE_BYTES, Content
from p2prl.swarm.addresses import peer_of
from p2prl.weights.messages import HAVE, HaveRequest
from p2prl.weights.transfer import Surroundings, fetch

MIB = 2**20
CAP = 20.0 * MIB
ROUNDS = 5
PING_EVERY_S = 0.05
KILL_AT = 0.4  # of the content


class Fetcher:
    def __init__(self, folder: Path, name: str, content: Content) -> None:
        self.folder, self._content = folder / name, content
        self.inner, self.transport = make_transport(folder, name)
        self.blamed: list[PeerError] = []
        self.pings: list[float] = []

    async def start(self, addresses: Sequence[str]) -> None:
        await self.transport.start()
        reports = await self.transport.join(addresses)
        if not all(report.peer for report in reports):
            raise RuntimeError(f"holders can't be reached: {reports}")

    async def behave(self, peers: Sequence[str], behaviour: Behaviour) -> None:
        for peer in peers:
            await self.transport.call(peer, BEHAVE, codec.encode(behaviour))

    async def timed(self, peers: Sequence[str], progress: Callable[[int, int], None] = lambda a, b: None) -> float:
        """MiB a second, verified, on the disk under its name."""
        node = Surroundings(blame=self.blamed.append, progress=progress)
        started = time.perf_counter()
        path = await fetch(self.transport, self._content, lambda: peers, self.folder, node=node)
        took_s = time.perf_counter() - started
        if path.stat().st_size != self._content.content_bytes:
            raise RuntimeError("the transfer is not whole")
        await asyncio.to_thread(shutil.rmtree, self.folder)
        return self._content.content_bytes / MIB / took_s

    async def ping(self, peers: Sequence[str]) -> None:
        """Small calls to each in turn, until cancelled."""
        body = codec.encode(HaveRequest(codec.ZERO_HASH))
        while True:
            for peer in peers:
                started = time.perf_counter()
                await self.transport.call(peer, HAVE, body)
                self.pings.append(time.perf_counter() - started)
                await asyncio.sleep(PING_EVERY_S)


async def uncapped(fetcher: Fetcher, peers: Sequence[str], told: dict[str, Any], num_bytes: int) -> dict[str, Any]:
    """Rounds of the bare stream and of ours from one, two and four holders; CPU seconds of both ends of the first two."""
    rounds: list[dict[str, float]] = []
    cpu: list[dict[str, float]] = []
    bare = await bare_hivemind.connected_to(told["raw"])
    try:
        await fetcher.timed(peers[:1])  # connections and caches are warm for all
        for _ in range(ROUNDS):
            times = [_cpu_s(told["pid"])]
            rates = {"raw": num_bytes / MIB / await bare_hivemind.read_stream(bare, told["raw"], num_bytes)}
            times.append(_cpu_s(told["pid"]))
            rates["1"] = await fetcher.timed(peers[:1])
            times.append(_cpu_s(told["pid"]))
            for count in (2, 4):
                rates[str(count)] = await fetcher.timed(peers[:count])
            rounds.append(rates)
            rates["disk"] = num_bytes / MIB / await asyncio.to_thread(_write_s, fetcher.folder, num_bytes)
            cpu.append({"raw": times[1] - times[0], "1": times[2] - times[1]})
            say("MiB/s: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items()))
    finally:
        await bare_hivemind.end_p2p(bare)
    return {"rounds": rounds, "cpu_s": cpu}


def _write_s(folder: Path, num_bytes: int) -> float:
    """Seconds to write so many bytes to a new file and sync them, by one thread that does nothing else."""
    data = os.urandom(PIECE_BYTES)
    started = time.perf_counter()
    folder.mkdir()
    with (folder / "plain").open("wb", buffering=0) as file:
        for _ in range(num_bytes // PIECE_BYTES):
            file.write(data)
        os.fsync(file.fileno())
    took_s = time.perf_counter() - started
    shutil.rmtree(folder)
    return took_s


def _cpu_s(holder_pid: int) -> float:
    return cost(os.getpid()).cpu_s + cost(holder_pid).cpu_s


async def capped(fetcher: Fetcher, peers: Sequence[str]) -> dict[str, Any]:
    """Each holder at CAP, from one and from four; small calls to the holders meanwhile."""
    await fetcher.behave(peers, Behaviour(up=CAP))
    one = await fetcher.timed(peers[:1])
    fetcher.pings = []
    pings = asyncio.create_task(fetcher.ping(peers))
    try:
        four = await fetcher.timed(peers)
    finally:
        pings.cancel()
        await asyncio.wait([pings])
    say(f"MiB/s: one {one:.1f}, four {four:.1f}")
    return {"one": one, "four": four, "pings_s": fetcher.pings}


async def faults(fetcher: Fetcher, peers: Sequence[str], pid: int) -> dict[str, Any]:
    """The second holder is false, the fourth is killed in mid transfer."""
    await fetcher.behave(peers, Behaviour(up=CAP))
    await fetcher.behave(peers[1:2], Behaviour(up=CAP, corrupt=True))
    fetcher.blamed.clear()
    killed = False

    def progress(num_bytes: int, of_bytes: int) -> None:
        nonlocal killed
        if not killed and num_bytes > KILL_AT * of_bytes:
            killed = True
            os.kill(pid, signal.SIGKILL)

    rate = await fetcher.timed(peers, progress)
    return {"rate": rate, "blamed": sorted({peers.index(error.peer) for error in fetcher.blamed}), "killed": killed}


async def measure(folder: Path) -> dict[str, Any]:
    content = await asyncio.to_thread(version_of, folder)
    told = [json.loads((folder / f"holder{number}.json").read_text()) for number in range(4)]
    addresses = [holder["address"] for holder in told]
    peers = [peer_of(address) for address in addresses]
    ports = json.loads((folder / "proxies.json").read_text())
    near, far = Fetcher(folder, "near", content), Fetcher(folder, "far", content)
    try:
        await near.start(addresses)
        say("transfer: the bare stream, then from 1, 2 and 4 holders without a cap")
        free = await uncapped(near, peers, told[0], content.content_bytes)
        say(f"transfer: each holder at {CAP / MIB:.0f} MiB/s")
        under_cap = await capped(near, peers)
        await far.start([_through(address, port) for address, port in zip(addresses, ports, strict=True)])
        say("transfer: the same over a long line")
        delayed = await capped(far, peers)
        say("transfer: one holder lies, one is killed")
        broken = await faults(near, peers, told[3]["pid"])
        return {"bytes": content.content_bytes, **free, "capped": under_cap, "delayed": delayed, "faults": broken}
    finally:
        await near.transport.stop()
        await far.transport.stop()


def _through(address: str, port: int) -> str:
    peer = address.rsplit("/p2p/", 1)[1]
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"


if __name__ == "__main__":
    raise SystemExit(run(measure))
