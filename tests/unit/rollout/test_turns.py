"""Many groups at once: room, order, and no group that begins under two versions."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from p2prl.rollout.turns import Turns

WORK = st.lists(st.tuples(st.integers(1, 10), st.integers(1, 4), st.integers(0, 3), st.integers(0, 5)), max_size=12)


@given(WORK, st.lists(st.integers(0, 12), max_size=4))
def test_room_holds_and_a_group_begins_under_one_version(
    work: list[tuple[int, int, int, int]], changes: list[int]
) -> None:
    async def program() -> None:
        turns, version = Turns(10, 4), 0
        positions = answers = 0
        begun: list[int] = []

        async def group(number: int, need: int, num_answers: int, first: int, rest: int) -> None:
            nonlocal positions, answers
            async with turns.turn(need, num_answers) as turn:
                positions, answers = positions + need, answers + num_answers
                assert positions <= 10 and answers <= 4
                begun.append(number)
                starts = []
                for _ in range(num_answers):
                    for _ in range(first):
                        await asyncio.sleep(0)
                    starts.append(version)
                    turn.started()
                assert len(set(starts)) == 1
                for _ in range(rest):
                    await asyncio.sleep(0)
                positions, answers = positions - need, answers - num_answers

        async def change(after: int) -> None:
            nonlocal version
            for _ in range(after):
                await asyncio.sleep(0)
            async with turns.change():
                await asyncio.sleep(0)
                version += 1

        groups = [group(number, *each) for number, each in enumerate(work)]
        async with asyncio.timeout(10):
            await asyncio.gather(*groups, *map(change, changes))
        assert begun == list(range(len(work)))
        assert (positions, answers, version) == (0, 0, len(changes))

    asyncio.run(program())


async def test_who_gives_up_leaves_no_trace() -> None:
    turns = Turns(10, 4)
    async with turns.turn(8, 1):
        waiting = asyncio.create_task(turns.turn(8, 1).__aenter__())
        behind = asyncio.create_task(turns.turn(2, 1).__aenter__())
        await asyncio.sleep(0)
        waiting.cancel()
        async with asyncio.timeout(5):
            await behind  # it was behind one that waits no more
