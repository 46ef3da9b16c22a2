"""From a state and deltas to the state of a version, in passes of bounded work; whose fault it is when that fails.

In: a state that is here, the ways that lead on from it, their contents in the store. Out: a state in the store, verified.

Invariants: a state gets its name only when its hash is the version's, and a state between two passes goes when it was
made only to go on from it; a file of ours that rotted is nobody's fault, and is dropped; else the first way that gives a
wrong result is refused. Blocking: call it in a thread.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from p2prl.errors import BadRecord, StoreError, Unreachable
from p2prl.records import Hash, Version
from p2prl.weights import delta
from p2prl.weights.chain import Way
from p2prl.weights.store import WeightStore, wrong_content, wrong_state

MAX_REWRITES = 4  # times that one pass changes each weight: a delta of few bytes may change them all


class Applier:
    """`refuse` bars a way and raises BadRecord; `made` hears of each state whose file is a new one."""

    def __init__(
        self,
        files: WeightStore,
        base: Version,
        base_path: Path,
        refuse: Callable[[Way, str], NoReturn],
        made: Callable[[Hash], None],
    ) -> None:
        self._files, self._base, self._base_path = files, base, base_path
        self._refuse, self._made = refuse, made

    def apply(self, base: Version, ways: Sequence[Way], is_wanted: Callable[[], bool]) -> None:
        """Raises PeerError or StoreError; a pass that nobody wants any more stops."""

        def apply(base: Version, ways: Sequence[Way]) -> None:
            try:
                self._merge(base, ways, is_wanted)
            except (BadRecord, StoreError) as error:
                self._find_fault(base, ways, error, is_wanted)

        self._go_on(base, self._passes(ways), apply)

    def _state_path(self, version: Version) -> Path:
        return self._base_path if version.hash == self._base.hash else self._files.state_path(version.hash)

    def _merge(self, base: Version, ways: Sequence[Way], is_wanted: Callable[[], bool]) -> None:
        """All deltas in one pass."""
        target, staged = ways[-1].version, self._files.staged_state()
        paths = [self._files.content_path(way.content.content_hash) for way in ways]
        try:
            delta.apply(self._state_path(base), paths, staged, expected=target.hash, is_wanted=is_wanted)
            self._made(target.hash)
            self._files.add_state(staged, target.hash)
        except OSError as error:
            raise StoreError(f"can't write version {target}: {error.strerror or error}; free some space") from error
        finally:
            staged.unlink(missing_ok=True)

    def _go_on(self, base: Version, passes: Iterable[Sequence[Way]], apply: Callable[..., None]) -> None:
        """One pass after the other; a state that was made only to go on from it goes then."""
        is_between = False
        for ways in passes:
            target = ways[-1].version
            was_here = self._files.has_state(target.hash)
            apply(base, ways)
            if base.hash != target.hash:
                if is_between:
                    self._files.drop_state(base.hash)
                is_between = not was_here
            base = target

    def _passes(self, ways: Sequence[Way]) -> Iterable[Sequence[Way]]:
        begin, rewrites = 0, 0.0
        for end, way in enumerate(ways):
            its_rewrites = self._rewrites(way)
            if end > begin and (rewrites + its_rewrites > MAX_REWRITES or end - begin == delta.MAX_MERGED):
                yield ways[begin:end]
                begin, rewrites = end, 0.0
            rewrites += its_rewrites
        yield ways[begin:]

    def _rewrites(self, way: Way) -> float:
        """How often its delta changes each weight, by its own word, which `delta.apply` holds it to."""
        try:
            header = delta.read_header(self._files.content_path(way.content.content_hash))
        except (BadRecord, StoreError):
            return 1.0  # whose fault it is, is found when it is applied
        return header.num_changed / max(1, header.num_parameters)

    def _find_fault(
        self, base: Version, ways: Sequence[Way], error: BadRecord | StoreError, is_wanted: Callable[[], bool]
    ) -> NoReturn:
        """Raises what it was: a file of ours that is gone or rotted, our disk, or the delta that gives a wrong result."""

        def apply(base: Version, ways: Sequence[Way]) -> None:
            try:
                self._merge(base, ways, is_wanted)
            except BadRecord as why:
                self._refuse(ways[0], str(why))

        rotted = self._drop_rotted(base, ways)
        if rotted:
            raise Unreachable(f"{rotted} was lost or rotted here, and is got again")
        if isinstance(error, BadRecord):
            self._go_on(base, ([way] for way in ways), apply)
        raise error

    def _drop_rotted(self, base: Version, ways: Sequence[Way]) -> str:
        """What of ours is not what it should be; it is dropped."""
        if wrong_state(self._state_path(base), base.hash):
            if base.hash == self._base.hash:
                raise StoreError(f"the model {self._base_path} changed; delete it and start again")
            self._files.drop_state(base.hash)
            return f"the state of version {base}"
        for way in ways:
            name = way.content.content_hash
            if wrong_content(self._files.content_path(name), name):
                self._files.drop_content(name)
                return f"a delta to version {way.version}"
        return ""
