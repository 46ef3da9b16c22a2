"""The environment process's loop and the limits on the code it runs.

In: requests from the pipe, one at a time. Out: a reply to each. Ends when the pipe closes.

The limits are for accidents: an environment is code that the node's owner installed; what peers control are answers.
A call inside C code that never returns to Python can't be interrupted: when it has used `_GRACE_S` of the processor more
than its limit the kernel ends the process (SIGPROF), and the daemon asks again, answer by answer.

Invariant: nothing that guarded code raises ends the process, whatever it is and however it is wrapped. So no signal may
raise in a process with a guard: Ctrl-C is ignored there, or ends it.
"""

import resource
import signal
import sys
import time
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
        self._budgets: list[tuple[float, float]] = []  # when each ends, and how long it is in all

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Implements `judge.Within`; may be nested."""
        self._budgets.append((time.monotonic() + seconds, seconds))
        try:
            yield
        finally:
            self._budgets.pop()

    def _left(self) -> tuple[float, float]:
        """What a call may take now, and the whole limit that this is the rest of."""
        now = time.monotonic()
        return min([(self._limits.call_s, self._limits.call_s), *((end - now, whole) for end, whole in self._budgets)])

    def __call__(self, work: Callable[[], T]) -> T:
        (left_s, whole_s), alarm = self._left(), _Alarm()
        too_long = RanTooLong(f"the environment ran longer than {whole_s:g} s")
        if left_s <= 0:
            raise too_long
        previous = signal.signal(signal.SIGALRM, alarm)
        try:
            with _address_space(self._limits.memory_bytes):
                try:
                    # Repeats: code that swallows the first alarm meets the next.
                    signal.setitimer(signal.ITIMER_REAL, left_s, _REPEAT_S)
                    signal.setitimer(signal.ITIMER_PROF, left_s + _GRACE_S)
                    made = self._tried(work)
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            if alarm.rang:
                raise too_long
            return made
        except (_TimedOut, RewardFailed) as error:
            raise (too_long if alarm.rang else error) from None
        finally:
            # Again: a late alarm may have jumped over the first one; the next is _REPEAT_S away.
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGALRM, previous)

    def _tried(self, work: Callable[[], T]) -> T:
        """Third-party code: whatever it raises is worth 0."""
        try:
            return work()
        except (ConfigError, _TimedOut):
            raise
        except MemoryError:
            raise RewardFailed(f"the environment wanted more than {self._limits.memory_bytes} bytes") from None
        except BaseException as error:  # noqa: BLE001  # a timeout in a group of tasks is one too
            raise RewardFailed(f"the environment raised {type(error).__name__}: {_said(error)}") from error


class _Alarm:
    """Interrupts, again and again; code that swallows that for `_GRACE_S` ends with its process."""

    def __init__(self) -> None:
        self._left = round(_GRACE_S / _REPEAT_S)
        self.rang = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.rang = True
        self._left -= 1
        if self._left <= 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        raise _TimedOut


def _said(error: BaseException) -> str:
    """Its first words, as UTF-8 can carry them; an exception's own code may fail at that."""
    try:
        return str(error)[:_MAX_SAID_CHARACTERS].encode("utf-8", "replace").decode()
    except _TimedOut:
        raise
    except BaseException as worse:  # noqa: BLE001  # third-party code, as above
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
            case TextsRequest(id, parts):
                return TextsReply(id, judge.texts(parts))
    except (RewardFailed, ConfigError) as error:
        return Failed(str(error), request.id)


def serve(judge: Judge, pipe: Pipe) -> None:
    """Answer requests until the daemon closes the pipe."""
    while True:
        try:
            pipe.send(answer(judge, pipe.receive()))
        except PipeClosed:
            return
