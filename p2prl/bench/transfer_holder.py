"""A holder of the transfer benchmark: serves `version` in FOLDER over our transport and, bare, over hivemind's P2P.

In: `version`, a file. Out: `holderN.json` (addresses, pid), `ready`; then pieces to whoever asks, until it is ended.

    python -m p2prl.bench.transfer_holder FD FOLDER

The benchmark tells it how to behave by calls of `behave`: a cap for its upload, whether it serves false bytes.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from p2prl import codec
from p2prl.bench import bare_hivemind
from p2prl.bench.measuring import run
from p2prl.clock import SystemClock
from p2prl.identity import Identity
from p2prl.records import Content, Wire
from p2prl.swarm.libp2p.transport import Libp2pTransport
from p2prl.swarm.metered_transport import MeteredTransport
from p2prl.weights.chain import ANCHOR
from p2prl.weights.contents import content_of
from p2prl.weights.serve import PieceServer

VERSION = "version"  # the file that all holders serve
SWARM = bytes(range(32))
BEHAVE = "behave"


class Behaviour(Wire, frozen=True):
    """`up` in bytes a second; `corrupt`: the first byte of each item is flipped."""

    up: float | None = None
    corrupt: bool = False


def version_of(folder: Path) -> Content:
    return content_of(folder / VERSION, ANCHOR, None)


def make_transport(folder: Path, name: str) -> tuple[Libp2pTransport, MeteredTransport]:
    file = folder / f"{name}.key"
    inner = Libp2pTransport(Identity.create(file), file, host="127.0.0.1", prefix=SWARM.hex(), relay=False)
    return inner, MeteredTransport(inner, SystemClock())


class Holder:
    def __init__(self, folder: Path, number: int) -> None:
        self._path = folder / VERSION
        pieces = version_of(folder).pieces
        self._behaviour = Behaviour()
        self._inner, self._transport = make_transport(folder, f"holder{number}")
        self._transport.serve(BEHAVE, self._behave)
        # The server is outside of the caps' transport, so that what it serves can be spoiled on its way in.
        PieceServer(
            Spoiled(self._transport, lambda: self._behaviour.corrupt),  # type: ignore[arg-type]
            SystemClock(),
            lambda _: self._path,
            lambda _: pieces,
            item_bytes=self._transport.up_item_bytes,
        )

    async def _behave(self, peer: str, body: bytes) -> bytes:
        self._behaviour = codec.decode(body, Behaviour)
        self.set_rates(self._behaviour.up)
        return b"so be it"

    async def start(self) -> None:
        await self._transport.start()

    @property
    def address(self) -> str:
        return self._transport.addresses()[0]

    @property
    def p2pd_pid(self) -> int:
        assert self._inner._session is not None
        return self._inner._session.pid

    def set_rates(self, up: float | None) -> None:
        self._transport.set_rates(up, None)

    async def stop(self) -> None:
        await self._transport.stop()


class Spoiled:
    """Registers handlers whose items are false while `is_corrupt`."""

    def __init__(self, transport: MeteredTransport, is_corrupt: Callable[[], bool]) -> None:
        self._transport, self._is_corrupt = transport, is_corrupt

    def serve(self, method: str, handler: Any) -> None:
        self._transport.serve(method, handler)

    def serve_stream(self, method: str, handler: Any) -> None:
        async def spoiled(peer: str, body: bytes) -> AsyncIterator[bytes]:
            async with contextlib.aclosing(handler(peer, body)) as items:
                async for item in items:
                    is_data = len(item) > 1024
                    yield bytes([item[0] ^ 1]) + item[1:] if is_data and self._is_corrupt() else item

        self._transport.serve_stream(method, spoiled)


async def serve(folder: Path) -> None:
    number = _number(folder)
    holder = Holder(folder, number)
    raw = await bare_hivemind.serve_file(folder / VERSION) if number == 0 else None
    try:
        await holder.start()
        told: dict[str, Any] = {"address": holder.address, "pid": os.getpid()}
        if raw is not None:
            told["raw"] = await bare_hivemind.address_of(raw)
        (folder / f"holder{number}.json").write_text(json.dumps(told))
        print("ready", flush=True)
        await asyncio.Event().wait()
    finally:
        await holder.stop()
        if raw is not None:
            await bare_hivemind.end_p2p(raw)


def _number(folder: Path) -> int:
    """The first that no other holder took."""
    number = 0
    while True:
        with contextlib.suppress(FileExistsError):
            (folder / f"holder{number}").touch(exist_ok=False)
            return number
        number += 1


if __name__ == "__main__":
    raise SystemExit(run(serve))
