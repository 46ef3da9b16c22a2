"""What this node gives to others of its versions: which file is a content's, and whether that is still what it was.

In: requests for contents, the manifests that name them. Out: paths, lists of pieces; what rotted on our disk, to `lost`.

Invariants: an anchor is the state file, but only where that has the same bytes; a file that rotted is held no more and
its owner is told once. A state that somebody may read stays where it lies until another takes its place. Whatever peers
ask for or complain of, whole files are read one at a time, and one that was found whole is let be for LOOK_AGAIN_S.
"""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from threading import Lock

from p2prl.node.state import NodeState
from p2prl.records import Hash, Manifest
from p2prl.weights import chain
from p2prl.weights.serve import PieceServer
from p2prl.weights.store import content_digest, wrong_content, wrong_state

LOOK_AGAIN_S = 60.0


class Served:
    def __init__(self, state: NodeState) -> None:
        self._state, self._files = state, state.weights
        self._anchors: dict[Hash, Hash | None] = {}  # content hash -> the state here whose file it is, once compared
        self._looking = Lock()
        self._looked_at: dict[Hash, float] = {}  # when a content was last complained of and not dropped
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
        if content_hash not in self._anchors:
            self._compare(content_hash)
        state = self._anchors.get(content_hash)
        return self._files.state_path(state) if state is not None and self._files.has_state(state) else None

    def _compare(self, content_hash: Hash) -> None:
        """Not while another file is read: who asks meanwhile is told that it isn't here, and keeps no thread waiting."""
        state = next(filter(self._files.has_state, self._anchored(content_hash)), None)
        if state is not None and self._looking.acquire(blocking=False):
            try:
                same = content_digest(self._files.state_path(state)) == content_hash
                self._anchors[content_hash] = state if same else None
            except FileNotFoundError:  # collected just now
                return
            finally:
                self._looking.release()

    def _anchored(self, content_hash: Hash) -> list[Hash]:
        """The states whose anchor this is, by the manifests."""
        named = self._naming(content_hash)
        ways = ((manifest.version.hash, content) for manifest in named for content in manifest.contents)
        return [state for state, way in ways if way.content_hash == content_hash and way.kind == chain.ANCHOR]

    def _pieces(self, content_hash: Hash) -> frozenset[tuple[Hash, ...]]:
        contents = (content for manifest in self._naming(content_hash) for content in manifest.contents)
        return frozenset(content.pieces for content in contents if content.content_hash == content_hash)

    def _naming(self, content_hash: Hash) -> list[Manifest]:
        known = tuple(self._state.manifests.values())
        return [one for one in known if any(content.content_hash == content_hash for content in one.contents)]

    # -- what rots --------------------------------------------------------------------------------------------------

    async def _rotted(self, content_hash: Hash) -> None:
        """A piece of it was not what a manifest says: see whether the file rotted, or the manifest lies."""
        now = self._state.now()
        if now - self._looked_at.get(content_hash, -math.inf) < LOOK_AGAIN_S:
            return
        self._looked_at[content_hash] = now
        what = await asyncio.to_thread(self._drop_rotted, content_hash)
        if what:
            self._looked_at.pop(content_hash, None)
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
            state = self._anchors.pop(content_hash, None)
            if state is None or not self._files.has_state(state):
                return ""
            if not wrong_state(self._files.state_path(state), state):
                return ""  # made again of deltas, in another layout
            self._files.forget_state(state)
            return f"the state {state.hex()[:16]}"

    # -- anchors ----------------------------------------------------------------------------------------------------

    def is_anchor(self, content_hash: Hash, state: Hash) -> None:
        """The content is the file of that state."""
        self._anchors[content_hash] = state

    def made(self, state: Hash) -> None:
        """Its file is another than the one that was compared."""
        self._keep_anchors(lambda _, known: known != state)

    def forget_all_but(self, named: set[Hash]) -> None:
        """Contents that no manifest names any more."""
        self.lost &= named
        self._looked_at = {content: at for content, at in self._looked_at.items() if content in named}
        self._keep_anchors(lambda content, _: content in named)

    def _keep_anchors(self, keep: Callable[[Hash, Hash | None], bool]) -> None:
        """Threads may add to them meanwhile; what is lost so is compared again."""
        self._anchors = {content: state for content, state in tuple(self._anchors.items()) if keep(content, state)}
