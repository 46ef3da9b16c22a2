"""Tells the swarm of our own groups: when they are made, and again while no manifest lists them.

In: headers of our groups. Out: signed announcements by gossip, as many headers in one as fit.

Gossip is best effort: after a partition, a rollback or a change of leader, whoever trains now may never have heard of
a group; its maker has it, knows that it waits, and says so again.
"""

import contextlib
from collections.abc import Sequence

from p2prl import codec
from p2prl.errors import PeerError
from p2prl.node.state import NodeState
from p2prl.records import Announcement, GroupHeader

TOPIC = "announce"
HEADERS_PER_ANNOUNCEMENT = 8
AGAIN_S = 15.0  # between two announcements of what still waits


async def announce(state: NodeState, headers: Sequence[GroupHeader]) -> None:
    for start in range(0, len(headers), HEADERS_PER_ANNOUNCEMENT):
        record = Announcement(state.me, tuple(headers[start : start + HEADERS_PER_ANNOUNCEMENT]))
        with contextlib.suppress(PeerError):  # the digest exchange finds what gossip missed
            await state.transport.publish(TOPIC, codec.seal(record, state.identity, state.swarm))


async def announce_again(state: NodeState) -> None:
    """What we made some time ago and still wait for."""
    now = state.clock.unix()
    fresh_from = now - AGAIN_S / 2  # up to now: what is from the future, the clock has gone back since
    await announce(state, [row.header for row in state.store.own_waiting() if not fresh_from < row.made_at <= now])
