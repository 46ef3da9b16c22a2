"""What this node gives to others of its versions: which file is a content's, and whether that is still what it was.

In: requests for contents, the manifests that name them. Out: paths, lists of pieces; what rotted on our disk, to `lost`.

Invariants: an anchor is the state file, but only where that has the same bytes; a file that rotted is held no more and
its owner is told once. A state that somebody may read stays where it lies until another takes its place. Whatever peers
ask for, whole files are read one at a time, a state's once for all the anchors that manifests name of it.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from p2prl.node.state import NodeState
from p2prl.records import Hash
from p2prl.weights import chain
from p2prl.weights.contents import name_of_file
from p2prl.weights.serve import PieceServer
from p2prl.weights.store import wrong_content, wrong_state


class Served:
    def __init__(self, state: NodeState) -> None:
        self._state, self._files = state, state.weights
        self._anchors: dict[Hash, Hash] = {}  # a state here -> the content that its file is, once that was read
        self._looking = Lock()
        self.lost: set[Hash] = set()  # contents that rotted here and are not here again
        self.on_lost: Callable[[], None] = lambda: None
        self.partials = PieceServer(
            state.transport,
            state.clock,
            self.find,
            self._pieces,
            rotted=self._rotted,
            spares=lambda: state.leads,
            pulled=state.pulled,
        ).partials

    # -- asked in threads -------------------------------------------------------------------------------------------

    def find(self, content_hash: Hash) -> Path | None:
        """The whole file."""
        if self._files.has_content(content_hash):
            return self._files.content_path(content_hash)
        state = self._state_of(content_hash)
        return self._files.state_path(state) if state is not None and self._files.has_state(state) else None

    def _state_of(self, content_hash: Hash) -> Hash | None:
        """Whose file it is."""
        if (state := self._known(content_hash)) is not None:
            return state
        for state in filter(self._files.has_state, self._anchored(content_hash)):
            self._read(state)
        return self._known(content_hash)

    def _known(self, content_hash: Hash) -> Hash | None:
        return next((state for state, name in tuple(self._anchors.items()) if name == content_hash), None)

    def _read(self, state: Hash) -> None:
        """Not while another file is read: who asks meanwhile is told that it isn't here, and keeps no thread waiting."""
        if self._looking.acquire(blocking=False):
            try:
                if state not in self._anchors:
                    self._anchors[state] = name_of_file(self._files.state_path(state))
            except OSError:  # collected just now, or nobody may read it any more
                return
            finally:
                self._looking.release()

    def _anchored(self, content_hash: Hash) -> list[Hash]:
        """The states whose anchor this is, by the manifests."""
        known = tuple(self._state.manifests.values())
        ways = ((manifest.version.hash, content) for manifest in known for content in manifest.contents)
        return [state for state, way in ways if way.content_hash == content_hash and way.kind == chain.ANCHOR]

    def _pieces(self, content_hash: Hash) -> tuple[Hash, ...]:
        contents = (content for manifest in tuple(self._state.manifests.values()) for content in manifest.contents)
        return next((content.pieces for content in contents if content.content_hash == content_hash), ())

    # -- what rots --------------------------------------------------------------------------------------------------

    async def _rotted(self, content_hash: Hash) -> None:
        """A piece of it was not what its name says."""
        what = await asyncio.to_thread(self._drop_rotted, content_hash)
        if what:
            self._state.emit("log", level="warning", event=f"{what} rotted on this disk; it is got again")
            self.lost.add(content_hash)
            self.on_lost()

    def _drop_rotted(self, content_hash: Hash) -> str:
        """What of ours is not what its name says, and is held no more."""
        with self._looking:
            if self._files.has_content(content_hash):
                if wrong_content(self._files.content_path(content_hash), content_hash):
                    self._files.drop_content(content_hash)
                    return f"the delta {content_hash.hex()[:16]}"
                return ""
            state = self._known(content_hash)
            if state is None or not self._files.has_state(state):
                return ""
            self.made(state)
            if not wrong_state(self._files.state_path(state), state):
                return ""  # made again of deltas, in another layout
            self._files.forget_state(state)
            return f"the state {state.hex()[:16]}"

    # -- anchors ----------------------------------------------------------------------------------------------------

    def is_anchor(self, content_hash: Hash, state: Hash) -> None:
        """The content is the file of that state."""
        self._anchors[state] = content_hash

    def made(self, state: Hash) -> None:
        """Its file is another than the one that was read."""
        self._anchors.pop(state, None)

    def forget_all_but(self, named: set[Hash]) -> None:
        """Contents that no manifest names any more, and states that are gone."""
        self.lost &= named
        for state in tuple(self._anchors):
            if not self._files.has_state(state):
                self.made(state)
