"""The directory: small signed soft state in the DHT, one record a peer and key.

In: keys and values. Out: the live records of a key by peer. Reads ask the network (a cached copy may be old) and have a
deadline; an expired record is never returned, whatever its holder's clock says.
"""

# hivemind has no types: its attributes begin as None and its protobuf modules are made at import.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import asyncio
import os
from collections.abc import Callable

import base58

from p2prl.errors import TooLarge, Unreachable
from p2prl.swarm.libp2p.ledger import Ledger
from p2prl.swarm.libp2p.session import NETWORK_ERRORS, Session
from p2prl.swarm.libp2p.validator import MAX_TTL_S, MAX_VALUE_BYTES

DEADLINE_S = 8.0
_KIND = "directory"


class Directory:
    def __init__(
        self,
        prefix: str,
        session: Callable[[], Session],
        ledger: Ledger,
        unix: Callable[[], float],
    ) -> None:
        self._prefix, self._session, self._ledger, self._unix = (
            prefix,
            session,
            ledger,
            unix,
        )

    async def put(self, key: str, value: bytes, ttl_s: float) -> bool:
        if len(value) > MAX_VALUE_BYTES:
            raise TooLarge(f"a directory record of {len(value)} bytes is over the limit of {MAX_VALUE_BYTES}")
        if not 0 < ttl_s <= MAX_TTL_S:
            raise ValueError(f"a directory record lives between 0 and {MAX_TTL_S:g} s, not {ttl_s}")
        try:
            node = self._session().node
            expiration = self._unix() + ttl_s - 0.001  # a hair below the cap that every holder checks by its own clock
            stored = node.store(self._name(key), value, expiration, subkey=node.peer_id.to_bytes())
            taken = await asyncio.wait_for(stored, DEADLINE_S)
        except (*NETWORK_ERRORS, Unreachable):
            return False
        self._ledger.sent(_KIND, len(value))
        return bool(taken)

    async def get(self, key: str) -> dict[str, bytes]:
        try:
            found = await asyncio.wait_for(self._session().node.get(self._name(key), latest=True), DEADLINE_S)
        except (*NETWORK_ERRORS, Unreachable):
            return {}
        if found is None or not isinstance(found.value, dict):
            return {}
        now = self._unix()
        records = {
            base58.b58encode(subkey).decode(): item.value
            for subkey, item in found.value.items()
            if isinstance(subkey, bytes) and isinstance(item.value, bytes) and item.expiration_time > now
        }
        self._ledger.received(_KIND, sum(map(len, records.values())))
        return records

    async def refresh(self) -> None:
        """Read a random key: peers that left drop out of the routing tables."""
        await self.get(os.urandom(8).hex())

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"
