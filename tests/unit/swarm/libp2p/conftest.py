"""Real transports over p2pd on 127.0.0.1; the first import of hivemind costs seconds."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest_asyncio

from p2prl.identity import Identity
from p2prl.swarm.libp2p.transport import Libp2pTransport

Maker = Callable[..., Awaitable[Libp2pTransport]]
SWARM = "ab" * 32


@pytest_asyncio.fixture
async def make(tmp_path: Path) -> AsyncIterator[Maker]:
    """Start a transport, joined to those given; all are stopped at the end."""
    made: list[Libp2pTransport] = []

    async def start(*known: Libp2pTransport, prefix: str = SWARM, port: int = 0) -> Libp2pTransport:
        file = tmp_path / f"{len(made)}.key"
        transport = Libp2pTransport(Identity.create(file), file, host="127.0.0.1", port=port, prefix=prefix)
        await transport.start()
        made.append(transport)
        if known:
            reports = await transport.join([other.addresses()[0] for other in known])
            assert all(report.peer for report in reports), reports
        return transport

    yield start
    await asyncio.gather(*(transport.stop() for transport in made))
