"""A long line on one machine: a TCP proxy before each address of `targets.json` that holds back all that passes.

In: `targets.json` (a list of ports on 127.0.0.1) and `delay_s` in FOLDER. Out: `proxies.json`, the ports to dial instead;
then `ready`.

    python -m p2prl.bench.delay_proxy FD FOLDER

TCP is acknowledged here at once: only what runs over it (yamux, our protocol) feels the delay; a real line adds TCP's own
window on top.
"""

import asyncio
import contextlib
import json
from collections import deque
from pathlib import Path

from p2prl.bench.measuring import run

ONE_WAY_S = 0.05
READ_BYTES = 256 * 2**10
MOST_HELD_BYTES = 64 * 2**20  # of one direction of one connection


class Direction:
    """What came in goes out `ONE_WAY_S` later."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._held: deque[tuple[float, bytes]] = deque()
        self._num_bytes = 0
        self._changed = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(self._take())
            both.create_task(self._give())

    async def _take(self) -> None:
        loop = asyncio.get_running_loop()
        data = b"begun"
        while data:
            while self._num_bytes > MOST_HELD_BYTES:
                self._changed.clear()
                await self._changed.wait()
            data = b""
            with contextlib.suppress(ConnectionError):
                data = await self._reader.read(READ_BYTES)
            self._num_bytes += len(data)
            self._held.append((loop.time() + ONE_WAY_S, data))
            self._changed.set()

    async def _give(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while not self._held:
                self._changed.clear()
                await self._changed.wait()
            at, data = self._held.popleft()  # b"" is the end
            await asyncio.sleep(max(0.0, at - loop.time()))
            self._num_bytes -= len(data)
            self._changed.set()
            with contextlib.suppress(OSError):  # the other direction ends then, too
                if not data:
                    self._writer.write_eof()
                    return
                self._writer.write(data)
                await self._writer.drain()


async def serve(target_port: int) -> asyncio.Server:
    """A proxy on a port of its own."""
    connections: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_pass_on(reader, writer, target_port))
        connections.add(task)
        task.add_done_callback(connections.discard)

    return await asyncio.start_server(connected, "127.0.0.1", 0)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target_port: int) -> None:
    try:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", target_port)
    except ConnectionError:
        writer.close()
        return
    try:
        async with asyncio.TaskGroup() as both:
            both.create_task(Direction(reader, far_writer).run())
            both.create_task(Direction(far_reader, writer).run())
    finally:
        far_writer.close()
        writer.close()


async def proxies(folder: Path) -> None:
    ports = json.loads((folder / "targets.json").read_text())
    servers = [await serve(port) for port in ports]
    (folder / "proxies.json").write_text(json.dumps([server.sockets[0].getsockname()[1] for server in servers]))
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    raise SystemExit(run(proxies))
