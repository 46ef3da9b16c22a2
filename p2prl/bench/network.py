"""How fast the network is: pings, announcements to twelve peers, and a join; real p2pd, loopback, one event loop.

In: a folder for identities. Out: samples, seconds.

    python -m p2prl.bench.network FD FOLDER

Thirteen p2pd of their own process each hang on the one loop of this process, which also checks every signature: a slow
case, since in a swarm each peer has a loop of its own. An announcement that not all hear within `LOST_S` counts as so
long. Joins and bare hivemind's joins take turns.
"""

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

from p2prl import codec
from p2prl.bench import bare_hivemind
from p2prl.bench.measuring import run, say
from p2prl.identity import Identity
from p2prl.records import Announcement, GroupHeader, Version
from p2prl.swarm.libp2p.transport import Libp2pTransport

NUM_PEERS = 12
NUM_ANNOUNCEMENTS, ANNOUNCE_EVERY_S, LOST_S = 100, 0.15, 5.0
NUM_PINGS, NUM_JOINS = 240, 7
RENEWAL_S = 1.0  # what a joiner hears first in a quiet swarm: the leader's renewal, once a second
POLL_S = 0.02
GIVE_UP_S = 30.0
TOPIC, PING, DIRECTORY = "announce", "ping", "members"
SWARM = bytes(range(32))


class Member:
    """A transport that hears announcements and notes when."""

    def __init__(self, folder: Path, name: str) -> None:
        file = folder / f"{name}.key"
        self.identity = Identity.create(file)
        self.transport = Libp2pTransport(self.identity, file, host="127.0.0.1", prefix=SWARM.hex())
        self.heard: dict[bytes, float] = {}
        self.anything = asyncio.Event()
        self.transport.subscribe(TOPIC, self._on_announcement)
        self.transport.serve(PING, self._on_ping)

    def _on_announcement(self, publisher: str, data: bytes) -> None:
        sealed = codec.unseal(data, Announcement, SWARM, owner=lambda record: record.maker)
        self.heard[sealed.id] = time.monotonic()
        self.anything.set()

    async def _on_ping(self, peer: str, body: bytes) -> bytes:
        return body

    async def announce(self) -> bytes:
        """Publish an announcement of four groups; its id."""
        version = Version(1, 1, os.urandom(32))
        headers = tuple(GroupHeader(os.urandom(32), 4000, version, 8, 0.5) for _ in range(4))
        data = codec.seal(Announcement(self.identity.peer_id, headers), self.identity, SWARM)
        await self.transport.publish(TOPIC, data)
        return codec.sealed_id(data)


async def measure(folder: Path) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        members: list[Member] = []
        for index in range(NUM_PEERS + 1):
            member = Member(folder, f"member{index}")
            stack.push_async_callback(member.transport.stop)
            await member.transport.start()
            await member.transport.join([other.transport.addresses()[0] for other in members[:3]])
            members.append(member)
        say(f"{len(members)} peers are up")
        await until_all_hear(members)
        pings = await ping_times(members)
        say(f"{len(pings)} pings done; {NUM_ANNOUNCEMENTS} announcements")
        reached = await reach_times(members)
        say(f"announcements done; {NUM_JOINS} joins, ours and bare hivemind's in turn")
        first = await bare_hivemind.first_node()
        stack.push_async_callback(bare_hivemind.end_node, first)
        joins, bare = [], []
        for index in range(NUM_JOINS):
            joins.append(await join_times(folder, f"joiner{index}", members))
            bare.append(await bare_hivemind.start_and_store(first))
        return {"pings": pings, "reached": reached, "joins": joins, "bare_joins": bare}


async def until_all_hear(members: list[Member]) -> None:
    """Gossip's meshes take some seconds to grow: wait until everybody hears everybody."""
    deadline = time.monotonic() + GIVE_UP_S
    for publisher in members:
        while await reach_time(publisher, members) >= LOST_S:
            if time.monotonic() > deadline:
                raise RuntimeError(f"gossip does not reach all of {len(members)} peers within {GIVE_UP_S:.0f} s")


async def ping_times(members: list[Member]) -> list[float]:
    """Unary round trips from each to each."""
    times = []
    for number in range(NUM_PINGS):
        caller = members[number % len(members)]
        callee = members[(number + 1 + number // len(members)) % len(members)]
        if caller is callee:
            continue
        started = time.monotonic()
        await caller.transport.call(callee.identity.peer_id, PING, b"ping")
        times.append(time.monotonic() - started)
    return times


async def reach_times(members: list[Member]) -> list[float]:
    times = []
    for number in range(NUM_ANNOUNCEMENTS):
        times.append(await reach_time(members[number % len(members)], members))
        await asyncio.sleep(ANNOUNCE_EVERY_S)
    return times


async def reach_time(publisher: Member, members: list[Member]) -> float:
    """Seconds until the last of the others has heard and checked one announcement; LOST_S when one never does."""
    others = [member for member in members if member is not publisher]
    started = time.monotonic()
    announced = await publisher.announce()
    while not all(announced in member.heard for member in others):
        if time.monotonic() - started > LOST_S:
            return LOST_S
        await asyncio.sleep(0.001)
    return max(member.heard[announced] for member in others) - started


async def join_times(folder: Path, name: str, members: list[Member]) -> dict[str, float]:
    """Seconds from the start of a new node's network until others read its record, until it heard another."""
    newcomer = Member(folder, name)
    renewals = asyncio.create_task(_renew(members[0]))
    started = time.monotonic()
    try:
        await newcomer.transport.start()
        up_s = time.monotonic() - started
        reports = await newcomer.transport.join([member.transport.addresses()[0] for member in members[1:3]])
        if not all(report.peer for report in reports):
            raise RuntimeError(f"the newcomer can't join: {reports}")
        joined_s = time.monotonic() - started
        record_s, heard_s = await asyncio.wait_for(
            asyncio.gather(_read_back(newcomer, members[-1], started), _first_heard(newcomer, started)), GIVE_UP_S
        )
        return {"up": up_s, "joined": joined_s, "record": record_s, "heard": heard_s, "all": max(record_s, heard_s)}
    finally:
        renewals.cancel()
        await asyncio.wait([renewals])
        await newcomer.transport.stop()


async def _renew(leader: Member) -> None:
    while True:
        await leader.announce()
        await asyncio.sleep(RENEWAL_S)


async def _read_back(newcomer: Member, reader: Member, started: float) -> float:
    peer = newcomer.identity.peer_id
    while True:
        await newcomer.transport.put(DIRECTORY, b"record of " + peer.encode(), ttl_s=45.0)
        if peer in await reader.transport.get(DIRECTORY):
            return time.monotonic() - started
        await asyncio.sleep(POLL_S)


async def _first_heard(newcomer: Member, started: float) -> float:
    await newcomer.anything.wait()
    return time.monotonic() - started


if __name__ == "__main__":
    raise SystemExit(run(measure))
