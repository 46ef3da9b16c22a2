"""A version's file in pieces: serving them, fetching them from any holder, verifying each and the whole.

In: a manifest, holders, a transport. Out: a verified file in the content-addressed store.

Invariants: nothing is written beyond what the manifest announces; a piece counts only when its blake3 fits; the file
gets its name only when the state hash of the version fits, so what has a name is whole. A holder that fails is asked
last from then on; pieces that were verified are not fetched again.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec
from blake3 import blake3

from p2prl.errors import BadRecord, PeerError, StoreError, Unreachable
from p2prl.models.state import state_hash
from p2prl.records import PIECE_BYTES, Count, Hash, Manifest, Wire
from p2prl.swarm.transport import Transport

METHOD = "weights"
ITEM_BYTES = 128 * 2**10  # small enough that each of ten peers at a slow line gets one before it loses patience
PIECE_S = 300.0  # for one piece from one holder
MAX_VERSION_BYTES = 2**40


class PieceRequest(Wire, frozen=True):
    content_hash: Hash
    index: Count


def blob_path(blobs: Path, content_hash: bytes) -> Path:
    name = content_hash.hex()
    return blobs / name[:2] / name


def check_sizes(manifest: Manifest, most_bytes: int = MAX_VERSION_BYTES) -> None:
    """A manifest that lies about its sizes, or of more than `most_bytes`, is refused before a byte is fetched."""
    expected = -(-manifest.content_bytes // PIECE_BYTES)
    if not 0 < manifest.content_bytes <= most_bytes or len(manifest.pieces) != expected:
        raise BadRecord(
            f"the manifest announces {manifest.content_bytes} bytes in {len(manifest.pieces)} pieces",
            peer=manifest.learner,
        )


async def serve_piece(path: Path, index: int) -> AsyncIterator[bytes]:
    """The items of one piece of a file that we hold."""
    try:
        with path.open("rb") as file:
            file.seek(index * PIECE_BYTES)
            data = await asyncio.to_thread(file.read, PIECE_BYTES)
    except OSError as error:
        raise Unreachable(f"the version's file can't be read: {error.strerror}") from None
    for start in range(0, len(data), ITEM_BYTES):
        yield data[start : start + ITEM_BYTES]


async def fetch(
    transport: Transport,
    manifest: Manifest,
    holders: Callable[[], Sequence[str]],
    blobs: Path,
    *,
    item_timeout_s: float = 10.0,
) -> Path:
    """The version's file, verified. Raises Unreachable when no holder gives a piece, BadRecord for a wrong whole."""
    check_sizes(manifest)
    target = blob_path(blobs, manifest.content_hash)
    if await asyncio.to_thread(target.is_file):
        return target
    staged = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        failed: dict[str, int] = {}
        with staged.open("wb") as file:
            for index, digest in enumerate(manifest.pieces):
                data = await _fetch_piece(transport, manifest, index, digest, holders, failed, item_timeout_s)
                file.write(data)
        if await asyncio.to_thread(state_hash, staged) != manifest.version.hash:
            raise BadRecord(f"version {manifest.version} is not what its manifest says", peer=manifest.learner)
        staged.rename(target)
    except OSError as error:
        raise StoreError(f"can't store version {manifest.version} in {blobs}: {error}; free some space") from error
    finally:
        staged.unlink(missing_ok=True)
    return target


async def _fetch_piece(
    transport: Transport,
    manifest: Manifest,
    index: int,
    digest: bytes,
    holders: Callable[[], Sequence[str]],
    failed: dict[str, int],
    item_timeout_s: float,
) -> bytes:
    length = min(PIECE_BYTES, manifest.content_bytes - index * PIECE_BYTES)
    body = msgspec.msgpack.encode(PieceRequest(manifest.content_hash, index))
    last: PeerError = Unreachable(f"nobody serves version {manifest.version}")
    for peer in sorted(holders(), key=lambda holder: failed.get(holder, 0)):
        parts = bytearray()
        try:
            async with asyncio.timeout(PIECE_S):
                async for item in transport.stream(peer, METHOD, body, item_timeout_s=item_timeout_s, max_bytes=length):
                    parts += item
            if len(parts) == length and blake3(parts).digest() == digest:
                return bytes(parts)
            last = BadRecord(f"{peer} served a wrong piece {index} of version {manifest.version}", peer=peer)
        except TimeoutError:
            last = Unreachable(f"piece {index} did not come within {PIECE_S:.0f} s", peer=peer)
        except PeerError as error:
            last = error
        failed[peer] = failed.get(peer, 0) + 1
    raise last
