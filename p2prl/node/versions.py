"""Gets the weights of a version the cheapest way, serves what is here, collects what is no longer needed.

In: manifests, contents of any holder. Out: state files, each verified before it has its name; the loop that follows a
head adopts it then.

Invariants: a state counts only when its hash is the version's; who published a content that is whole and gives a wrong
result is blamed, and that way is never tried again; a file of ours that rotted is nobody's fault. When a path fails
the next cheapest is tried. A long path is applied in passes of bounded work, and whoever is cut short goes on after the
last one; a pass that nobody waits for stops. Large files are read and written in threads, and no torch is needed for it.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Event, Lock
from typing import NoReturn

from blake3 import blake3

from p2prl.errors import BadRecord, PeerError, StoreError, Unreachable
from p2prl.node.state import NodeState
from p2prl.node.supervisor import end_tasks
from p2prl.records import Hash, Manifest, StepReport, Version
from p2prl.weights import chain, delta
from p2prl.weights.chain import Way
from p2prl.weights.serve import PieceServer
from p2prl.weights.store import content_digest, wrong_content, wrong_state
from p2prl.weights.transfer import Options, Surroundings, fetch

Holders = Callable[[], Sequence[str]]

MAX_PATHS = 8  # tried for one version before we wait for news
MAX_FETCHES = 4  # contents at once
MAX_BAD = 4096
MAX_REWRITES = 4  # times that one pass changes each weight: a delta of few bytes may change them all


class Versions:
    def __init__(self, state: NodeState) -> None:
        self._state, self._files = state, state.weights
        self._bad: OrderedDict[chain.WayId, None] = OrderedDict()  # ways that gave a wrong result
        self._in_work: frozenset[Hash] = frozenset()  # contents
        self._anchors: dict[Hash, Hash | None] = {}  # content hash -> the state here whose file it is, once compared
        self._comparing = Lock()
        self.is_applying = False
        server = PieceServer(state.transport, state.clock, self._find, spares=lambda: state.leads)
        self._surroundings = Surroundings(clock=state.clock, blame=state.blame, partials=server.partials)

    # -- to get one -------------------------------------------------------------------------------------------------

    def plan(self, target: Version, without: frozenset[Hash] = frozenset()) -> chain.Path | None:
        """The cheapest path from what is here; contents in `without` are not used."""
        held = self._files.held
        ways = chain.ways_of(self._state.manifests.values())
        states = {*held.states, self._state.base.hash}
        return chain.cheapest(target, ways, states, held.contents.keys(), without, self._bad.keys())

    async def obtain(self, target: Version, holders: Holders) -> None:
        """Its state is here when this returns. Raises the last PeerError when no path led there."""
        failed: set[Hash] = set()  # contents that nobody gave this time
        failures: list[PeerError] = []
        while len(failures) < MAX_PATHS and (path := self.plan(target, frozenset(failed))) is not None:
            if failures:
                self._state.blame(failures[-1])  # the last one is our caller's
            try:
                await self._walk(path, holders, failed)
                return
            except PeerError as error:
                self._state.measures.not_applied(error.code)
                failures.append(error)
        raise failures[-1] if failures else Unreachable(f"no way leads to version {target} from what is here")

    async def _walk(self, path: chain.Path, holders: Holders, failed: set[Hash]) -> None:
        ways, base = path.ways, path.base
        self._in_work = frozenset(way.content.content_hash for way in ways)
        try:
            with self._state.reading(*([base] if base else []), *(way.version for way in ways)):
                await self._fetch(ways, holders, failed)
                self.is_applying = True
                if ways and base is None:
                    await asyncio.to_thread(self._take_anchor, ways[0])
                    base, ways = ways[0].version, ways[1:]
                if ways:
                    assert base is not None, "a path begins at a state or an anchor"
                    await self._apply(base, ways)
        finally:
            for name in self._in_work:  # also what came whole while we were cancelled
                self._files.found_content(name)
            self._in_work, self.is_applying = frozenset(), False

    async def _fetch(self, ways: Sequence[Way], holders: Holders, failed: set[Hash]) -> None:
        state, gate = self._state, asyncio.Semaphore(MAX_FETCHES)

        async def fetch_one(way: Way) -> None:
            name = way.content.content_hash
            seed = int.from_bytes(blake3(state.me.encode() + name).digest(length=8))  # one seed, one simulation
            try:
                async with gate:
                    options = Options(seed=seed)
                    await fetch(
                        state.transport,
                        way.content,
                        holders,
                        state.home.blobs,
                        options=options,
                        node=self._surroundings,
                    )
                self._files.found_content(name)
            except PeerError as error:
                failed.add(name)
                if isinstance(error, BadRecord) and not error.peer:  # no holder's fault: its pieces do not make it
                    self._refuse(way, str(error))
                raise

        missing = {  # steps that change nothing share a content
            way.content.content_hash: way for way in ways if not self._files.has_content(way.content.content_hash)
        }
        tasks = [asyncio.create_task(fetch_one(way), name=f"fetch {way.version}") for way in missing.values()]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_tasks(tasks)

    # -- in threads -------------------------------------------------------------------------------------------------

    def _take_anchor(self, way: Way) -> None:
        """The content is the state file, once it has the right hash."""
        content, path = way.content, self._files.content_path(way.content.content_hash)
        why = wrong_state(path, way.version.hash)
        if why and wrong_content(path, content.content_hash):
            self._files.drop_content(content.content_hash)
            raise Unreachable(f"the anchor of version {way.version} was lost or rotted here, and is got again")
        if why:
            self._refuse(way, why)
        self._files.add_state(path, way.version.hash)
        self._files.found_content(content.content_hash)  # gone from there
        self._anchors[content.content_hash] = way.version.hash

    def _merge(self, base: Version, ways: Sequence[Way], is_wanted: Callable[[], bool] = lambda: True) -> None:
        """All deltas in one pass."""
        target, staged = ways[-1].version, self._files.staged_state()
        paths = [self._files.content_path(way.content.content_hash) for way in ways]
        try:
            delta.apply(self._state.state_path(base), paths, staged, expected=target.hash, is_wanted=is_wanted)
            self._keep_anchors(lambda _, state: state != target.hash)  # its file may be another than the one compared
            self._files.add_state(staged, target.hash)
        except OSError as error:
            raise StoreError(f"can't write version {target}: {error.strerror or error}; free some space") from error
        finally:
            staged.unlink(missing_ok=True)

    async def _apply(self, base: Version, ways: Sequence[Way]) -> None:
        began, is_over = self._state.now(), Event()
        try:
            await asyncio.to_thread(self._apply_all, base, ways, lambda: not is_over.is_set())
        finally:
            is_over.set()
        self._state.measures.applied(self._state.now() - began)

    def _apply_all(self, base: Version, ways: Sequence[Way], is_wanted: Callable[[], bool]) -> None:
        def apply(base: Version, ways: Sequence[Way]) -> None:
            try:
                self._merge(base, ways, is_wanted)
            except (BadRecord, StoreError) as error:
                self._find_fault(base, ways, error, is_wanted)

        self._go_on(base, self._passes(ways), apply)

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
        if wrong_state(self._state.state_path(base), base.hash):
            if base.hash == self._state.base.hash:
                raise StoreError(f"the model {self._state.base_path} changed; delete it and start again")
            self._files.drop_state(base.hash)
            return f"the state of version {base}"
        for way in ways:
            name = way.content.content_hash
            if wrong_content(self._files.content_path(name), name):
                self._files.drop_content(name)
                return f"a delta to version {way.version}"
        return ""

    def _refuse(self, way: Way, why: str) -> NoReturn:
        """It is what its publisher named, and wrong. Raises BadRecord."""
        self._bad[way.id] = None
        if len(self._bad) > MAX_BAD:
            self._bad.popitem(last=False)
        self._files.drop_content(way.content.content_hash)
        text = f"the {way.content.kind} of version {way.version} is wrong ({why[:120]})"
        raise BadRecord(text, peer=way.learner)

    # -- to serve ---------------------------------------------------------------------------------------------------

    def _find(self, content_hash: Hash) -> Path | None:
        """The whole file; an anchor is the state file, but only where that has the same bytes. Asked in threads."""
        if self._files.has_content(content_hash):
            return self._files.content_path(content_hash)
        if content_hash not in self._anchors:
            with self._comparing:
                self._compare(content_hash)
        state = self._anchors.get(content_hash)
        return self._files.state_path(state) if state is not None and self._files.has_state(state) else None

    def _keep_anchors(self, keep: Callable[[Hash, Hash | None], bool]) -> None:
        """Threads may add to them meanwhile; what is lost so is compared again."""
        self._anchors = {content: state for content, state in tuple(self._anchors.items()) if keep(content, state)}

    def _compare(self, content_hash: Hash) -> None:
        for manifest in tuple(self._state.manifests.values()):
            names = {content.content_hash for content in manifest.contents if content.kind == chain.ANCHOR}
            if content_hash in names and self._files.has_state(manifest.version.hash):
                path = self._files.state_path(manifest.version.hash)
                same = content_digest(path) == content_hash
                self._anchors[content_hash] = manifest.version.hash if same else None
                return

    # -- our own, and what goes -------------------------------------------------------------------------------------

    def published(self, report: StepReport) -> None:
        """Our learner put these files there."""
        self._files.found_state(report.version.hash)
        for content in report.contents:
            if content.kind == chain.ANCHOR:
                self._anchors[content.content_hash] = report.version.hash
            else:
                self._files.found_content(content.content_hash)

    def came_to_nothing(self, report: StepReport) -> None:
        """A step's result that nobody will follow, unless another has the very same."""
        known = self._state.manifests.values()
        if all(manifest.version.hash != report.version.hash for manifest in known):
            self._files.drop_state(report.version.hash)
        named = {content.content_hash for manifest in known for content in manifest.contents}
        for content in report.contents:
            if content.content_hash not in named:
                self._files.drop_content(content.content_hash)

    async def collect(self) -> None:
        """Drop what neither we nor those behind us need. Not while a version is got."""
        state, max_age = self._state, self._state.recipe.learner.max_age
        line, beside = [manifest for _, manifest in state.line()], self._beside()
        needs = chain.Needs(max_age, state.config.storage.cache, frozenset(state.in_use), self._in_work)
        garbage = chain.to_collect(line, self._files.held, needs, beside)
        named = {content.content_hash for manifest in (*line, *beside) for content in manifest.contents}
        self._keep_anchors(lambda content, _: content in named)
        await asyncio.to_thread(self._drop, garbage, beside)

    def _beside(self) -> list[Manifest]:
        """Not on our chain and not old: one may be the next head, or others still follow it."""
        state = self._state
        floor = state.head.step - state.recipe.learner.max_age
        manifests = ((manifest_id, m) for manifest_id, m in state.manifests.items() if m.version.step >= floor)
        return [m for manifest_id, m in manifests if not state.chain.is_on_chain(state.head_id, manifest_id)]

    def _drop(self, garbage: chain.Garbage, beside: Sequence[Manifest]) -> None:
        """What is on our chain is here, or was not needed: only what may be the next head is still on its way."""
        self._files.collect(garbage)
        self._files.drop_parts({content.content_hash for manifest in beside for content in manifest.contents})
