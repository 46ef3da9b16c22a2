"""Fetching from several holders over the in-process network: whatever they do, only what was announced comes of it."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl import codec
from p2prl.errors import BadRecord, PeerError, StoreError, Unreachable
from p2prl.records import PIECE_BYTES
from p2prl.weights.messages import HAVE, PIECES, HaveReply, HaveRequest, PieceRequest, from_bits, to_bits
from p2prl.weights.partial import Disk, content_path, left_over, part_bytes
from tests.unit.weights.transfers import MIB, Swarm, content_of, data_of, now, virtual

DATA = data_of(10 * PIECE_BYTES - 77)
SMALL = data_of(3 * PIECE_BYTES + 1)
UP = 8.0 * MIB


def test_all_holders_share_the_work(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 5, up=UP).start()
        holders, fetcher = swarm.nodes[:4], swarm.nodes[4]
        for node in holders:
            content = node.hold(DATA)
        began = now()
        path = await fetcher.fetch(content)
        assert path == content_path(fetcher.folder, content.content_hash) and path.read_bytes() == DATA
        assert now() - began < 1.5 * len(DATA) / (4 * UP)
        assert all(node.given_bytes > 4 * MIB for node in holders)
        assert sum(node.given_bytes for node in holders) < len(DATA) + 2 * PIECE_BYTES
        assert left_over(fetcher.folder) == [] and fetcher.server.partials == {}
        again = now()
        assert await fetcher.fetch(content) == path and now() == again, "what is here is not fetched"

    virtual(program)


def test_part_holders_make_the_whole_together(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 4, up=UP).start()
        swarm.nodes[0].holds_part(DATA, (0, 1, 2, 3))
        swarm.nodes[1].holds_part(DATA, (3, 4, 5, 6, 7))
        swarm.nodes[2].holds_part(DATA, (8, 9, 0))
        path = await swarm.nodes[3].fetch(content_of(DATA))
        assert path.read_bytes() == DATA
        for node in swarm.nodes[:3]:
            node.server.partials.popitem()[1].close()

    virtual(program)


def test_a_corrupt_holder_is_blamed_once_asked_no_more_and_remembered(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 4, up=UP).start()
        *holders, fetcher = swarm.nodes
        for node in holders:
            content = node.hold(DATA)
        bad = holders[1]
        bad.served.spoil = lambda item: bytes(len(item)) if len(item) > 2000 else item
        path = await fetcher.fetch(content)
        assert path.read_bytes() == DATA
        assert {error.peer for error in fetcher.blamed} == {bad.peer}
        assert len(fetcher.blamed) <= 2 and isinstance(fetcher.blamed[0], BadRecord)

    virtual(program)


def test_what_a_corrupt_holder_did_is_known_in_the_next_attempt(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 2, up=UP).start()
        bad, fetcher = swarm.nodes
        content = bad.hold(DATA)
        bad.served.spoil = lambda item: bytes(len(item)) if len(item) > 2000 else item
        with pytest.raises(PeerError):
            await fetcher.fetch(content)
        given = bad.given_bytes
        with pytest.raises(PeerError):
            await fetcher.fetch(content)
        assert bad.given_bytes == given

    virtual(program)


def test_holders_killed_frozen_and_throttled_in_mid_transfer_cost_little(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 6, up=UP).start()
        *holders, fetcher = swarm.nodes
        for node in holders:
            content = node.hold(DATA)
        fetching = asyncio.create_task(fetcher.fetch(content))
        began = now()
        await asyncio.sleep(0.5)
        swarm.network.crash(holders[0].peer)
        swarm.network.partition([holders[1].peer], [fetcher.peer])  # frozen: answers nothing
        holders[2].transport.set_rates(64.0 * 2**10, None)
        path = await fetching
        assert path.read_bytes() == DATA
        alone = len(DATA) / (2 * UP)
        assert now() - began < 2.0 * alone + 3.0, "no deadline of ten seconds was waited for"
        assert fetcher.blamed == [], "none of that is a lie"

    virtual(program)


def test_all_die_and_the_next_attempt_fetches_only_what_is_missing(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 3, up=UP).start()
        first, second, fetcher = swarm.nodes
        content = first.hold(DATA)
        second.hold(DATA)
        fetching = asyncio.create_task(fetcher.fetch(content, [first.peer]))
        await asyncio.sleep(2.5)
        swarm.network.crash(first.peer)
        with pytest.raises(PeerError):
            await fetching
        num_verified = len(left_over(fetcher.folder)[0].read_bytes()) // 8
        assert num_verified >= 3
        await fetcher.fetch(content, [second.peer])
        missing = len(DATA) - num_verified * PIECE_BYTES
        assert second.given_bytes <= missing + 2**16, "verified pieces are never fetched again"

    virtual(program)


def test_a_cancelled_transfer_leaves_what_was_verified_and_nothing_open(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 2, up=UP).start()
        holder, fetcher = swarm.nodes
        content = holder.hold(DATA)
        for _ in range(10):
            fetching = asyncio.create_task(fetcher.fetch(content))
            await asyncio.sleep(1.1)
            if fetching.done():
                break
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            assert fetcher.server.partials == {}
        assert (await fetcher.fetch(content)).read_bytes() == DATA
        assert holder.given_bytes < 2.5 * len(DATA)

    virtual(program)


def test_nobody_has_it(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 3).start()
        began = now()
        with pytest.raises(Unreachable):
            await swarm.nodes[0].fetch(content_of(SMALL))
        assert now() - began < 12.0, "they are there and may still get it"
        swarm.network.crash(swarm.nodes[1].peer)
        swarm.network.crash(swarm.nodes[2].peer)
        began = now()
        with pytest.raises(Unreachable):
            await swarm.nodes[0].fetch(content_of(SMALL))
        assert now() - began < 1.0, "nobody is there"

    virtual(program)


@pytest.mark.parametrize("num_bytes", [0, -1, PIECE_BYTES * 2, PIECE_BYTES * 4 + 5])
def test_a_manifest_that_lies_about_sizes_is_refused_before_a_byte_is_fetched(tmp_path: Path, num_bytes: int):
    async def program():
        swarm = await Swarm(tmp_path, 2).start()
        content = msgspec.structs.replace(swarm.nodes[0].hold(SMALL), content_bytes=num_bytes)
        with pytest.raises(BadRecord):
            await swarm.nodes[1].fetch(content)
        assert not swarm.nodes[1].folder.exists()

    virtual(program)


def test_more_than_is_allowed_is_refused(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 2).start()
        content = swarm.nodes[0].hold(SMALL)
        with pytest.raises(BadRecord):
            await swarm.nodes[1].fetch(content, most_bytes=len(SMALL) - 1)

    virtual(program)


def test_a_false_list_for_a_name_is_refused_before_what_came_of_the_true_one_is_touched(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 2).start()
        holder, fetcher = swarm.nodes
        honest = holder.hold(DATA)
        fetcher.holds_part(DATA, (0, 1))
        fetcher.server.partials.pop(honest.content_hash).close()
        for lie in ({"content_bytes": 1, "pieces": (bytes(32),)}, {"pieces": tuple(bytes(32) for _ in honest.pieces)}):
            with pytest.raises(BadRecord):
                await fetcher.fetch(msgspec.structs.replace(honest, **lie))
        assert part_bytes(fetcher.folder, honest.content_hash) == 2 * PIECE_BYTES
        assert (await fetcher.fetch(honest)).read_bytes() == DATA and holder.given_bytes < len(DATA) - PIECE_BYTES

    virtual(program)


def test_a_full_disk_ends_it_and_says_so(tmp_path: Path):
    class Full(Disk):
        def write(self, file, parts, offset) -> None:
            raise OSError(28, "No space left on device")

    async def program():
        swarm = await Swarm(tmp_path, 2).start()
        holder, fetcher = swarm.nodes
        content = holder.hold(SMALL)
        fetcher.surroundings.disk = Full()
        with pytest.raises(StoreError, match="free some space"):
            await fetcher.fetch(content)
        fetcher.surroundings.disk = Disk()
        assert (await fetcher.fetch(content)).read_bytes() == SMALL

    virtual(program)


@given(attack=st.sampled_from(["cut", "long", "garbage", "empty", "other piece"]), at=st.integers(0, 40))
@settings(max_examples=25, deadline=None)
def test_a_hostile_holder_can_only_waste_its_own_turn(tmp_path_factory, attack: str, at: int):
    tmp_path = tmp_path_factory.mktemp("hostile")

    async def program():
        swarm = await Swarm(tmp_path, 3, up=UP).start()
        good, bad, fetcher = swarm.nodes
        content = good.hold(SMALL)
        bad.hold(SMALL)
        count = 0

        def spoil(item: bytes) -> bytes:
            nonlocal count
            count += 1
            if count <= at:
                return item
            if attack == "cut":
                raise Unreachable("no more")
            return {"long": item + b"x", "garbage": b"\xff" * len(item), "empty": item[:1], "other piece": item[::-1]}[
                attack
            ]

        bad.served.spoil = spoil
        assert (await fetcher.fetch(content)).read_bytes() == SMALL
        assert {error.peer for error in fetcher.blamed} <= {bad.peer}

    virtual(program)


def test_others_get_what_we_have_so_far(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 3, up=4.0 * MIB).start()
        source, middle, last = swarm.nodes
        content = source.hold(SMALL)
        first = asyncio.create_task(middle.fetch(content, [source.peer]))
        second = asyncio.create_task(last.fetch(content, [middle.peer]))
        for fetching in (first, second):
            assert (await fetching).read_bytes() == SMALL
        assert middle.given_to(last.peer) >= len(SMALL)

    virtual(program)


def test_what_is_asked_of_a_server_is_bounded(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 2).start()
        holder, asker = swarm.nodes
        content = holder.hold(SMALL)

        async def pull(indexes: tuple[int, ...], content_hash: bytes = content.content_hash) -> int:
            body = codec.encode(PieceRequest(content_hash, indexes, 2**40))
            items = asker.transport.stream(holder.peer, PIECES, body, max_bytes=2**40)
            return sum([len(item) async for item in items])

        assert await pull((3, 3, 3)) < 100, "each piece once"
        for indexes in ((4,), (0, 2**53), tuple(range(65)), ()):
            with pytest.raises(PeerError):
                await pull(indexes)
        with pytest.raises(PeerError):
            await pull((0,), bytes(32))
        with pytest.raises(PeerError):
            await asker.transport.call(holder.peer, HAVE, b"\xc1")
        reply = await asker.transport.call(holder.peer, HAVE, codec.encode(HaveRequest(bytes(32))))
        assert codec.decode(reply, HaveReply).bits == b""

    virtual(program)


def test_one_transfer_of_a_content_at_a_time(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 2, up=UP).start()
        holder, fetcher = swarm.nodes
        content = holder.hold(SMALL)
        both = await asyncio.gather(fetcher.fetch(content), fetcher.fetch(content), return_exceptions=True)
        assert isinstance(both[1], ValueError) and isinstance(both[0], Path)
        assert left_over(fetcher.folder) == [] and fetcher.surroundings.running == {}

    virtual(program)


@given(st.sets(st.integers(0, 99)), st.integers(1, 100))
def test_bitmaps_round_trip(indexes: set[int], num_pieces: int):
    some = {index for index in indexes if index < num_pieces}
    assert from_bits(to_bits(some, num_pieces), num_pieces) == some


@given(st.binary(max_size=40), st.integers(1, 100))
def test_any_bitmap_names_only_pieces_of_the_content(bits: bytes, num_pieces: int):
    assert from_bits(bits, num_pieces) <= set(range(num_pieces))
