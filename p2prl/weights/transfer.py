"""Fetching a content from everybody who has pieces of it, many at once, each verified, across restarts.

In: a content (hash, length, hashes of its pieces), peers that may hold it, a transport. Out: the whole file under its
name; holders that served what they should not, to `blame`.

Invariants: one transfer of a content at a time; whatever ends this (an error, a cancellation, kill -9), what was
verified is there the next time.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from p2prl.records import Content
from p2prl.swarm.metered_transport import MeteredTransport
from p2prl.weights.contents import check_content
from p2prl.weights.partial import Disk, Partial, content_path
from p2prl.weights.pull import Options, Progress, Pull, Surroundings


async def fetch(
    transport: MeteredTransport,
    content: Content,
    holders: Callable[[], Sequence[str]],
    folder: Path,
    *,
    options: Options | None = None,
    node: Surroundings | None = None,
) -> Path:
    """The whole content, verified, in `folder`; `holders` gives who may have it, the likeliest first.

    Raises Unreachable when nobody gives what is missing, BadRecord for a content that contradicts itself,
    StoreError for our disk. What was verified stays.
    """
    options, node = options or Options(), node or Surroundings()
    check_content(content, options.most_bytes)
    target = content_path(folder, content.content_hash)
    if await asyncio.to_thread(target.is_file):
        return target
    if content.content_hash in node.running:
        raise ValueError("this content is being fetched already")
    node.running[content.content_hash] = progress = Progress(0, content.content_bytes, reads_disk=True)
    try:
        partial = await _opened(folder, content, node.disk)
        node.partials[content.content_hash] = partial
        progress.num_bytes, progress.reads_disk = partial.num_bytes, False
        try:
            await Pull(transport, partial, holders, options, node, progress).run()
            progress.reads_disk = True
            path = await asyncio.to_thread(partial.finish)
            node.remembered.forget(content.content_hash)
            return path
        finally:
            del node.partials[content.content_hash]
            await asyncio.shield(asyncio.to_thread(partial.close))
    finally:
        del node.running[content.content_hash]


async def _opened(folder: Path, content: Content, disk: Disk) -> Partial:
    """Also closed when we are cancelled meanwhile."""
    opening = asyncio.ensure_future(asyncio.to_thread(Partial.open, folder, content, disk))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(lambda done: None if done.cancelled() or done.exception() else done.result().close())
        raise
