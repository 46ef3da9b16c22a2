"""Bit-exact deltas between two states: what a step changed, small. Blocking; no torch.

In: state files of a parent and a child; or of a parent, and deltas from anybody. Out: a delta; or the child's state file.

    encode:  both states, chunk by chunk -> difference -> frames -> file
    apply:   parent, chunk by chunk -> patch by each delta in turn -> file -> its state hash

Invariants: what is applied gives the very state that was encoded, byte for byte, or BadRecord and no file; a delta is
verified as a whole before it is decoded, and the result before anybody sees it; beside the states' own pages a chunk a
thread and a frame a delta are in memory. Files are written beside their place and renamed, not synced to the disk.

Why it is coded this way (SmolLM2-135M, steps 20 to 30, at rates 1e-6 and 1e-5; `p2prl bench weights`): .32 and 1.3 % of
the weights change. Which ones follows from the exponent alone, so places are told within classes of one exponent
(`delta_positions`): 1.4 and 3.9 bits a change where one class for all takes 9.7 and 7.7. Sizes of changes depend on the
exponent too: most are one step, those of weights that began at zero are large. Symbols by class in a static rANS
(`delta_entropy`) come within 3 % of that model's entropy: 6.3 and 6.0 bits a change, .124 and .49 % of the full size;
PULSE's scheme .51 and 2.0 %. (With masters spread within their rounding, as after a long run: .18 against .63 % at 1e-6.)
Statistics by tensor, row or column (and signs by a rank-one guess) gave under 2 %: left out.
"""

import json
import os
import struct
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import groupby, pairwise
from math import prod
from mmap import mmap
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import numpy as np

from p2prl.errors import BadRecord, DeltaError, StoreError
from p2prl.models.state import TensorPlace, open_state, state_hash
from p2prl.weights.delta_chunk import Changes, difference, patch
from p2prl.weights.delta_format import CHUNK_WORDS, Header, Writer, read_changes, read_header, verified_bytes
from p2prl.weights.delta_positions import Scratch

__all__ = ["DeltaInfo", "Header", "apply", "encode", "read_header"]

T = TypeVar("T")
R = TypeVar("R")
MAX_MERGED = 16  # deltas that are best applied at once: each has a frame of changes in memory, and an open file
_WAITING_PER_THREAD = 4


class DeltaInfo(msgspec.Struct, frozen=True):
    """Of a delta just written."""

    num_bytes: int
    num_changed: int
    num_parameters: int


class _Chunk(msgspec.Struct, frozen=True):
    """A run of bytes of the tensors in the order of their names, all fp16 or none. `pieces`: where they are in a file."""

    pieces: tuple[tuple[int, int], ...]
    is_fp16: bool
    num_bytes: int
    offset: int
    """Among all bytes of all tensors."""

    @property
    def num_words(self) -> int:
        return -(-self.num_bytes // 2)


def encode(parent: Path, child: Path, out: Path, *, threads: int = 1) -> DeltaInfo:
    """Write the delta that makes `child` of `parent`. Raises DeltaError when their tensors differ in name or form."""
    with open_state(parent) as (old, old_data), open_state(child) as (new, new_data):
        _require_same(old, new)
        pairs = list(zip(_chunks(old), _chunks(new), strict=True))

        def changes(pair: tuple[_Chunk, _Chunk], scratch: Scratch) -> Changes:
            before, after = pair
            words = _words(before, old_data, scratch, "parent"), _words(after, new_data, scratch, "child")
            return difference(*words, before.is_fp16, scratch)

        num_parameters = sum(prod(place.shape) for place in new)
        with _written(out) as file:
            writer = Writer(file)
            with closing(_in_order(changes, pairs, threads)) as found:
                for one in found:
                    writer.add(one)
            of_parent, of_child = _in_order(lambda path, _: state_hash(path), (parent, child), threads)
            num_bytes = writer.finish(of_parent, of_child, num_parameters)
    return DeltaInfo(num_bytes, writer.num_changed, num_parameters)


def apply(
    parent: Path,
    deltas: Sequence[Path],
    out: Path,
    *,
    expected: bytes,
    threads: int = 1,
    is_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Write the state file that the deltas lead to, one after the other; its state hash must be `expected`.

    DeltaError once it `is_wanted` no more, asked before each chunk.
    """
    headers = [read_header(delta) for delta in deltas]
    _require_chain(headers, expected)
    ends = [verified_bytes(delta) for delta in deltas]
    with open_state(parent) as (places, data), ExitStack() as stack:
        num_parameters = sum(prod(place.shape) for place in places)
        if any(header.num_parameters != num_parameters for header in headers):
            raise BadRecord("a delta is for a state of another size; fetch the one that belongs to this version")
        chunks = list(_chunks(places))
        num_words = [chunk.num_words for chunk in chunks]
        changes = [
            stack.enter_context(closing(read_changes(delta, num_words, end)))
            for delta, end in zip(deltas, ends, strict=True)
        ]

        def write_child(item: tuple[_Chunk, *tuple[Changes, ...]], scratch: Scratch) -> None:
            chunk, *steps = item
            if not is_wanted():
                raise DeltaError("nobody wants this state any more")
            words = _words(chunk, data, scratch, "child")
            for step in steps:
                patch(words, step, chunk.is_fp16, scratch)
            content = words.view(np.uint8)[: chunk.num_bytes].data
            _write_at(file.fileno(), content, len(head) + chunk.offset)

        head = _head(places)
        with _written(out) as file:
            _write_at(file.fileno(), memoryview(head), 0)
            with closing(_in_order(write_child, zip(chunks, *changes, strict=True), threads)) as done:
                deque(done, maxlen=0)
            if state_hash(Path(file.name)) != expected:
                raise BadRecord(_wrong_result(parent, headers[0]))


# -- checks ---------------------------------------------------------------------------------------------------------


def _require_same(old: Sequence[TensorPlace], new: Sequence[TensorPlace]) -> None:
    before, after = ({place.name: (place.dtype, place.shape) for place in places} for places in (old, new))
    added, removed = sorted(after.keys() - before.keys()), sorted(before.keys() - after.keys())
    if added or removed:
        raise DeltaError(
            f"the states have other tensors: {len(added)} added, {len(removed)} removed, such as "
            f"{(added or removed)[0]!r}; publish an anchor"
        )
    for name, (dtype, shape) in after.items():
        if before[name] != (dtype, shape):
            was, is_now = (f"{kind} {list(form)}" for kind, form in (before[name], (dtype, shape)))
            raise DeltaError(f"tensor {name!r} was {was} and is {is_now}; publish an anchor")


def _require_chain(headers: Sequence[Header], expected: bytes) -> None:
    assert headers, "there is nothing to apply"
    if any(first.child != second.parent for first, second in pairwise(headers)):
        raise BadRecord("the deltas don't follow each other; fetch those that lead to this version")
    if headers[-1].child != expected:
        raise BadRecord(
            f"the delta leads to state {headers[-1].child.hex()[:16]}, not to {expected.hex()[:16]}; "
            "fetch the one that belongs to this version"
        )


def _wrong_result(parent: Path, header: Header) -> str:
    if state_hash(parent) != header.parent:
        return f"the delta starts from state {header.parent.hex()[:16]}, which is not the one given; fetch an anchor"
    return "the delta gives another state than it says; fetch it from another peer"


# -- states ---------------------------------------------------------------------------------------------------------


def _chunks(places: Sequence[TensorPlace]) -> Iterator[_Chunk]:
    """Cut so that all but the last of a type are full, wherever tensors end."""
    offset = 0
    for is_fp16, group in groupby(places, lambda place: place.dtype == "F16"):
        pieces: list[tuple[int, int]] = []
        left = 2 * CHUNK_WORDS
        for place in group:
            begin = place.begin
            while begin < place.end:
                end = min(place.end, begin + left)
                pieces.append((begin, end))
                begin, left = end, left - (end - begin)
                if not left:
                    yield _Chunk(tuple(pieces), is_fp16, 2 * CHUNK_WORDS, offset)
                    pieces, left, offset = [], 2 * CHUNK_WORDS, offset + 2 * CHUNK_WORDS
        if pieces:
            yield _Chunk(tuple(pieces), is_fp16, 2 * CHUNK_WORDS - left, offset)
            offset += 2 * CHUNK_WORDS - left


def _words(chunk: _Chunk, data: mmap, scratch: Scratch, name: str) -> np.ndarray:
    """A copy of the chunk's bytes, as little-endian words."""
    content = scratch.array(name, 2 * chunk.num_words, np.uint8)
    content[-1:] = 0  # where a last byte has no other half
    filled = 0
    for begin, end in chunk.pieces:
        content[filled : filled + end - begin] = np.frombuffer(data, np.uint8, end - begin, begin)
        filled += end - begin
    return content.view("<u2")


def _head(places: Sequence[TensorPlace]) -> bytes:
    """What precedes the tensors' bytes in a state file, as `models.state.write_payloads` writes it."""
    tree: dict[str, object] = {}
    begin = 0
    for place in places:
        end = begin + place.end - place.begin
        tree[place.name] = {"dtype": place.dtype, "shape": list(place.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


@contextmanager
def _written(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its place when the block succeeds, and goes when it doesn't."""
    staged = path.with_name(f".{path.name}.{os.getpid()}.staged")
    try:
        with staged.open("w+b") as file:
            yield file
        staged.replace(path)
    except OSError as error:
        raise StoreError(f"can't write {path}: {error.strerror or error}; free some disk space") from error
    finally:
        staged.unlink(missing_ok=True)


def _write_at(descriptor: int, content: memoryview, offset: int) -> None:
    while len(content):
        num_bytes = os.pwrite(descriptor, content, offset)
        content, offset = content[num_bytes:], offset + num_bytes


def _in_order(work: Callable[[T, Scratch], R], items: Iterable[T], threads: int) -> Generator[R]:
    """`map` by several threads, each with a scratch of its own; results come in order, and few wait.

    Enough wait for the threads to be busy while ours packs or unpacks a frame.
    """
    idle = [Scratch() for _ in range(threads)]

    def one(item: T) -> R:
        scratch = idle.pop()
        try:
            return work(item, scratch)
        finally:
            idle.append(scratch)

    if threads == 1:
        yield from map(one, items)
        return
    waiting: deque[Future[R]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            waiting.append(pool.submit(one, item))
            if len(waiting) > _WAITING_PER_THREAD * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
