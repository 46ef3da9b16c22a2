"""From new weights to the files of their version: the state, the deltas that lead to it, how a manifest names them.

In: what writes the state, the states that deltas are wanted from. Out: files under their names, `Published`. No torch.

Invariants: the state has its name before any content that leads to it; what fails or does not pay leaves no file; there
is always one way or more, the parent's delta first, else the whole state.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from p2prl.errors import BadRecord, DeltaError, StoreError
from p2prl.records import Content, DeltaBase, Hash
from p2prl.weights import delta
from p2prl.weights.chain import ANCHOR, DELTA
from p2prl.weights.contents import content_of
from p2prl.weights.store import commit, path_of, staged_path

DELTA_SHARE = 0.9  # of the state's bytes: what is not smaller is no delta worth having


class Folders(msgspec.Struct, frozen=True):
    states: Path
    blobs: Path


class Published(msgspec.Struct, frozen=True):
    """`path` is the state file; `notes` say which deltas could not be made."""

    path: Path
    hash: Hash
    contents: tuple[Content, ...]
    metrics: dict[str, float]
    notes: tuple[str, ...]


def publish(
    write: Callable[[Path], Hash], folders: Folders, bases: Sequence[DeltaBase], anchor: bool, threads: int = 1
) -> Published:
    """`write` makes the state file at a path and returns its state hash."""
    staged, kept = staged_path(folders.states, "version"), _Kept()
    try:
        folders.states.mkdir(mode=0o700, parents=True, exist_ok=True)
        name = write(staged)
        path = path_of(folders.states, name)
        kept.commit(staged, path)
    except OSError as error:
        raise _no_store(folders.states, error) from error
    finally:
        staged.unlink(missing_ok=True)
    try:
        contents, metrics, notes = _make_deltas(bases, path, folders.blobs, kept, threads)
        if anchor or not contents:
            contents.append(content_of(path, ANCHOR, None))
    except BaseException as error:
        kept.drop()
        if isinstance(error, OSError):
            raise _no_store(folders.states, error) from error
        raise
    return Published(path, name, tuple(contents), metrics, tuple(notes))


class _Kept:
    """Files that got their names here and had none before: nobody else's."""

    def __init__(self) -> None:
        self._paths: list[Path] = []

    def commit(self, staged: Path, path: Path) -> None:
        self._paths += [] if path.exists() else [path]
        commit(staged, path)

    def drop(self) -> None:
        for path in self._paths:
            with suppress(OSError):  # what made us drop it says why
                path.unlink(missing_ok=True)


def _make_deltas(
    bases: Sequence[DeltaBase], child: Path, blobs: Path, kept: _Kept, threads: int
) -> tuple[list[Content], dict[str, float], list[str]]:
    """One from each base, where it can be made and pays; metrics of the parent's; why others could not be made."""
    began, metrics, notes, contents, hashes = time.perf_counter(), {}, [], [], set[Hash]()
    for number, base in enumerate(bases):
        if base.version.hash in hashes:
            continue  # where versions change nothing: the very same delta
        hashes.add(base.version.hash)
        try:
            made, info = _make_delta(base, child, blobs, kept, threads)
        except (DeltaError, BadRecord) as error:
            notes.append(f"no delta from {base.version}: {error}")
            continue
        except StoreError:
            if Path(base.path).is_file():
                raise
            notes.append(f"no delta from {base.version}: its weights are gone")  # the cache may go at any time
            continue
        if number == 0:
            share = info.num_changed / max(1, info.num_parameters)
            metrics = {"delta_bytes": float(info.num_bytes), "delta_fraction": share}
        contents += [made] if made is not None else []
    return contents, metrics | {"encode_s": time.perf_counter() - began}, notes


def _make_delta(
    base: DeltaBase, child: Path, blobs: Path, kept: _Kept, threads: int
) -> tuple[Content | None, delta.DeltaInfo]:
    """The delta under its name; None when it is hardly smaller than the state."""
    staged = staged_path(blobs, "delta")
    try:
        blobs.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = delta.encode(Path(base.path), child, staged, threads=threads)
        if delta.read_header(staged).parent != base.version.hash:
            raise BadRecord("its weights on this disk are corrupt; what is made of them would fit nobody's")
        if info.num_bytes > DELTA_SHARE * child.stat().st_size:
            return None, info
        content = content_of(staged, DELTA, base.version)
        kept.commit(staged, path_of(blobs, content.content_hash))
        return content, info
    except OSError as error:
        raise _no_store(blobs, error) from error
    finally:
        staged.unlink(missing_ok=True)


def _no_store(folder: Path, error: OSError) -> StoreError:
    return StoreError(f"can't store the new version in {folder}: {error.strerror or error}; free some space")
