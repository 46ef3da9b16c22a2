"""What a reader of a stream takes from a peer that does not keep to the frames."""

import asyncio

import pytest

from p2prl.errors import BadRecord
from p2prl.swarm.libp2p.streams import _Received


async def test_an_empty_item_is_refused() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(b"\0\0\0\1x" + bytes(4) * 1000)
    received = _Received("peer", max_bytes=10)
    assert await received.item(reader) == b"x"
    with pytest.raises(BadRecord, match="empty"):
        await received.item(reader)
