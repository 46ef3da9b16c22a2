"""What a holder serves is what it verified, also after its disk forgot a bit."""

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from p2prl import codec
from p2prl.errors import PeerError, Unreachable
from p2prl.records import PIECE_BYTES
from p2prl.weights.messages import HAVE, PIECES, HaveReply, HaveRequest, PieceRequest
from p2prl.weights.partial import content_path
from p2prl.weights.serve import RECHECK_S
from tests.unit.weights.transfers import MIB, Node, Swarm, content_of, data_of, virtual

DATA = data_of(3 * PIECE_BYTES + 1)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


async def pull(asker: Node, holder: Node, content_hash: bytes, index: int) -> bytes:
    body = codec.encode(PieceRequest(content_hash, (index,), 2**17))
    items = asker.transport.stream(holder.peer, PIECES, body, max_bytes=2**40)
    return b"".join([item async for item in items][1:])


@pytest.mark.parametrize("at", [0, PIECE_BYTES - 1, 2 * PIECE_BYTES + 7, 3 * PIECE_BYTES])
def test_a_piece_that_rotted_is_never_sent_whole_and_its_holder_is_not_blamed(tmp_path: Path, at: int):
    async def program():
        swarm = await Swarm(tmp_path, 3, up=8.0 * MIB).start()
        rotten, good, fetcher = swarm.nodes
        content = rotten.hold(DATA)
        good.hold(DATA)
        flip(content_path(rotten.folder, content.content_hash), at)
        path = await fetcher.fetch(content)
        assert path.read_bytes() == DATA
        assert fetcher.blamed == []
        for index in range(4):
            if rotten.found_rotted:
                break
            try:
                got = await pull(fetcher, rotten, content.content_hash, index)
                assert got == DATA[index * PIECE_BYTES : (index + 1) * PIECE_BYTES]
            except PeerError:
                assert index == at // PIECE_BYTES
        assert rotten.found_rotted == [content.content_hash]
        reply = await fetcher.transport.call(rotten.peer, HAVE, codec.encode(HaveRequest(content.content_hash)))
        assert codec.decode(reply, HaveReply).bits == b"", "it is not offered any more"

    virtual(program)


def test_a_piece_is_hashed_again_after_a_while_and_not_for_each_that_takes_it(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 2).start()
        holder, asker = swarm.nodes
        content = holder.hold(DATA)
        assert await pull(asker, holder, content.content_hash, 0) == DATA[:PIECE_BYTES]
        flip(content_path(holder.folder, content.content_hash), 5)
        soon = await pull(asker, holder, content.content_hash, 0)
        assert len(soon) == PIECE_BYTES and soon != DATA[:PIECE_BYTES], "whoever takes it finds that out"
        await asyncio.sleep(RECHECK_S)
        with pytest.raises(PeerError):
            await pull(asker, holder, content.content_hash, 0)
        assert holder.found_rotted == [content.content_hash]

    virtual(program)


def test_a_part_that_rotted_is_not_passed_on_and_is_got_again(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 3, up=8.0 * MIB).start()
        holder, middle, asker = swarm.nodes
        content = holder.hold(DATA)
        middle.holds_part(DATA, (0, 1))
        partial = middle.server.partials.pop(content.content_hash)
        flip(partial.path, PIECE_BYTES + 5)
        middle.server.partials[content.content_hash] = partial
        assert await pull(asker, middle, content.content_hash, 0) == DATA[:PIECE_BYTES]
        with pytest.raises(PeerError):
            await pull(asker, middle, content.content_hash, 1)
        partial.close()
        del middle.server.partials[content.content_hash]
        path = await middle.fetch(content, [holder.peer])
        assert path.read_bytes() == DATA and middle.blamed == []

    virtual(program)


def test_what_no_manifest_names_is_not_served(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 2).start()
        holder, fetcher = swarm.nodes
        content = holder.hold(DATA)
        holder.known.clear()
        with pytest.raises(Unreachable):
            await fetcher.fetch(content_of(DATA))
        assert holder.given_bytes == 0 and content_path(holder.folder, content.content_hash).is_file()

    virtual(program)


def test_what_is_taken_counts_as_pulled_while_it_is(tmp_path: Path):
    async def program():
        swarm = await Swarm(tmp_path, 2, up=MIB).start()
        holder, fetcher = swarm.nodes
        content = holder.hold(DATA)
        pulled = holder.server._pulled
        fetching = asyncio.create_task(fetcher.fetch(content))
        await asyncio.sleep(6.0)
        assert pulled.now(swarm.clock.monotonic()) == {content.content_hash}
        await fetching
        await asyncio.sleep(200.0)
        assert pulled.now(swarm.clock.monotonic()) == frozenset()

    virtual(program)


def test_a_file_that_may_not_be_read_any_more_is_not_offered_and_nobody_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Permission is lost in mid transfer, for the user or for the whole disk."""
    real_open, forbidden = Path.open, [tmp_path / "nowhere"]

    def guarded(path: Path, *args: Any, **more: Any) -> Any:
        if path.is_relative_to(forbidden[0]):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real_open(path, *args, **more)

    async def program():
        swarm = await Swarm(tmp_path, 3, up=4.0 * MIB).start()
        lost, good, fetcher = swarm.nodes
        content = lost.hold(DATA)
        good.hold(DATA)
        monkeypatch.setattr(Path, "open", guarded)
        fetching = asyncio.create_task(fetcher.fetch(content))
        await asyncio.sleep(0.3)
        forbidden[0] = lost.folder
        path = await fetching
        monkeypatch.undo()
        assert path.read_bytes() == DATA
        assert fetcher.blamed == [] and lost.found_rotted == []

    virtual(program)
