"""A content and its file: the name stands for the size and the list of pieces, so no name has two of either.

In: files, contents of anybody. Out: `Content`s, names of files; what contradicts itself is refused.

Invariants: a piece that fits a name's list is right whoever named it, and right for ever; a file is checked by its name
alone. A file is read once, in pieces. Blocking where files are read: call it in a thread.
"""

from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from p2prl.errors import BadRecord
from p2prl.records import PIECE_BYTES, Content, Hash, Version
from p2prl.weights.messages import MAX_PIECES

_DOMAIN = b"p2prl content 1\0"


def content_name(content_bytes: int, pieces: Sequence[Hash]) -> Hash:
    """What `Content.content_hash` is."""
    return blake3(_DOMAIN + content_bytes.to_bytes(8, "big") + b"".join(pieces)).digest()


def content_of(path: Path, kind: str, base: Version | None) -> Content:
    """How a manifest names the content that this file is."""
    num_bytes, pieces = _read(path)
    return Content(kind, base, content_name(num_bytes, pieces), num_bytes, pieces)


def name_of_file(path: Path) -> Hash:
    """Of the content that it is. Raises OSError."""
    return content_name(*_read(path))


def check_content(content: Content, most_bytes: int) -> None:
    """What contradicts itself, or is of more than `most_bytes`, is refused before a byte is fetched."""
    expected = -(-content.content_bytes // PIECE_BYTES)
    if not 0 < content.content_bytes <= most_bytes or len(content.pieces) != expected or expected > MAX_PIECES:
        raise BadRecord(f"a content of {content.content_bytes} bytes in {len(content.pieces)} pieces")
    if content.content_hash != content_name(content.content_bytes, content.pieces):
        raise BadRecord(f"a content under a name that is not that of its pieces, {content.content_hash.hex()[:16]}")


def _read(path: Path) -> tuple[int, tuple[Hash, ...]]:
    num_bytes, pieces = 0, []
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            pieces.append(blake3(piece).digest())
            num_bytes += len(piece)
    return num_bytes, tuple(pieces)
