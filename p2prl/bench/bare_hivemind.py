"""hivemind as it comes, with nothing of ours: what the network's figures are measured against.

In: nothing, the address of another bare node, a file. Out: the cost of an idle DHT node; the time of a start and a store,
of a file over a bare stream.

    python -m p2prl.bench.bare_hivemind FD FOLDER     says `ready` and idles
"""

# hivemind has no types.
# pyright: reportAttributeAccessIssue=false

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import Any

from p2prl.bench.measuring import run

LIFETIME_S = 60.0
STREAM, WRITE_BYTES = "/p2prl/bench/raw", 2**20


async def idle(folder: Path) -> None:
    """With all that `import hivemind` brings."""
    import hivemind as _all  # noqa: F401
    from hivemind.dht import DHTNode

    node = await DHTNode.create(**_options())
    try:
        print("ready", flush=True)
        await asyncio.Event().wait()
    finally:
        await end_node(node)


async def first_node() -> Any:
    """What others join."""
    from hivemind.dht import DHTNode

    return await DHTNode.create(**_options())


async def start_and_store(first: Any) -> float:
    """Seconds from a node's start until another one reads what it stored."""
    from hivemind.dht import DHTNode

    addresses = [str(address) for address in await first.protocol.p2p.get_visible_maddrs()]
    started = time.monotonic()
    node = await DHTNode.create(**_options(), initial_peers=addresses)
    try:
        key = str(node.peer_id)
        while True:
            await node.store(key, b"record", time.time() + LIFETIME_S)
            if await first.get(key, latest=True) is not None:
                return time.monotonic() - started
    finally:
        await end_node(node)


async def serve_file(path: Path) -> Any:
    """A P2P whose streams send the file in writes of 1 MiB, and nothing else."""
    data = await asyncio.to_thread(path.read_bytes)

    async def send(info: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        view = memoryview(data)
        for at in range(0, len(data), WRITE_BYTES):
            writer.write(view[at : at + WRITE_BYTES])
            await writer.drain()
        writer.close()

    p2p = await _p2p()
    await p2p.add_binary_stream_handler(STREAM, send)
    return p2p


async def address_of(p2p: Any) -> str:
    return str((await p2p.get_visible_maddrs())[0])


async def connected_to(address: str) -> Any:
    """A P2P that knows the one at this address."""
    from hivemind.utils.multiaddr import Multiaddr

    p2p = await _p2p()
    await p2p._client.connect(_peer_of(address), [Multiaddr(address.rsplit("/p2p/", 1)[0])])
    return p2p


async def read_stream(p2p: Any, address: str, num_bytes: int) -> float:
    """Seconds for so many bytes, dropped as they come."""
    started = time.perf_counter()
    _, reader, writer = await p2p.call_binary_stream_handler(_peer_of(address), STREAM)
    left = num_bytes
    while left > 0:
        data = await reader.read(WRITE_BYTES)
        if not data:
            raise RuntimeError(f"the bare stream was cut {left} bytes before its end")
        left -= len(data)
    writer.close()
    return time.perf_counter() - started


def _peer_of(address: str) -> Any:
    from hivemind.p2p import PeerID

    return PeerID.from_base58(address.rsplit("/", 1)[1])


async def _p2p() -> Any:
    from hivemind.p2p import P2P

    return await P2P.create(**_options(), use_relay=False)


def _options() -> dict[str, Any]:
    return {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "nat_port_map": False, "auto_nat": False}


async def end_node(node: Any) -> None:
    """hivemind leaves a socket file now and then: we don't."""
    await _end(node, node.protocol.p2p)


async def end_p2p(p2p: Any) -> None:
    await _end(p2p, p2p)


async def _end(started: Any, p2p: Any) -> None:
    sockets = [address["unix"] for address in (p2p._daemon_listen_maddr, p2p._client_listen_maddr)]
    await started.shutdown()
    for path in sockets:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


if __name__ == "__main__":
    raise SystemExit(run(idle))
