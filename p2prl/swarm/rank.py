"""The same order of candidates, and the same electorate, on every node that knows the same peers.

In: directory records by peer, live members, the swarm id. Out: candidates in rank; the voters of a term.

Invariant: only hashes and announced capacities count, never who computes it or in which order peers were met.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Protocol

from blake3 import blake3


class Candidate(Protocol):
    """What ranking reads of a directory record."""

    @property
    def can_learn(self) -> bool: ...

    @property
    def accelerator_bytes(self) -> int: ...


def rank(peers: Mapping[str, Candidate], swarm: bytes) -> tuple[str, ...]:
    """Those that can learn, best first: the larger class of accelerator memory, then by blake3(swarm, peer)."""
    able = [peer for peer, info in peers.items() if info.can_learn]
    return tuple(sorted(able, key=lambda peer: (-memory_class(peers[peer].accelerator_bytes), _place(swarm, peer))))


def memory_class(accelerator_bytes: int) -> int:
    """Doublings from 4 GiB on; below and without an accelerator 0: like machines rank by the hash, not by a few MB."""
    return max(0, (accelerator_bytes >> 32).bit_length())


def electorate(swarm: bytes, term: int, members: Iterable[str], size: int) -> tuple[str, ...]:
    """The `size` members nearest (XOR of hashes) to blake3(swarm, term), nearest first."""
    point = int.from_bytes(blake3(swarm + b"electorate%d" % term).digest(), "big")
    nearness = sorted((int.from_bytes(blake3(peer.encode()).digest(), "big") ^ point, peer) for peer in set(members))
    return tuple(peer for _, peer in nearness[:size])


@lru_cache(maxsize=4096)
def _place(swarm: bytes, peer: str) -> bytes:
    return blake3(swarm + peer.encode()).digest()
