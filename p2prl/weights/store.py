"""Versions on disk: state files by state hash, contents (deltas, anchors on their way) by content hash.

In: two folders of the cache, files that were written beside them. Out: whole files under their names; what is held.

Invariants: a name is given last, to a file that is on the disk to its end, so what has a name is whole whatever killed
the process or the machine; what was left half-way is swept at the start; what rots later is found by `verify` and by
whoever uses it. Blocking: call it in a thread where files are large. What is held may be read from another thread.
"""

import os
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import msgspec
from blake3 import blake3

from p2prl.errors import PeerError, StoreError
from p2prl.models.state import state_hash
from p2prl.records import Hash
from p2prl.weights.chain import Garbage, Held
from p2prl.weights.contents import name_of_file
from p2prl.weights.partial import content_path as path_of
from p2prl.weights.partial import left_over, part_bytes, part_paths, parts_in

STAGED = ".staged"
_NAME_CHARS = 64


class Fault(msgspec.Struct, frozen=True):
    """A file that is not what its name says."""

    path: str
    why: str


def staged_path(folder: Path, kind: str) -> Path:
    """Where a file of this process is written before it has its name; `kind` tells two of them apart."""
    return folder / f".{kind}.{os.getpid()}{STAGED}"


def commit(staged: Path, target: Path) -> None:
    """The file is on the disk, then it has its name, then the name is on the disk. OSErrors are the caller's."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sync(staged)
    os.replace(staged, target)
    _sync(target.parent)


class WeightStore:
    """What one node holds. Call `open` first."""

    def __init__(self, states: Path, blobs: Path) -> None:
        self._states, self._blobs = states, blobs
        self._state_bytes: dict[Hash, int] = {}
        self._content_bytes: dict[Hash, int] = {}
        self._part_bytes: dict[Hash, int] = {}
        self._numbers = count()

    def open(self) -> None:
        """Sweep what was left half-way, then see what is there."""
        self.sweep()
        self.look()

    def look(self) -> None:
        """See what is there and change nothing, as beside another process that writes here."""
        with self._told("read"):
            self._state_bytes = dict(_named(self._states))
            self._content_bytes = dict(_named(self._blobs))
            self._part_bytes = dict(parts_in(self._blobs))

    def sweep(self, spare_pid: int | None = None) -> None:
        """Remove what a process left that died while it wrote; all of it, but for that of one process.

        What had its name already, and nobody was told of, is held from now on: so it is collected in its time.
        """
        ours = f".{spare_pid}{STAGED}"
        with self._told("tidy"):
            for folder in (self._states, self._blobs):
                for left in [*folder.glob(f".*{STAGED}"), *folder.glob(f"*/.*{STAGED}")]:
                    if not left.name.endswith(ours):
                        left.unlink(missing_ok=True)
            for table, folder in ((self._state_bytes, self._states), (self._content_bytes, self._blobs)):
                for name, num_bytes in _named(folder):
                    table.setdefault(name, num_bytes)

    @property
    def held(self) -> Held:
        return Held(dict(self._state_bytes), dict(self._content_bytes), dict(self._part_bytes))

    def has_state(self, name: Hash) -> bool:
        return name in self._state_bytes

    def has_content(self, name: Hash) -> bool:
        return name in self._content_bytes

    def state_path(self, name: Hash) -> Path:
        return path_of(self._states, name)

    def content_path(self, name: Hash) -> Path:
        return path_of(self._blobs, name)

    def staged_state(self) -> Path:
        """A new place to write a state before it is verified."""
        return staged_path(self._states, f"state{next(self._numbers)}")

    def add_state(self, staged: Path, name: Hash) -> None:
        """A verified state gets its name; `staged` is gone afterwards, also when that fails."""
        try:
            with self._told("keep"):
                commit(staged, self.state_path(name))
        finally:
            staged.unlink(missing_ok=True)
        self.found_state(name)

    def found_state(self, name: Hash) -> None:
        """Another process put it there; nothing happens when it is not."""
        _note(self._state_bytes, name, self.state_path(name))

    def found_content(self, name: Hash) -> None:
        _note(self._content_bytes, name, self.content_path(name))
        if name in self._content_bytes:
            self._part_bytes.pop(name, None)

    def found_part(self, name: Hash) -> None:
        """What came of it until now stays until it is fetched on."""
        self._part_bytes.pop(name, None)
        if name not in self._content_bytes and (num_bytes := part_bytes(self._blobs, name)):
            self._part_bytes[name] = num_bytes

    def forget_state(self, name: Hash) -> None:
        """Not held from now on; its file stays for those who read it, until another takes its place."""
        self._state_bytes.pop(name, None)

    def drop_state(self, name: Hash) -> None:
        """Not held from now on, whatever comes of the file."""
        self._state_bytes.pop(name, None)
        self._unlink([self.state_path(name)])

    def drop_content(self, name: Hash) -> None:
        self._content_bytes.pop(name, None)
        self._unlink([self.content_path(name)])

    def drop_parts(self, but: AbstractSet[Hash]) -> None:
        """What is left of transfers that did not end, of other contents than these."""
        names = {name.hex() for name in but}
        self._part_bytes = {name: num_bytes for name, num_bytes in self._part_bytes.items() if name in but}
        self._unlink(left for left in left_over(self._blobs) if left.name[1 : 1 + _NAME_CHARS] not in names)

    def collect(self, garbage: Garbage) -> int:
        """Drop it; the bytes that this freed."""
        held = self.held
        for name in garbage.states:
            self._state_bytes.pop(name, None)
        for name in garbage.contents:
            self._content_bytes.pop(name, None)
        for name in garbage.parts:
            self._part_bytes.pop(name, None)
        parts = [path for name in garbage.parts for path in part_paths(self._blobs, name)]
        self._unlink([*map(self.state_path, garbage.states), *map(self.content_path, garbage.contents), *parts])
        kinds = ((held.states, garbage.states), (held.contents, garbage.contents), (held.parts, garbage.parts))
        return sum(table.get(name, 0) for table, names in kinds for name in names)

    def verify(self) -> tuple[Fault, ...]:
        """Read all of it; what is not what its name says is dropped and told of."""
        held, faults = self.held, []
        for name in held.states:
            if why := wrong_state(self.state_path(name), name):
                self.drop_state(name)
                faults.append(Fault(str(self.state_path(name)), why))
        for name in held.contents:
            if why := wrong_content(self.content_path(name), name):
                self.drop_content(name)
                faults.append(Fault(str(self.content_path(name)), why))
        return tuple(faults)

    def _unlink(self, paths: Iterable[Path]) -> None:
        """All that can be; then StoreError for the first that can't."""
        failure: OSError | None = None
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                failure = failure or error
        with self._told("drop"):
            if failure is not None:
                raise failure

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or error
            raise StoreError(
                f"can't {what} weights in {self._states.parent}: {why}; free some space, or give this user the folder"
            ) from error


def wrong_state(path: Path, name: Hash) -> str:
    """Why the file is not the state of this hash, "" when it is."""
    try:
        return "" if state_hash(path) == name else "its hash is another"
    except (PeerError, StoreError) as error:
        return str(error)


def wrong_content(path: Path, name: Hash) -> str:
    """The same of a content; releases before named one by the hash of the whole file."""
    try:
        if name_of_file(path) == name or blake3(max_threads=blake3.AUTO).update_mmap(path).digest() == name:
            return ""
        return "its hash is another"
    except OSError as error:
        return str(error.strerror or error)


def _named(folder: Path) -> Iterable[tuple[Hash, int]]:
    for path in folder.glob("??/*"):
        if len(path.name) == _NAME_CHARS and path.name.startswith(path.parent.name):
            try:
                name = bytes.fromhex(path.name)
            except ValueError:  # somebody else's file
                continue
            try:
                num_bytes = path.stat().st_size
            except FileNotFoundError:  # collected just now
                continue
            yield name, num_bytes


def _note(table: dict[Hash, int], name: Hash, path: Path) -> None:
    try:
        table[name] = path.stat().st_size
    except OSError:
        table.pop(name, None)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
