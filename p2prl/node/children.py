"""The children of the daemon: start, ask, notice their end, stop.

In: a module to run and its request and reply types. Out: replies by request id. A child is spawned (never forked) with
one end of a socket pair; it ends when that closes, so no child outlives its daemon, whatever kills the daemon. Children
start with -P, here and elsewhere: a module that lies in the folder where somebody starts a node is not run by its name.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from p2prl import exits
from p2prl.errors import P2prlError
from p2prl.paths import Home
from p2prl.pipes import AsyncPipe, PipeClosed

NOTICES = ("Beat", "Planned")  # names of what is no reply


class ChildDied(P2prlError):
    """The child ended or stopped answering; the message says how. `killed`: by somebody else than us."""

    def __init__(self, message: str, module: str = "", *, killed: bool = False) -> None:
        super().__init__(message)
        self.module, self.killed = module, killed


class Child:
    """One child process with numbered requests. `start` and `request` may be used again after it died."""

    def __init__(
        self,
        module: str,
        args: Sequence[str],
        reply_type: Any,
        *,
        environ: Mapping[str, str],
        stderr: IO[bytes] | int | None = None,
        patience_s: float = 3.0,
    ) -> None:
        """`stderr`: what it prints goes there, stdout too; `patience_s`: how long it may take to end by itself."""
        self.module, self._args, self._reply_type = module, tuple(args), reply_type
        self._environ, self._stderr, self._patience_s = dict(environ), stderr, patience_s
        self._process: asyncio.subprocess.Process | None = None
        self._pipe: AsyncPipe | None = None
        self._reader: asyncio.Task | None = None
        self._ending: asyncio.Task[tuple[str, bool]] | None = None  # of the last one that ran: why, and `killed`
        self._waiting: dict[int, asyncio.Future] = {}
        self._ids = itertools.count()
        self._heard_at = 0.0  # event loop's time of its last word
        self.num_starts = 0
        self.on_death: Callable[[str], None] = lambda why: None  # it died while nobody asked it for anything
        self.on_notice: Callable[[Any], None] = lambda notice: None  # what it says of itself, unasked

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None and self._pipe is not None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self, setup: object | None, *, timeout_s: float = 120.0) -> Any:
        """Spawn, send `setup`, return the first reply (the child's Ready). Raises ChildDied."""
        await self.stop()
        self._ending = None
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", self.module, str(theirs.fileno()), *self._args,
                pass_fds=(theirs.fileno(),), env={**os.environ, **self._environ}, stdin=asyncio.subprocess.DEVNULL,
                stdout=self._stderr, stderr=self._stderr, start_new_session=True,
            )  # fmt: skip
        try:
            self._pipe = await AsyncPipe.open(ours, self._reply_type)
            self.num_starts += 1
            if setup is not None:
                await self._pipe.send(setup)
            while type(ready := await asyncio.wait_for(self._pipe.receive(), timeout_s)).__name__ in NOTICES:
                self.on_notice(ready)
        except (TimeoutError, PipeClosed) as error:
            raise await self._end(f"{self.module} did not start: {error or 'no answer'}") from None
        except BaseException:  # cancelled: a child that nobody reads must not count as alive
            await self._end("its start was cut short")
            raise
        if type(ready).__name__ == "Failed":
            raise await self._end(f"{self.module} can't start: {ready.message}")
        self._reader = asyncio.create_task(self._read(), name=f"read {self.module}")
        return ready

    async def request(self, make: Callable[[int], object], *, timeout_s: float) -> Any:
        """Send `make(id)`, return the reply with that id. Raises ChildDied, and P2prlError for a `Failed` reply.

        It is given up when the child says nothing at all for `timeout_s`; one at long work sends `Beat`s.
        """
        if not self.alive or self._pipe is None:
            raise await self._not_running()
        number = next(self._ids)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._pipe.send(make(number))
            reply = await self._answer(future, timeout_s)
        except TimeoutError:
            future.cancel()  # nobody reads it any more
            raise await self._end(f"{self.module} did not answer within {timeout_s:.0f} s") from None
        except PipeClosed as error:
            future.cancel()
            raise await self._end(str(error)) from None
        finally:
            self._waiting.pop(number, None)
        if type(reply).__name__ == "Failed":
            raise P2prlError(f"{self.module}: {reply.message}")
        return reply

    async def stop(self) -> None:
        """Close the pipe; kill what does not end by that."""
        if self._process is not None or self._ending is not None:
            await self._end("stopped")

    async def _answer(self, future: asyncio.Future, timeout_s: float) -> Any:
        """Raises TimeoutError when nothing was heard of the child for `timeout_s`."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while not future.done():
            left_s = max(begun, self._heard_at) + timeout_s - loop.time()
            if left_s <= 0:
                raise TimeoutError
            await asyncio.wait([future], timeout=left_s)
        return future.result()

    async def _read(self) -> None:
        assert self._pipe is not None
        try:
            while True:
                reply = await self._pipe.receive()
                self._heard_at = asyncio.get_running_loop().time()
                if type(reply).__name__ in NOTICES:
                    self.on_notice(reply)
                    continue
                future = self._waiting.get(reply.id)
                if future is not None and not future.done():
                    future.set_result(reply)
        except PipeClosed as error:
            asked_for = self._process is None  # `stop` and a missed deadline take the process away first
            died = await self._end(str(error), from_reader=True)
            if not self._waiting and not asked_for:  # who waits for an answer tells it himself
                self.on_death(f"{self.module}: {died}")
            self._fail_waiting(died)

    async def _not_running(self) -> ChildDied:
        if self._pipe is None and self._ending is None:  # not started yet
            return ChildDied(f"{self.module} is not running", self.module)
        died = await self._end("it ended")
        return ChildDied(f"{self.module} is not running: {died}", self.module, killed=died.killed)

    async def _end(self, why: str, *, from_reader: bool = False) -> ChildDied:
        """Whoever comes first ends it; the others wait for that, and are told the same."""
        if self._process is not None:
            process, self._process = self._process, None
            self._ending = asyncio.create_task(self._bury(process, why, from_reader), name=f"end {self.module}")
        assert self._ending is not None
        message, killed = await asyncio.shield(self._ending)  # who is cancelled meanwhile leaves no process behind
        return ChildDied(message, self.module, killed=killed)

    async def _bury(self, process: asyncio.subprocess.Process, why: str, from_reader: bool) -> tuple[str, bool]:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            pipe.close()
        if self._reader is not None and not from_reader:
            self._reader.cancel()
        try:
            code = await asyncio.wait_for(process.wait(), self._patience_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            code = None  # the signal was ours
        if code != 0:  # else it has cleared up after itself
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: what it started and left
        log = "" if self._stderr is None or isinstance(self._stderr, int) else str(self._stderr.name)
        message, killed = f"{why} ({describe_exit(code, log)})", code == -signal.SIGKILL
        if not from_reader:
            self._fail_waiting(ChildDied(message, self.module, killed=killed))
        return message, killed

    def _fail_waiting(self, died: ChildDied) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ChildDied(str(died), self.module, killed=died.killed))


def open_log(home: Home) -> IO[bytes]:
    """Where the children of a home print, by its name in messages of theirs; for its owner alone."""
    return open(home.children_log, "ab", buffering=0, opener=lambda path, flags: os.open(path, flags, 0o600))


def describe_exit(code: int | None, log: str = "") -> str:
    """`code` None: we ended it by force."""
    if code is None:
        return "it did not end by itself, so it was ended by force"
    said = exits.describe_exit(code)
    return f"{said}; what it said last is in {log}" if code > 0 and log else said
