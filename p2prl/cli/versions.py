"""The versions of a home, read without its daemon, running or not.

In: a home. Out: the recipe that it ran last, the chain of its head from step 1, where a version's state lies.

Invariants: nothing is written, the store is opened read-only; a manifest counts only as what it hashes to and what its
signature proves.
"""

import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from p2prl import codec
from p2prl.buffer.store import HEAD, mark
from p2prl.errors import BadRecord, ConfigError, PeerError, StoreError, WrongSwarm
from p2prl.paths import Home
from p2prl.recipe import Recipe, parse
from p2prl.records import Hash, Manifest, Version
from p2prl.weights import chain
from p2prl.weights.partial import content_path

_NAME = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class Versions:
    home: Home  # of the recipe's swarm
    recipe: Recipe
    recipe_text: str
    line: tuple[Manifest, ...]  # the head's chain, oldest first

    @property
    def base(self) -> Version:
        return Version(0, 0, bytes.fromhex(self.recipe.model.hash))

    @property
    def head(self) -> Version:
        return self.line[-1].version if self.line else self.base

    def version(self, step: int) -> Version:
        """ConfigError when the chain has no such step."""
        if step > self.head.step:
            raise ConfigError(f"there is no version {step}: the newest here is {self.head.step}")
        return self.line[step - 1].version if step else self.base

    def beside(self) -> tuple[Manifest, ...]:
        """Not on the chain and not old: what the node was about to get, or others still follow."""
        if not self.home.database.is_file():
            return ()
        floor = self.head.step - self.recipe.learner.max_age
        on_line = {manifest.version for manifest in self.line}
        found = _read_from(self.home.database, self.recipe.swarm_id, floor)
        return tuple(manifest for manifest in found if manifest.version not in on_line)

    def num_unread(self) -> int:
        """Manifests of this swarm that only another release can read."""
        if not self.home.database.is_file():
            return 0
        with _reading(self.home.database) as connection:
            sealed = connection.execute("SELECT sealed FROM manifests")
            return sum(_is_unread(data, self.recipe.swarm_id) for (data,) in sealed)

    def state_of(self, version: Version, folder: Path, base: Callable[[], Path]) -> Path:
        """Its state file, in `folder`, so that no running node drops it; made of deltas where it isn't here.

        `base` prepares the model's. StoreError when what it is made of isn't here either, with the versions that are.
        """
        if version.step == 0:
            return base()
        kept = _keep(content_path(self.home.states, version.hash), folder)
        if kept is not None:
            return kept
        way = self._way(version, self._files(self.home.states), self._files(self.home.blobs))
        if way is None:
            raise StoreError(
                f"the weights of version {version.step} are not on this disk; there are: {_ranges(self.steps_here())}"
            )
        from p2prl.weights import delta  # numpy: only where it is needed

        assert way.base is not None, "deltas have a base"
        parent = base() if way.base.step == 0 else _keep(content_path(self.home.states, way.base.hash), folder)
        paths = [content_path(self.home.blobs, each.content.content_hash) for each in way.ways]
        contents = [kept for path in paths if (kept := _keep(path, folder)) is not None]
        if parent is None or len(contents) < len(paths):
            raise StoreError(f"what version {version.step} is made of is gone: the node dropped it just now; try again")
        try:
            for end in range(delta.MAX_MERGED, len(contents) + delta.MAX_MERGED, delta.MAX_MERGED):
                made, ways = folder / f"state {end}", way.ways[:end]
                part = contents[end - delta.MAX_MERGED : end]
                delta.apply(parent, part, made, expected=ways[-1].version.hash)
                parent = made
        except (BadRecord, OSError) as error:
            raise StoreError(
                f"version {version.step} can't be made from the deltas here: {error}. See: p2prl weights verify"
            ) from error
        return parent

    def steps_here(self) -> list[int]:
        """Those whose weights are here or can be made of what is here; version 0 is always to be had."""
        states, contents = self._files(self.home.states), self._files(self.home.blobs)
        found = [0]
        for manifest in self.line:
            version = manifest.version
            if version.hash in states or self._way(version, states, contents) is not None:
                found.append(version.step)
                states.add(version.hash)  # so that the search for its children ends here
        return found

    def _way(self, version: Version, states: set[Hash], contents: set[Hash]) -> chain.Path | None:
        """How it is made of states and deltas that are here."""
        return chain.cheapest(version, self._ways, states | {self.base.hash}, contents, self._deltas - contents)

    @cached_property
    def _ways(self) -> dict[Version, tuple[chain.Way, ...]]:
        found = chain.ways_of(self.line)
        return {version: tuple(way for way in ways if way.content.base) for version, ways in found.items()}

    @cached_property
    def _deltas(self) -> set[Hash]:
        return {way.content.content_hash for ways in self._ways.values() for way in ways}

    def _files(self, folder: Path) -> set[Hash]:
        return {bytes.fromhex(path.name) for path in folder.glob("??/*") if _NAME.fullmatch(path.name)}


def read_versions(home: Home) -> Versions:
    """Raises ConfigError for a home that never ran, StoreError for what can't be read."""
    last = home.state / "last-recipe.toml"
    try:
        text = last.read_text("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"no node ever ran in {home.state}: there are no versions. Begin with: p2prl run") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the recipe {last}: {error}") from None
    recipe = parse(text, str(last))
    line = tuple(_read_line(home.database, recipe.swarm_id)) if home.database.is_file() else ()
    return Versions(home.of(recipe.swarm_id), recipe, text, tuple(reversed(line)))


def _keep(path: Path, folder: Path) -> Path | None:
    """A file under a second name, or a copy where that isn't possible; None when it isn't here."""
    kept = folder / path.name
    try:
        try:
            os.link(path, kept)
        except FileExistsError:
            return kept
        except OSError:  # another disk, or one without links
            shutil.copyfile(path, kept)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"can't copy {path} to {folder}: {error.strerror}; free some space") from error
    return kept


def _ranges(steps: Sequence[int]) -> str:
    """1, 2, 3, 7 as "1-3, 7"."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(f"{part[0]}" if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


@contextmanager
def _reading(database: Path) -> Iterator[sqlite3.Connection]:
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=5.0)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise StoreError(f"the store {database} can't be read: {error}; is it another user's, or corrupt?") from None


def _read_from(database: Path, swarm: bytes, step: int) -> Iterator[Manifest]:
    """From this step on, of any chain; what can't be used is passed over, as the daemon does."""
    with _reading(database) as connection:
        for (data,) in connection.execute("SELECT sealed FROM manifests WHERE step >= ?", (step,)):
            try:
                sealed = codec.unseal(data, Manifest, swarm, owner=lambda manifest: manifest.learner)
            except PeerError:
                continue
            yield sealed.record


def _is_unread(data: bytes, swarm: bytes) -> bool:
    try:
        codec.unseal(data, Manifest, swarm)
    except WrongSwarm:
        return False
    except PeerError:
        return True
    return False


def _read_line(database: Path, swarm: bytes) -> Iterator[Manifest]:
    """From the head down."""
    try:
        with _reading(database) as connection:
            found = connection.execute(HEAD, (mark("head", swarm),)).fetchone()
            manifest_id = bytes(found[0]) if found else codec.ZERO_HASH
            while manifest_id != codec.ZERO_HASH:
                row = connection.execute("SELECT sealed FROM manifests WHERE id = ?", (manifest_id,)).fetchone()
                if row is None:
                    raise StoreError(f"the store {database} lacks a version of its chain; start the node to fetch it")
                sealed = codec.unseal(row[0], Manifest, swarm, owner=lambda manifest: manifest.learner)
                if sealed.id != manifest_id:
                    raise StoreError(f"the store {database} has a version under a wrong id; check the disk")
                yield sealed.record
                manifest_id = sealed.record.parent_id
    except PeerError as error:
        raise StoreError(
            f"the store {database} has a version that can't be used here ({error}); was it made by another p2prl?"
        ) from None
