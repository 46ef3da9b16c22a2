"""uvicorn inside the daemon's own loop; the supervisor keeps the signals.

In: an address to listen on, an app. Out: a served port until `stop`.

Listening comes first and alone, so that a port in use is known before anything starts, and port 0 gets its number
before the app (whose guard and cookie name need it) is made.
"""

import asyncio
import contextlib
import errno
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from p2prl.errors import PreflightFailed

BACKLOG = 64
STOP_S = 2


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. PreflightFailed when it can't be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PreflightFailed(
                f"the web page can't use port {port} of {host}: another program has it. "
                "Stop that one, or choose another: --set web.port=PORT (0: any free one)"
            ) from None
        raise PreflightFailed(f"the web page can't listen on {host} port {port}: {error.strerror}") from None
    sock.setblocking(False)
    return sock


def port_of(sock: socket.socket) -> int:
    return sock.getsockname()[1]


def url_of(sock: socket.socket) -> str:
    host = sock.getsockname()[0]
    return f"http://[{host}]:{port_of(sock)}" if ":" in host else f"http://{host}:{port_of(sock)}"


class Server:
    """Serves an app on a socket that already listens."""

    def __init__(self, app: ASGIApp, sock: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_S,
            limit_concurrency=128,
        )
        self._sock = sock
        self._uvicorn = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when requests are answered."""
        self._task = asyncio.create_task(self._uvicorn.serve(sockets=[self._sock]), name="web")
        started = asyncio.create_task(self._uvicorn.ready.wait())
        await asyncio.wait({self._task, started}, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            started.cancel()
            self._task.result()
            raise PreflightFailed("the web page ended while it started")

    async def stop(self) -> None:
        """Stop answering. Close the ring first: its streams then end at once."""
        self._uvicorn.should_exit = True
        if self._task is not None:
            await self._task
        self._sock.close()


class _QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers, and with an event for having started."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()
