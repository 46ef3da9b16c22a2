"""The ring: every reader sees every event once and in order, or is told what it lost."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2prl.events import RESET, Ring


async def take(ring: Ring, count: int, since: int | None = None, kinds: tuple[str, ...] = ("step", "log")) -> list[int]:
    found = []
    async for event in ring.subscribe(since, kinds):
        found.append(event.id if event.type != RESET else -event.id)
        if len(found) == count:
            break
    return found


@given(st.integers(1, 20), st.integers(1, 40), st.integers(0, 60))
def test_resuming_gives_what_follows_or_a_reset(capacity: int, num_events: int, since: int) -> None:
    ring = Ring(capacity)
    for number in range(num_events):
        ring.publish("step", number)
    lost_up_to = max(0, num_events - capacity)
    if since == num_events:  # nothing follows yet
        assert ring.last_id == since
        return
    expected = list(range(since + 1, num_events + 1)) if lost_up_to <= since < num_events else [-num_events]
    assert asyncio.run(take(ring, len(expected), since)) == expected


async def test_a_reader_waits_for_the_next_event_of_its_types() -> None:
    ring = Ring()
    reader = asyncio.create_task(take(ring, 2, None, ("log",)))
    await asyncio.sleep(0)
    for kind in ("step", "log", "step", "log"):
        ring.publish(kind, {})
    assert await reader == [2, 4]


async def test_a_slow_reader_is_reset_and_goes_on() -> None:
    ring = Ring(capacity=3)
    ring.publish("step", 0)
    found = []
    async for event in ring.subscribe(0):
        found.append((event.type, event.id))
        if event.id == 1:
            for number in range(10):  # while this reader is busy
                ring.publish("step", number)
        elif event.type == RESET:
            ring.publish("step", 99)
        else:
            break
    assert found == [("step", 1), ("reset", 11), ("step", 12)]


async def test_events_of_other_threads_wake_the_reader() -> None:
    ring = Ring()
    reader = asyncio.create_task(take(ring, 100))
    await asyncio.sleep(0)
    writers = [threading.Thread(target=lambda: [ring.publish("log", {}) for _ in range(25)]) for _ in range(4)]
    for each in writers:
        each.start()
    assert await asyncio.wait_for(reader, 30) == list(range(1, 101))
    for each in writers:
        each.join()


async def test_closing_ends_readers_now_and_later() -> None:
    ring = Ring()
    reader = asyncio.create_task(take(ring, 1))
    await asyncio.sleep(0)
    ring.close()
    assert await reader == []
    assert await take(ring, 1, 0) == []


async def test_the_last_word_before_closing_gets_out() -> None:
    ring = Ring()
    reader = asyncio.create_task(take(ring, 2))
    await asyncio.sleep(0)
    ring.publish("log", "bye")
    ring.close()
    assert await reader == [1]


def test_recent_is_the_newest_oldest_first() -> None:
    ring = Ring()
    for number, kind in enumerate(["step", "log", "step", "step"]):
        ring.publish(kind, {"n": number})
    assert [event.data for event in ring.recent(("step",), 2)] == [b'{"n":2}', b'{"n":3}']
    assert ring.recent(limit=0) == []


def test_an_unknown_type_is_our_bug() -> None:
    with pytest.raises(AssertionError):
        Ring().publish("gossip", {})
