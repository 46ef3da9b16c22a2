"""How many requests of others run at once: in all, and of one peer.

In: a caller's peer id. Out: a slot, or OverQuota when too many of that peer wait already.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from p2prl.errors import OverQuota


class Slots:
    """`per_peer` and `total` run; a peer's further requests wait, `waiting` at most."""

    def __init__(self, *, per_peer: int, total: int, waiting: int) -> None:
        self._per_peer, self._most = per_peer, per_peer + waiting
        self._total = asyncio.Semaphore(total)
        self._peers: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @contextlib.asynccontextmanager
    async def slot(self, peer: str) -> AsyncIterator[None]:
        own, num_held = self._peers.get(peer) or (asyncio.Semaphore(self._per_peer), 0)
        if num_held >= self._most:
            raise OverQuota(f"{num_held} requests of yours are in work or waiting. Send fewer at once")
        self._peers[peer] = own, num_held + 1
        try:
            async with own, self._total:
                yield
        finally:
            num_held = self._peers[peer][1] - 1
            if num_held:
                self._peers[peer] = own, num_held
            else:
                del self._peers[peer]
