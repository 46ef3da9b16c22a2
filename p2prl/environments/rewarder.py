"""The environment process's loop and the limits on the code it runs.

In: requests from the pipe, one at a time. Out: a reply to each. Ends when the pipe closes.

The limits are for accidents: an environment is code that the node's owner installed; what peers control are answers.
A call inside C code that never returns to Python can't be interrupted: when it has used `_GRACE_S` of the processor more
than its limit the kernel ends the process (SIGPROF), and the daemon asks again, answer by answer.
"""

import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeVar

import msgspec

from p2prl.environments.judge import Judge, RanTooLong, RewardFailed
from p2prl.environments.messages import (
    Failed,
    JudgeReply,
    JudgeRequest,
    PromptsReply,
    PromptsRequest,
    Reply,
    Request,
    TextsReply,
    TextsRequest,
    TurnsReply,
    TurnsRequest,
)
from p2prl.errors import ConfigError
from p2prl.pipes import PipeClosed

T = TypeVar("T")
_REPEAT_S = 0.2
_GRACE_S = 3.0
_MAX_SAID_CHARACTERS = 1000


class Limits(msgspec.Struct, frozen=True):
    """Of one call: seconds, and bytes of address space beyond what the process has when the call begins."""

    call_s: float = 5.0
    memory_bytes: int = 2 * 2**30


class Pipe(Protocol):
    def send(self, record: object) -> None: ...
    def receive(self) -> Request: ...


class _TimedOut(BaseException):
    """Not an Exception, so that broad handlers in an environment's code don't swallow it."""


class LimitGuard:
    """Implements `judge.Guard` by an alarm and an address-space limit; for the main thread of its own process."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def __call__(self, work: Callable[[], T]) -> T:
        previous = signal.signal(signal.SIGALRM, _Alarm())
        try:
            with _address_space(self._limits.memory_bytes):
                try:
                    # Repeats: code that swallows the first alarm meets the next.
                    signal.setitimer(signal.ITIMER_REAL, self._limits.call_s, _REPEAT_S)
                    signal.setitimer(signal.ITIMER_PROF, self._limits.call_s + _GRACE_S)
                    return work()
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
        except _TimedOut:
            raise RanTooLong(f"the environment ran longer than {self._limits.call_s:g} s") from None
        except MemoryError:
            raise RewardFailed(f"the environment wanted more than {self._limits.memory_bytes} bytes") from None
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # third-party code: whatever it raises is worth 0
            raise RewardFailed(f"the environment raised {type(error).__name__}: {_said(error)}") from error
        finally:
            # Again: a late alarm may have jumped over the first one; the next is _REPEAT_S away.
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGALRM, previous)


class _Alarm:
    """Interrupts, again and again; code that swallows that for `_GRACE_S` ends with its process."""

    def __init__(self) -> None:
        self._left = round(_GRACE_S / _REPEAT_S)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._left -= 1
        if self._left <= 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        raise _TimedOut


def _said(error: BaseException) -> str:
    """Its first words, as UTF-8 can carry them; an exception's own code may fail at that."""
    try:
        return str(error)[:_MAX_SAID_CHARACTERS].encode("utf-8", "replace").decode()
    except Exception as worse:  # noqa: BLE001  # third-party code, as above
        return f"(its text can't be made: {type(worse).__name__})"


@contextmanager
def _address_space(extra_bytes: int) -> Iterator[None]:
    if not sys.platform.startswith("linux"):
        yield  # elsewhere the limit isn't enforced or can't be lowered
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = _address_space_bytes() + extra_bytes
    ceilings = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *ceilings]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_bytes().split()[0])
    return pages * resource.getpagesize()


def answer(judge: Judge, request: Request) -> Reply:
    try:
        match request:
            case PromptsRequest(id, indices):
                return PromptsReply(id, tuple(judge.prompt(index) for index in indices))
            case JudgeRequest(id, items):
                return JudgeReply(id, tuple(judge.check(item) for item in items))
            case TurnsRequest(id, items):
                return TurnsReply(id, tuple(judge.turn(item) for item in items))
            case TextsRequest(id, answers):
                return TextsReply(id, tuple(map(judge.text, answers)))
    except (RewardFailed, ConfigError) as error:
        return Failed(str(error), request.id)


def serve(judge: Judge, pipe: Pipe) -> None:
    """Answer requests until the daemon closes the pipe."""
    while True:
        try:
            pipe.send(answer(judge, pipe.receive()))
        except PipeClosed:
            return
