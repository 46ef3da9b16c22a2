"""Groups drawn under versions that this node does not know: asks for the manifests, then hands the groups back.

In: a group's bytes, who gave them, the version. Out: the same bytes in the queue of arrivals, where admission looks
again. So the groups of a branch that lost (a healed partition, a leader that died as it published) stay useful.

Invariants: each group is held at most once a version, and `MAX_HELD` times; what is held, and how long, is bounded, so
that made-up versions cost little.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from p2prl.errors import PeerError, StoreError
from p2prl.node.state import NodeState
from p2prl.node.supervisor import end_tasks
from p2prl.records import Version

MAX_VERSIONS = 16  # asked for at a time
MAX_GROUPS = 64  # held for one of them
MAX_TRIED = 4096
MAX_HELD = 3  # a group may be of several versions, on more than one branch
ATTEMPTS, RETRY_S = 3, 1.0

Learn = Callable[[tuple[str, ...], Version], Awaitable[None]]


class Unplaced:
    """`learn(peers, version)` gets the manifests that lead to a version from one of the peers; raises PeerError."""

    def __init__(self, state: NodeState, learn: Learn, arrived: asyncio.Queue[tuple[str, bytes]]) -> None:
        self._state, self._learn, self._arrived = state, learn, arrived
        self._held: dict[Version, list[tuple[str, bytes]]] = {}
        self._tried: OrderedDict[bytes, tuple[Version, ...]] = OrderedDict()
        self._tasks: dict[asyncio.Task, None] = {}

    def hold(self, group_id: bytes, peer: str, maker: str, data: bytes, version: Version) -> bool:
        """False when there is nothing more to try: refuse it."""
        tried = self._tried.get(group_id, ())
        if version in tried or len(tried) >= MAX_HELD or self._state.me in (peer, maker):
            return False
        held = self._held.get(version)
        if held is None:
            if len(self._held) >= MAX_VERSIONS:
                return False
            held = self._held[version] = []
            task = asyncio.create_task(self._ask(tuple(dict.fromkeys((peer, maker))), version), name="ask for a branch")
            self._tasks[task] = None
            task.add_done_callback(lambda done: self._tasks.pop(done, None))
        if len(held) >= MAX_GROUPS:
            return False
        held.append((peer, data))
        self._tried[group_id] = (*tried, version)
        if len(self._tried) > MAX_TRIED:
            self._tried.popitem(last=False)
        return True

    async def stop(self) -> None:
        await end_tasks(self._tasks)

    async def _ask(self, peers: tuple[str, ...], version: Version) -> None:
        try:
            await self._try(peers, version)
        except StoreError as error:
            self._state.emit("log", level="error", event="a branch was not learnt", why=str(error)[:200])
        finally:
            held = self._held.pop(version)  # whatever happened: its place is free for the next one
        for item in held:
            await self._arrived.put(item)

    async def _try(self, peers: tuple[str, ...], version: Version) -> None:
        for attempt in range(ATTEMPTS):
            try:
                return await self._learn(peers, version)
            except PeerError as error:
                self._state.blame(error)
                if attempt + 1 < ATTEMPTS:
                    await asyncio.sleep(RETRY_S)
