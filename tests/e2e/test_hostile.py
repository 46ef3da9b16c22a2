"""Peers that mean harm, over real libp2p, against a real node that must go on learning and say who did what."""

# hivemind's protobuf modules are made at import.
# pyright: reportAttributeAccessIssue=false

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest

from p2prl import codec
from p2prl.node.receive_loop import DigestReply, GroupsRequest, Offer
from p2prl.node.verdicts import VerdictBatch
from p2prl.recipe import find
from p2prl.records import (
    WIRE_SCHEMA,
    Announcement,
    Group,
    GroupHeader,
    Hello,
    Lease,
    Verdict,
    Version,
    Vote,
    VoteRequest,
)
from tests.e2e.attacker import BASE, SWARM, Attacker, variants

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]
CALLS = ("p2prl/hello", "p2prl/recipe", "vote", "digest", "verdicts", "no such method", "")
STREAMS = ("group", "manifests", "weights", "no such method", "")
GARBAGE = (
    b"",
    b"\0",
    b"\xc1" * 100,
    bytes(range(256)) * 200,
    b"\x91" * 60_000,  # nested without end
    b"\xdd\xff\xff\xff\xff",  # an array of 2**32 entries, it says
    b"\xc6\xff\xff\xff\xff" + b"x" * 50,
    b"\x81" * 5000 + b"\xa1x",
)


@pytest.fixture
async def attacker(tmp_path: Path) -> AsyncIterator[Attacker]:
    made = Attacker(tmp_path, "attacker")
    yield made
    await made.transport.stop()


async def wait(node, condition, what: str) -> None:
    """The attacker's loop goes on meanwhile."""
    await asyncio.to_thread(node.wait, condition, what)


async def started(node) -> str:
    """The address of a node that trains."""
    node.start()
    await wait(node, lambda: node.step() >= 2, "second version")
    return node.status()["swarm"]["addresses"][0]


def peers(node) -> dict[str, dict]:
    command = [sys.executable, "-m", "p2prl", "--home", str(node.home), "peers", "--json"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return {row["peer_id"]: row for row in json.loads(shown.stdout)}


async def still_well(node, attacker: Attacker, least_faults: int) -> None:
    before = await asyncio.to_thread(node.step)
    await wait(node, lambda: node.step() > before + 1, "versions during the attack")
    rows = await asyncio.to_thread(peers, node)
    assert rows[attacker.key.peer_id]["faults"] >= least_faults, rows
    status = await asyncio.to_thread(node.status)
    assert all(loop["ok"] and not loop["restarts"] for loop in status["state"]["loops"].values()), status["state"]
    assert "peer's fault" in node.log and attacker.key.peer_id in node.log
    for sign_of_a_bug in ("Traceback", "handler failed", "handler of", "loop failed"):
        assert sign_of_a_bug not in node.log, node.log[-3000:]
    assert attacker.codes["handler_failed"] == 0, attacker.codes


async def test_records_that_must_not_be_taken_are_refused_and_attributed(make_node, attacker: Attacker) -> None:
    node = make_node("victim")
    victim = await attacker.join(await started(node))
    me = attacker.key.peer_id
    header = GroupHeader(bytes(32), 1000, BASE, 8, 0.5)
    messages = {
        "announce": Announcement(me, (header,)),
        "lease": Lease(1, me, 0, BASE, bytes(32), 0, 0),
    }
    num_bad = 0
    for topic, record in messages.items():
        bad = [*variants(attacker, record, victim).values(), *(data for data in GARBAGE if data)]
        bad.append(attacker.seal(record) + bytes(2**16))  # far over a kilobyte
        other = "lease" if topic == "announce" else "announce"
        bad.append(attacker.seal(messages[other]))  # a good record on the wrong topic
        bad += attacker.heard[topic][:3]  # the victim's own, replayed: already known, of no effect
        for data in bad:
            await attacker.publish(topic, data)
        num_bad += len(bad)
    request = VoteRequest(1, me, (me, victim), BASE, 0)
    bodies = [*GARBAGE, *variants(attacker, request, victim).values(), attacker.seal(Vote(1, me, me, (me,)))]
    hello = Hello(victim, bytes(8), SWARM, "addition", (WIRE_SCHEMA,), "p2prl", float("nan"))
    bodies += [codec.encode(hello), codec.encode(GroupsRequest((bytes(32),) * 2000))]
    for method in CALLS:
        await asyncio.gather(*(attacker.call(victim, method, body) for body in bodies))
    for method in STREAMS:
        await asyncio.gather(*(attacker.stream(victim, method, body) for body in bodies))
    for data in (b"", b"\xff\xff\xff\xff", b"\0\0\0\x02\x05", b"\xff" * 2**20, b"\0\0\0\0"):
        await attacker.raw_stream(victim, data)
    await still_well(node, attacker, least_faults=num_bad // 2)
    assert attacker.codes["bad_record"] > 50 and attacker.codes["unknown_method"] > 20, attacker.codes


async def test_groups_that_must_not_be_trained_on_are_refused_and_attributed(make_node, attacker: Attacker) -> None:
    node = make_node("victim")
    victim = await attacker.join(await started(node))
    await wait(node, lambda: len(attacker.heard["announce"]) >= 1, "an announcement of the victim")
    headers = [
        header
        for data in attacker.heard["announce"]
        for header in codec.unseal(data, Announcement, SWARM).record.headers
    ]
    stolen = await _pull(attacker, victim, headers[0])
    group = codec.unseal(stolen, Group, SWARM).record
    mine = msgspec.structs.replace(group, maker=attacker.key.peer_id)
    served = [
        *variants(attacker, mine, victim).values(),
        *(data for data in GARBAGE if data),
        attacker.seal(mine),  # another's work, signed as its own: the lottery does not fit
        attacker.seal(group),  # signed by one who is not its maker
        attacker.seal(mine) + bytes(2**20),  # more than was announced
        stolen,
    ]
    for number, data in enumerate(served):
        group_id = codec.content_hash(b"group %d" % number)
        attacker.bodies[group_id] = data
        header = msgspec.structs.replace(headers[0], id=group_id, content_bytes=min(len(data), 4000))
        await attacker.publish("announce", attacker.seal(Announcement(attacker.key.peer_id, (header,))))
    await wait(node, lambda: attacker.asked >= 2, "pulls from the attacker")
    await wait(node, lambda: _refused(node).get("bad_lottery", 0) >= 1, "the verdict on the stolen group")
    await wait(node, lambda: _refused(node).get("bad_signature", 0) >= 3, "the verdicts on bad signatures")
    await still_well(node, attacker, least_faults=5)
    row = (await asyncio.to_thread(peers, node))[attacker.key.peer_id]
    assert row["refused"] >= 1 and row["groups"] == 0
    assert row["trust"] < 0.8


async def test_a_flood_holds_nobody_up_and_costs_no_memory(make_node, attacker: Attacker) -> None:
    node = make_node("victim")
    victim = await attacker.join(await started(node))
    assert node.process is not None
    daemon = psutil.Process(node.process.pid)
    before = daemon.memory_info().rss
    header = GroupHeader(bytes(32), 2**50, Version(2**40, 2**40, bytes(32)), 8, float("inf"))
    over = asyncio.Event()

    async def gossip() -> None:
        number = 0
        while not over.is_set():
            ids = [codec.content_hash(b"%d" % (number + i)) for i in range(8)]
            headers = tuple(msgspec.structs.replace(header, id=group_id) for group_id in ids)
            await attacker.publish("announce", attacker.seal(Announcement(attacker.key.peer_id, headers)))
            number += 8

    async def ask() -> None:
        while not over.is_set():
            await asyncio.gather(*(attacker.call(victim, "digest", GARBAGE[3]) for _ in range(200)))

    flood = [asyncio.create_task(work()) for work in (gossip, ask)]
    try:
        start = node.step()
        await wait(node, lambda: node.step() > start + 5, "versions during the flood")
        await still_well(node, attacker, least_faults=100)
    finally:
        over.set()
        await asyncio.gather(*flood)
    assert daemon.memory_info().rss - before < 96 * 2**20


async def test_a_peer_that_claims_the_lead_changes_nothing(make_node, attacker: Attacker) -> None:
    """Signed leases of higher terms, each second: nobody voted for it, and it never published."""
    node = make_node("victim")
    await attacker.join(await started(node))
    over = asyncio.Event()

    async def claim() -> None:
        sequence = 0
        while not over.is_set():
            for term in (2, 40, 2**39, 2**40):
                record = Lease(term, attacker.key.peer_id, sequence, BASE, bytes(32), 0, 2**40)
                await attacker.publish("lease", attacker.seal(record))
            sequence += 1
            await asyncio.sleep(0.5)

    claiming = asyncio.create_task(claim())
    try:
        before = node.step()
        await wait(node, lambda: node.step() > before + 10, "versions beside the claims")
        swarm = (await asyncio.to_thread(node.status))["swarm"]
        assert (swarm["role"], swarm["term"]) == ("leader", 1)
    finally:
        over.set()
        await claiming
    assert "Traceback" not in node.log


async def test_a_peer_that_answers_nothing_holds_nobody_up(make_node, attacker: Attacker) -> None:
    """It gossips, so it counts as alive, also for elections; it accepts every call and stream and says nothing."""
    node = make_node("victim")
    address = await started(node)

    async def silence(peer: str, body: bytes) -> bytes:
        attacker.asked += 1
        await asyncio.Event().wait()
        return b""

    for method in CALLS:
        attacker.transport.serve(method, silence)
    for method in STREAMS[1:]:
        attacker.transport.serve_stream(method, _silent_stream)
    victim = await attacker.join(address)
    attacker.transport.serve_stream("group", _silent_stream)
    over = asyncio.Event()

    async def announce() -> None:
        number = 0
        while not over.is_set():
            header = GroupHeader(codec.content_hash(b"never %d" % number), 1000, BASE, 8, 1.0)
            await attacker.publish("announce", attacker.seal(Announcement(attacker.key.peer_id, (header,))))
            number += 1
            await asyncio.sleep(0.5)

    announcing = asyncio.create_task(announce())
    try:
        await wait(node, lambda: attacker.asked >= 1, "a call to the silent peer")
        before = node.step()
        await wait(node, lambda: node.step() > before + 5, "versions beside the silent peer")
        # Its silence must not keep the victim from leading again, although it takes part in no vote.
        assert node.end() == 0
        before = node.step_at_rest()
        node.start("--join", attacker.transport.addresses()[0])
        await wait(node, lambda: node.step() > before, "a version after a restart beside the silent peer")
        assert node.status()["node"]["peer_id"] == victim
    finally:
        over.set()
        await announcing
    assert "Traceback" not in node.log


async def test_a_peer_that_answers_nonsense_changes_nothing(make_node, attacker: Attacker) -> None:
    """It is a member in good standing by its hellos, so the victim asks it for what it missed."""
    node = make_node("victim")
    address = await started(node)
    me, turn = attacker.key.peer_id, iter(range(10**9))

    async def hello(peer: str, body: bytes) -> bytes:
        clock = (time.time(), time.time() + 1e6, float("nan"), float("inf"))[next(turn) % 4]
        return codec.encode(Hello(me, bytes(8), SWARM, "addition", (WIRE_SCHEMA,), "p2prl \x1b[31m", clock))

    async def digest(peer: str, body: bytes) -> bytes:
        attacker.asked += 1
        number = next(turn)
        header = GroupHeader(codec.content_hash(b"%d" % number), 2**50, Version(9, 9, bytes(32)), 8, float("nan"))
        fakes = (codec.encode(DigestReply((Offer(victim, header),) * 256)), bytes(2**16), b"\x91" * 2**15, *GARBAGE)
        return fakes[number % len(fakes)]

    for method, handler in (("p2prl/hello", hello), ("digest", digest), ("vote", digest), ("verdicts", digest)):
        attacker.transport.serve(method, handler)
    victim = await attacker.join(address)
    await attacker.call(victim, "p2prl/hello", await hello("", b""))
    await wait(node, lambda: attacker.asked >= 3, "digests from the liar")
    batch = VerdictBatch((Verdict(bytes(32), False, "made_up"), Verdict(bytes(32), True, "")) * 100)
    given = node.status()["given"]
    await attacker.call(victim, "verdicts", codec.encode(batch))
    await still_well(node, attacker, least_faults=2)
    assert "made_up" not in node.status()["given"]["refused"]
    assert given["refused"] == node.status()["given"]["refused"]
    assert all(item["level"] == "warning" for item in node.health().values())  # one liar's clock stops nobody
    assert "\x1b" not in node.log


async def test_a_peer_that_serves_another_recipe_than_the_invites_is_found_out(tmp_path, attacker: Attacker) -> None:
    text = find("addition")[1].replace("max_age = 16", "max_age = 3")

    async def recipe(peer: str, body: bytes) -> bytes:
        return text.encode()

    attacker.transport.serve("p2prl/recipe", recipe)
    await attacker.transport.start()
    invite = f"p2prl://{'ab' * 32}?peer={attacker.transport.addresses()[0]}"
    command = [sys.executable, "-m", "p2prl", "--home", str(tmp_path / "home"), "run", invite]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "serves a recipe that is not the invite's" in done.stderr
    assert "ask for another invite" in done.stderr
    assert "Traceback" not in done.stderr


async def _silent_stream(peer: str, body: bytes) -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def _pull(attacker: Attacker, victim: str, header: GroupHeader) -> bytes:
    parts = bytearray()
    body = codec.encode(GroupsRequest((header.id,)))
    async for item in attacker.transport.stream(victim, "group", body, max_bytes=2**22):
        parts += item[1:]
    return bytes(parts)


def _refused(node) -> dict[str, int]:
    return node.status().get("training", {}).get("refused", {})
