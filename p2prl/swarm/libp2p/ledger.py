"""Bytes sent and received by kind of method or topic; what peers did wrong before a handler saw it."""

from collections import Counter
from collections.abc import Callable

from p2prl.errors import PeerError
from p2prl.swarm.libp2p.wire import kind_of
from p2prl.swarm.transport import Traffic


class Ledger:
    """`on_fault(peer, error)` hears of requests that were refused here; what handlers refuse is theirs to tell."""

    def __init__(self) -> None:
        self.on_fault: Callable[[str, PeerError], None] = lambda peer, error: None
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()

    def sent(self, name: str, num_bytes: int) -> None:
        self._sent[kind_of(name)] += num_bytes

    def received(self, name: str, num_bytes: int) -> None:
        self._received[kind_of(name)] += num_bytes

    def totals(self) -> Traffic:
        return Traffic(dict(self._sent), dict(self._received))
