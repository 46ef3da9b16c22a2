"""A group under an unknown version is asked about once, then judged for good; made-up versions cost little."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import async_solipsism
import pytest

from p2prl.errors import StoreError, Unreachable
from p2prl.node.state import NodeState
from p2prl.node.unplaced import ATTEMPTS, MAX_GROUPS, MAX_HELD, MAX_VERSIONS, Unplaced
from p2prl.records import Version


class Asked:
    def __init__(self, failures: int = 0) -> None:
        self.calls: list[tuple[tuple[str, ...], Version]] = []
        self._failures = failures

    async def learn(self, peers: tuple[str, ...], version: Version) -> None:
        self.calls.append((peers, version))
        await asyncio.sleep(0.1)
        if len(self.calls) <= self._failures:
            raise Unreachable("nobody there")


def version(number: int) -> Version:
    return Version(1, number, bytes(32))


def group_id(number: int) -> bytes:
    return number.to_bytes(32, "big")


@pytest.fixture
def virtual_time():
    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        yield runner


def unplaced(asked: Asked) -> tuple[Unplaced, asyncio.Queue, list]:
    blamed: list[Any] = []
    state = cast("NodeState", SimpleNamespace(me="me", blame=blamed.append))
    arrived: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
    return Unplaced(state, asked.learn, arrived), arrived, blamed


def test_groups_of_one_version_are_asked_about_together_and_come_back_once(virtual_time) -> None:
    async def program() -> None:
        asked = Asked()
        waiting, arrived, _ = unplaced(asked)
        assert waiting.hold(group_id(1), "holder", "maker", b"one", version(1))
        assert waiting.hold(group_id(2), "maker", "maker", b"two", version(1))
        assert [await arrived.get(), await arrived.get()] == [("holder", b"one"), ("maker", b"two")]
        assert asked.calls == [(("holder", "maker"), version(1))]
        assert not waiting.hold(group_id(1), "holder", "maker", b"one", version(1))

    virtual_time.run(program())


def test_who_does_not_answer_is_asked_again_and_then_the_groups_come_back_all_the_same(virtual_time) -> None:
    async def program() -> None:
        asked = Asked(failures=99)
        waiting, arrived, blamed = unplaced(asked)
        waiting.hold(group_id(1), "maker", "maker", b"one", version(1))
        assert await arrived.get() == ("maker", b"one")
        assert len(asked.calls) == len(blamed) == ATTEMPTS

    virtual_time.run(program())


def test_a_full_disk_while_a_branch_is_learnt_costs_no_place_and_no_group(virtual_time) -> None:
    async def program() -> None:
        told: list[str] = []

        async def learn(peers: tuple[str, ...], version: Version) -> None:
            raise StoreError("the disk is full")

        state = cast("NodeState", SimpleNamespace(me="me", emit=lambda kind, **data: told.append(data["event"])))
        arrived: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        waiting = Unplaced(state, learn, arrived)
        assert waiting.hold(group_id(1), "maker", "maker", b"one", version(1))
        assert await asyncio.wait_for(arrived.get(), 5) == ("maker", b"one")
        assert told == ["a branch was not learnt"] and not waiting._held

    virtual_time.run(program())


def test_what_is_held_is_bounded_and_our_own_groups_are_not(virtual_time) -> None:
    async def program() -> None:
        waiting, _, _ = unplaced(Asked())
        assert not waiting.hold(group_id(0), "me", "me", b"", version(0))
        held = [waiting.hold(group_id(n), "m", "m", b"", version(1)) for n in range(1, MAX_GROUPS + 2)]
        assert held == [True] * MAX_GROUPS + [False]
        held = [waiting.hold(group_id(1000 + n), "m", "m", b"", version(2 + n)) for n in range(MAX_VERSIONS)]
        assert held == [True] * (MAX_VERSIONS - 1) + [False]
        await waiting.stop()

    virtual_time.run(program())


def test_a_group_of_several_unknown_versions_is_held_for_some_of_them(virtual_time) -> None:
    async def program() -> None:
        asked = Asked()
        waiting, arrived, _ = unplaced(asked)
        held = []
        for number in range(MAX_HELD + 1):
            held.append(waiting.hold(group_id(1), "holder", "maker", b"one", version(number)))
            if held[-1]:
                assert await arrived.get() == ("holder", b"one")
        assert held == [True] * MAX_HELD + [False]

    virtual_time.run(program())
