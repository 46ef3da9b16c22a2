"""Streams of events: how many at once."""

from p2prl.events import Ring
from p2prl.web.stream import MAX_STREAMS, Streams


async def test_streams_let_in_at_one_moment_are_not_more_than_the_limit() -> None:
    ring = Ring()
    streams = Streams(ring)
    opened = [streams._events(None, ("status",)) for _ in range(MAX_STREAMS + 4)]
    firsts = [await anext(each, None) for each in opened]
    assert [first is not None for first in firsts] == [True] * MAX_STREAMS + [False] * 4
    assert streams.full
    ring.close()
    for each in opened:
        assert [event async for event in each] == []
    assert streams.num_open == 0
