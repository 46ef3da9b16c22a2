"""What one transfer costs, how long it waits for whom, and what it tells of itself."""

import asyncio
from pathlib import Path

import pytest

from p2prl import codec
from p2prl.errors import Unreachable
from p2prl.records import PIECE_BYTES
from p2prl.swarm.metered_transport import closing
from p2prl.weights.messages import PIECES, PieceRequest
from p2prl.weights.pull import PIECE_S
from tests.unit.weights.transfers import MIB, Swarm, data_of, now, virtual

DATA = data_of(10 * PIECE_BYTES - 77)
SMALL = data_of(3 * PIECE_BYTES + 1)
UP = 8.0 * MIB


def test_asking_for_a_small_content_costs_little_beside_it(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 13).start()
        *holders, fetcher = swarm.nodes
        contents = [node.hold(SMALL[:3000]) for node in holders]
        await fetcher.fetch(contents[0])
        traffic = fetcher.transport.traffic()
        assert traffic.sent["have"] + traffic.received["have"] <= 100

    virtual(program)


def test_progress_tells_what_is_verified_how_fast_and_from_how_many(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 3, up=UP / 2).start()
        *holders, fetcher = swarm.nodes
        contents = [node.hold(DATA) for node in holders]
        fetching = asyncio.create_task(fetcher.fetch(contents[0]))
        await asyncio.sleep(4.0)
        progress = fetcher.surroundings.running[contents[0].content_hash]
        assert (progress.of_bytes, progress.num_peers) == (len(DATA), 2)
        assert progress.num_bytes == fetcher.server.partials[contents[0].content_hash].num_bytes > 0
        assert abs(progress.bytes_per_s - UP) < 0.1 * UP
        await fetching
        assert fetcher.surroundings.running == {}

    virtual(program)


def test_a_line_that_is_slow_by_our_own_cap_is_no_holders_fault(tmp_path: Path):
    """Several streams share it: each piece takes longer than a holder may take alone."""

    async def program():
        swarm = await Swarm(tmp_path, 4).start()
        *holders, fetcher = swarm.nodes
        for node in holders:
            content = node.hold(SMALL)
        fetcher.transport.set_rates(None, 20.0 * 2**10)
        path = await fetcher.fetch(content)
        assert path.read_bytes() == SMALL and now() > 2 * PIECE_S
        assert fetcher.blamed == []

    virtual(program)


def test_who_drips_a_piece_is_left_and_is_no_liar(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 2).start()
        holder, fetcher = swarm.nodes
        content = holder.hold(data_of(2**20))
        holder.transport.set_rates(1.0 * 2**10, None)
        with pytest.raises(Unreachable, match="piece 0 took over"):
            await fetcher.fetch(content)
        assert fetcher.blamed == [] and now() < 5 * PIECE_S

    virtual(program)


def test_who_hogs_the_only_piece_keeps_nobody_from_it(tmp_path: Path):
    """It takes the piece from the learner, a little of it, again and again."""

    async def program():
        swarm = await Swarm(tmp_path, 3, up=UP).start()
        learner, hog, fetcher = swarm.nodes
        learner.is_learner = True
        content = learner.hold(data_of(PIECE_BYTES))
        body = codec.encode(PieceRequest(content.content_hash, (0,), 4096))

        async def take_slowly() -> None:
            while True:
                items = hog.transport.stream(learner.peer, PIECES, body, item_timeout_s=99.0, max_bytes=2**40)
                began = now()
                async with closing(items):
                    async for _ in items:
                        await asyncio.sleep(1.0)
                        if now() - began > 9.0:
                            break

        hogging = asyncio.create_task(take_slowly())
        await asyncio.sleep(1.0)
        path = await fetcher.fetch(content, [learner.peer, hog.peer])
        assert path.stat().st_size == PIECE_BYTES and now() < 20.0
        hogging.cancel()
        await asyncio.gather(hogging, return_exceptions=True)

    virtual(program)
