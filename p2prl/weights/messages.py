"""What peers say to each other about the pieces of a content; one file, so that both ends agree.

`have` (a call): HaveRequest -> HaveReply. `weights` (a stream): PieceRequest -> for each piece asked for, in any order,
a PieceHead, then `num_bytes` of the piece in items of at most `item_bytes`.
"""

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta

from p2prl.records import PIECE_BYTES, Count, Hash, PeerId, Wire

HAVE, PIECES = "have", "weights"
MAX_PIECES = 2**16  # of one content: 256 GiB
MAX_ASKED = 64  # pieces in one stream
MAX_NAMED = 16  # peers in one message


class HaveRequest(Wire, frozen=True):
    content_hash: Hash


class HaveReply(Wire, frozen=True):
    """Which pieces the peer serves: piece i is bit i % 8 of byte i // 8."""

    bits: Annotated[bytes, Meta(max_length=MAX_PIECES // 8)]


class PieceRequest(Wire, frozen=True):
    """`without`: peers of whom the asker got none of these pieces, so that nobody refers it to them; the asker itself
    where nobody gives it any."""

    content_hash: Hash
    indexes: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_ASKED)]
    item_bytes: Count
    without: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_NAMED)] = ()


class PieceHead(Wire, frozen=True):
    """`num_bytes` of piece `index` follow. None follow where the peer is busy or lost it: `ask` has it, or soon will."""

    index: Count
    num_bytes: Count
    ask: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_NAMED)] = ()


def to_bits(indexes: Iterable[int], num_pieces: int) -> bytes:
    bits = bytearray(-(-num_pieces // 8))
    for index in indexes:
        bits[index // 8] |= 1 << index % 8
    return bytes(bits)


def from_bits(bits: bytes, num_pieces: int) -> frozenset[int]:
    """Bits beyond the content's pieces say nothing."""
    return frozenset(index for index in range(min(num_pieces, 8 * len(bits))) if bits[index // 8] >> index % 8 & 1)


def piece_bytes(content_bytes: int, index: int) -> int:
    """The length of a piece: the last one is shorter."""
    return max(0, min(PIECE_BYTES, content_bytes - index * PIECE_BYTES))
