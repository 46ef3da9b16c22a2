"""What a node holds of which version, and why it keeps it; what it waits for: for its owner, on the page, in the terminal.

In: the head's chain, what lies beside it, what is on disk, the rules by which is collected (`chain.to_collect`). Out: a
`Holding` a version; what is still to come of a better one. Pure.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import msgspec

from p2prl.records import Content, Hash, Manifest, Version
from p2prl.weights.chain import Garbage, Held, Needs, cheapest, has_anchor, to_collect, ways_of

NEWEST, ANCHOR, OLDER, CHAIN, GARBAGE = "newest", "anchor", "within max age", "leads to the newest", "not needed"
PULLED = "a peer takes it"


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


class Piled(msgspec.Struct, frozen=True):
    """Files, and bytes of them that are here."""

    num_files: int = 0
    num_bytes: int = 0


class Awaited(msgspec.Struct, frozen=True):
    """A better version than the head, and what its cheapest way takes: `whole` are here, `parts` in part."""

    version: Version
    total: Piled
    whole: Piled
    parts: tuple[Part, ...]  # `num_bytes` of them are here
    part_totals: tuple[int, ...]  # bytes of each when it is whole

    @property
    def here_bytes(self) -> int:
        return self.whole.num_bytes + sum(part.num_bytes for part in self.parts)


class Holdings(msgspec.Struct, frozen=True):
    """`ahead`: of versions that are not on the head's chain, and may be its next; `others`: of no version known here."""

    versions: tuple[Holding, ...]  # the newest first
    awaited: Awaited | None
    ahead: Piled
    others: Piled
    garbage: Garbage

    @property
    def num_bytes(self) -> int:
        return sum(each.held_bytes for each in self.versions) + self.ahead.num_bytes + self.others.num_bytes


def holdings(
    line: Sequence[Manifest], held: Held, needs: Needs, base: Version, beside: Sequence[Manifest] = ()
) -> Holdings:
    """`line` is the newest first; see `to_collect`. `base` is version 0."""
    garbage = to_collect(line, held, needs, beside)
    found = tuple(_holding(manifest, line[0].version, held, garbage, needs) for manifest in line)
    on_line, ahead = _named(line), _named(beside)
    files = [("state", name, size) for name, size in held.states.items()]
    files += [("content", name, size) for name, size in (*held.contents.items(), *held.parts.items())]
    files = [(kind, name, size) for kind, name, size in files if (kind, name) not in on_line]
    others = [size for kind, name, size in files if (kind, name) not in ahead]
    rest = [size for kind, name, size in files if (kind, name) in ahead]
    awaited = _awaited(line, beside, held, base)
    return Holdings(found, awaited, Piled(len(rest), sum(rest)), Piled(len(others), sum(others)), garbage)


def _named(manifests: Sequence[Manifest]) -> set[tuple[str, Hash]]:
    names = {("state", manifest.version.hash) for manifest in manifests}
    return names | {("content", content.content_hash) for manifest in manifests for content in manifest.contents}


def _awaited(line: Sequence[Manifest], beside: Sequence[Manifest], held: Held, base: Version) -> Awaited | None:
    """The best of `beside`, where it is better than the head; None also when no way leads there."""
    best = max(beside, key=_merit, default=None)
    if best is None or (line and _merit(best) <= _merit(line[0])):
        return None
    states = {*held.states, base.hash}
    path = cheapest(best.version, ways_of((*line, *beside)), states, held.contents.keys(), parts=held.parts)
    if path is None:
        return None
    contents = {way.content.content_hash: way.content for way in path.ways}.values()
    whole = [each.content_bytes for each in contents if each.content_hash in held.contents]
    parts = [each for each in contents if each.content_hash in held.parts]
    here = [min(each.content_bytes, held.parts[each.content_hash]) for each in parts]
    return Awaited(
        best.version,
        Piled(len(contents), sum(each.content_bytes for each in contents)),
        Piled(len(whole), sum(whole)),
        tuple(
            Part(each.kind, each.base.step if each.base else None, size, is_held=False)
            for each, size in zip(parts, here, strict=True)
        ),
        tuple(each.content_bytes for each in parts),
    )


def _merit(manifest: Manifest) -> tuple[int, int, int]:
    """As the chain's order has it (`swarm/head.py`)."""
    return manifest.num_groups, manifest.version.term, manifest.version.step


def _holding(manifest: Manifest, head: Version, held: Held, garbage: Garbage, needs: Needs) -> Holding:
    version = manifest.version
    parts = tuple(_part(content, version, held) for content in manifest.contents)
    names = {content.content_hash for content in manifest.contents if content.content_hash in held.contents}
    state_bytes = held.states.get(version.hash, 0)
    kept = ""
    if state_bytes or names:
        kept = _reason(manifest, head, needs, names, garbage, bool(state_bytes))
    return Holding(version, manifest.published_at, state_bytes, parts, kept)


def _part(content: Content, version: Version, held: Held) -> Part:
    is_held = content.content_hash in held.contents or (content.kind == "anchor" and version.hash in held.states)
    return Part(content.kind, content.base.step if content.base else None, content.content_bytes, is_held)


def _reason(
    manifest: Manifest, head: Version, needs: Needs, names: AbstractSet[Hash], garbage: Garbage, has_state: bool
) -> str:
    version = manifest.version
    if version == head:
        return NEWEST
    is_pulled = any(content.content_hash in needs.pulled for content in manifest.contents)
    if is_pulled and (names - garbage.contents or (has_state and version.hash not in garbage.states)):
        return PULLED
    if has_state and version.hash not in garbage.states:
        return ANCHOR if has_anchor(manifest) else CHAIN
    if names <= garbage.contents:
        return GARBAGE
    return OLDER if head.step - version.step <= needs.max_age else CHAIN
