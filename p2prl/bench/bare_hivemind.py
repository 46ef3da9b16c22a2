"""hivemind as it comes, with nothing of ours: what the network's figures are measured against.

In: nothing, or the address of another bare node. Out: the cost of an idle DHT node; the time of a start and a store.

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


def _options() -> dict[str, Any]:
    return {"host_maddrs": ["/ip4/127.0.0.1/tcp/0"], "nat_port_map": False, "auto_nat": False}


async def end_node(node: Any) -> None:
    """hivemind leaves a socket file now and then: we don't."""
    p2p = node.protocol.p2p
    sockets = [address["unix"] for address in (p2p._daemon_listen_maddr, p2p._client_listen_maddr)]
    await node.shutdown()
    for path in sockets:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


if __name__ == "__main__":
    raise SystemExit(run(idle))
