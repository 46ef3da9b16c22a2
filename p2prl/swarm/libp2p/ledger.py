"""Bytes sent and received by kind of method or topic."""

from collections import Counter

from p2prl.swarm.libp2p.wire import kind_of
from p2prl.swarm.transport import Traffic


class Ledger:
    def __init__(self) -> None:
        self._sent: Counter[str] = Counter()
        self._received: Counter[str] = Counter()

    def sent(self, name: str, num_bytes: int) -> None:
        self._sent[kind_of(name)] += num_bytes

    def received(self, name: str, num_bytes: int) -> None:
        self._received[kind_of(name)] += num_bytes

    def totals(self) -> Traffic:
        return Traffic(dict(self._sent), dict(self._received))
