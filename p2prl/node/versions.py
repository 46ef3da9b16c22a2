"""Gets the weights of a version the cheapest way, gets again what rotted, collects what is no longer needed.

In: manifests, contents of any holder. Out: state files, each verified before it has its name; the loop that follows a
head adopts it then.

Invariants: a state counts only when its hash is the version's; who published a content that is whole and gives a wrong
result is blamed, and that way is never tried again. When a path fails the next cheapest is tried. What is on its way
counts by the bytes that are missing, so a slow node goes on with what it has half of. Whoever is cut short goes on after
the last pass; a pass that nobody waits for stops. Large files are read and written in threads, and no torch is needed.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Event
from typing import NoReturn

from blake3 import blake3

from p2prl.errors import BadRecord, PeerError, Unreachable
from p2prl.node.served import Served
from p2prl.node.state import NodeState
from p2prl.node.supervisor import end_tasks
from p2prl.records import Hash, Manifest, StepReport, Version
from p2prl.weights import chain
from p2prl.weights.apply import Applier
from p2prl.weights.chain import Way
from p2prl.weights.store import wrong_content, wrong_state
from p2prl.weights.transfer import Options, Surroundings, fetch

Holders = Callable[[], Sequence[str]]

MAX_PATHS = 8  # tried for one version before we wait for news
MAX_FETCHES = 4  # contents at once
MAX_BAD = 4096
MOST_STATES = 4  # that a path may take: an honest one is an anchor, and deltas of a state together at most


class Versions:
    def __init__(self, state: NodeState, most_bytes: int = chain.MAX_VERSION_BYTES) -> None:
        """No content has more than `most_bytes`."""
        self._state, self._files = state, state.weights
        self._most_path_bytes = MOST_STATES * most_bytes
        self._bad: OrderedDict[chain.WayId, None] = OrderedDict()  # ways that gave a wrong result
        self._in_work: frozenset[Hash] = frozenset()  # contents
        self.is_applying = False
        self.served = Served(state)
        self._applier = Applier(state.weights, state.base, state.base_path, self._refuse, self.served.made)
        self._surroundings = Surroundings(
            clock=state.clock, blame=state.blame, partials=self.served.partials, running=state.transfers
        )

    # -- to get one -------------------------------------------------------------------------------------------------

    def plan(self, target: Version, without: frozenset[Hash] = frozenset()) -> chain.Path | None:
        """The cheapest path from what is here; contents in `without` are not used."""
        held = self._files.held
        ways = chain.ways_of(self._state.manifests.values())
        states = {*held.states, self._state.base.hash}
        return chain.cheapest(target, ways, states, held.contents.keys(), without, self._bad.keys(), held.parts)

    async def obtain(self, target: Version, holders: Holders) -> None:
        """Its state is here when this returns. Raises the last PeerError when no path led there."""
        failed: set[Hash] = set()  # contents that nobody gave this time
        failures: list[PeerError] = []
        while len(failures) < MAX_PATHS and (path := self.plan(target, frozenset(failed))) is not None:
            if failures:
                self._state.blame(failures[-1])  # the last one is our caller's
            if path.num_bytes > self._most_path_bytes:  # all others are longer
                what = f"{path.num_bytes} bytes in {len(path.ways)} contents lead to version {target}"
                failures.append(Unreachable(f"{what}: more than {MOST_STATES} times a state is not fetched"))
                break
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
            except PeerError:
                failed.add(name)
                raise
            finally:
                self._files.found_part(name)

        missing = {  # steps that change nothing share a content
            way.content.content_hash: way for way in ways if not self._files.has_content(way.content.content_hash)
        }
        tasks = [asyncio.create_task(fetch_one(way), name=f"fetch {way.version}") for way in missing.values()]
        try:
            await asyncio.gather(*tasks)
        finally:
            await end_tasks(tasks)

    async def mend(self, holders: Holders) -> None:
        """Get again what rotted here while it was served, as far as anybody gives it."""
        for name in tuple(self.served.lost):
            ways = chain.ways_of(self._state.manifests.values()).values()
            way = next((way for each in ways for way in each if way.content.content_hash == name), None)
            try:
                if way is not None and way.content.kind == chain.ANCHOR:
                    await self.obtain(way.version, holders)
                elif way is not None:
                    await self._fetch([way], holders, set())
                self.served.lost.discard(name)
            except PeerError as error:
                self._state.emit("log", level="debug", event="what rotted is not got yet", why=str(error)[:200])

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
        self.served.is_anchor(content.content_hash, way.version.hash)

    async def _apply(self, base: Version, ways: Sequence[Way]) -> None:
        began, is_over = self._state.now(), Event()
        try:
            await asyncio.to_thread(self._applier.apply, base, ways, lambda: not is_over.is_set())
        finally:
            is_over.set()
        self._state.measures.applied(self._state.now() - began)

    def _refuse(self, way: Way, why: str) -> NoReturn:
        """It is what its publisher named, and wrong. Raises BadRecord."""
        self._bad[way.id] = None
        if len(self._bad) > MAX_BAD:
            self._bad.popitem(last=False)
        if not self._leads_elsewhere(way.content.content_hash):
            self._files.drop_content(way.content.content_hash)
        text = f"the {way.content.kind} of version {way.version} is wrong ({why[:120]})"
        raise BadRecord(text, peer=way.learner)

    def _leads_elsewhere(self, content_hash: Hash) -> bool:
        """Another way is made of it: who says that it is of another version makes nobody drop it."""
        ways = chain.ways_of(tuple(self._state.manifests.values())).values()
        others = (way for each in ways for way in each if way.content.content_hash == content_hash)
        is_state = chain.ANCHOR, True  # an anchor that is here already, as the state
        return any(
            way.id not in self._bad and (way.content.kind, self._files.has_state(way.version.hash)) != is_state
            for way in others
        )

    # -- our own, and what goes -------------------------------------------------------------------------------------

    def published(self, report: StepReport) -> None:
        """Our learner put these files there."""
        self._files.found_state(report.version.hash)
        for content in report.contents:
            if content.kind == chain.ANCHOR:
                self.served.is_anchor(content.content_hash, report.version.hash)
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
        """Drop what neither we nor those behind us need. Not while a version is got; nothing that we can't judge."""
        state, max_age = self._state, self._state.recipe.learner.max_age
        line, beside = [manifest for _, manifest in state.line()], self._beside()
        needs = chain.Needs(
            max_age,
            state.config.storage.cache,
            states=frozenset(state.in_use),
            contents=self._in_work,
            pulled=state.pulled.now(state.now()),
        )
        garbage = chain.to_collect(line, self._files.held, needs, beside).without(state.unread)
        named = {content.content_hash for manifest in (*line, *beside) for content in manifest.contents}
        self.served.forget_all_but(named)
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
        named = {content.content_hash for manifest in beside for content in manifest.contents}
        self._files.drop_parts((named | self._state.unread) - garbage.parts)
