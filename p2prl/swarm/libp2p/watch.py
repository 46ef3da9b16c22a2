"""Supervision of p2pd: notice its death at once, bring it back, keep the routing tables fresh.

In: the running session, how to launch the next, whether the node is stopping. Out: calls of `down` and `up`. hivemind
itself never notices. A signal to the node's whole process group, or by systemd to all that it started, ends p2pd too:
while the node stops that is no fault, and nothing is brought back.
"""

# hivemind has no types: its attributes begin as None and its protobuf modules are made at import.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable

from p2prl.errors import PreflightFailed
from p2prl.swarm.libp2p.session import NETWORK_ERRORS, Session

BACK_OFF_S = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
IDLE_S = 30.0
FROZEN_S = 15.0
_log = logging.getLogger(__name__)


async def supervise(
    session: Session,
    down: Callable[[], Awaitable[None]],
    up: Callable[[], Awaitable[Session]],
    is_stopping: Callable[[], bool],
) -> None:
    """Until the node stops: wait for p2pd's end, then restart it with growing pauses until it stays up."""
    while True:
        await session.died()
        if is_stopping():
            await down()
            return
        _log.warning("p2pd ended: restarting it")
        await down()
        num_failed = 0
        while True:
            await asyncio.sleep(BACK_OFF_S[min(num_failed, len(BACK_OFF_S) - 1)])
            if is_stopping():
                return
            try:
                session = await up()
                break
            except (*NETWORK_ERRORS, PreflightFailed) as error:
                num_failed += 1
                _log.warning("p2pd can't be restarted (attempt %d): %s", num_failed, error)


async def keep_fresh(
    session: Callable[[], Session | None],
    refresh: Callable[[], Awaitable[None]],
    idle_s: float = IDLE_S,
) -> None:
    """For ever: every `idle_s` refresh; a p2pd that hangs twice in a row is killed, which `supervise` repairs."""
    num_hung = 0
    while True:
        await asyncio.sleep(idle_s)
        current = session()
        if current is None:
            continue
        try:
            await asyncio.wait_for(refresh(), FROZEN_S)
            num_hung = 0
        except TimeoutError:
            num_hung += 1
        except NETWORK_ERRORS as error:
            _log.debug("refreshing failed: %r", error)
        if num_hung >= 2 and session() is current:
            _log.warning("p2pd hangs: killing it")
            current.p2p._child.send_signal(signal.SIGKILL)
            num_hung = 0
