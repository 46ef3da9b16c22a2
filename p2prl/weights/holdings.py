"""What a node holds of which version, and why it keeps it: for its owner, on the page and in the terminal.

In: the head's chain, what is on disk, the rules by which is collected (`chain.to_collect`). Out: a `Holding` a version.
Pure.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import msgspec

from p2prl.records import Content, Hash, Manifest, Version
from p2prl.weights.chain import Garbage, Held, Needs, has_anchor, to_collect

NEWEST, ANCHOR, OLDER, CHAIN, GARBAGE = "newest", "anchor", "within max age", "leads to the newest", "not needed"


class Part(msgspec.Struct, frozen=True):
    """One way to the version; `is_held` tells of its file, or of the state file that an anchor is."""

    kind: str
    base_step: int | None
    num_bytes: int
    is_held: bool


class Holding(msgspec.Struct, frozen=True):
    """`state_bytes` is 0 where the state is not here. `kept`: why something of it is here; "" when nothing is."""

    version: Version
    published_at: float
    state_bytes: int
    parts: tuple[Part, ...]
    kept: str

    @property
    def held_bytes(self) -> int:
        """An anchor is the state file: it counts once."""
        return self.state_bytes + sum(part.num_bytes for part in self.parts if part.is_held and part.kind != "anchor")


class Holdings(msgspec.Struct, frozen=True):
    """`others`: files and bytes of no version on the head's chain."""

    versions: tuple[Holding, ...]  # the newest first
    num_others: int
    other_bytes: int
    garbage: Garbage


def holdings(line: Sequence[Manifest], held: Held, needs: Needs, ahead: Sequence[Manifest] = ()) -> Holdings:
    """`line` is the newest first; see `to_collect`."""
    garbage = to_collect(line, held, needs, ahead)
    found = tuple(_holding(manifest, line[0].version, held, garbage, needs.max_age) for manifest in line)
    states = held.states.keys() - {manifest.version.hash for manifest in line}
    contents = held.contents.keys() - {content.content_hash for manifest in line for content in manifest.contents}
    return Holdings(
        found,
        len(states) + len(contents),
        sum(held.states[name] for name in states) + sum(held.contents[name] for name in contents),
        garbage,
    )


def _holding(manifest: Manifest, head: Version, held: Held, garbage: Garbage, max_age: int) -> Holding:
    version = manifest.version
    parts = tuple(_part(content, version, held) for content in manifest.contents)
    names = {content.content_hash for content in manifest.contents if content.content_hash in held.contents}
    state_bytes = held.states.get(version.hash, 0)
    kept = ""
    if state_bytes or names:
        kept = _reason(manifest, head, max_age, names, garbage, bool(state_bytes))
    return Holding(version, manifest.published_at, state_bytes, parts, kept)


def _part(content: Content, version: Version, held: Held) -> Part:
    is_held = content.content_hash in held.contents or (content.kind == "anchor" and version.hash in held.states)
    return Part(content.kind, content.base.step if content.base else None, content.content_bytes, is_held)


def _reason(
    manifest: Manifest, head: Version, max_age: int, names: AbstractSet[Hash], garbage: Garbage, has_state: bool
) -> str:
    version = manifest.version
    if version == head:
        return NEWEST
    if has_state and version.hash not in garbage.states:
        return ANCHOR if has_anchor(manifest) else CHAIN
    if names <= garbage.contents:
        return GARBAGE
    return OLDER if head.step - version.step <= max_age else CHAIN
