"""Which way leads to a version in the fewest bytes, what is published with the next one, what is no longer needed.

In: manifests, what is held, what is in use. Out: a `Path`, `Wanted`, `Garbage`. Pure: no file, no clock.

A version has one way or more: an anchor (its whole state file), or a delta from another version. A state is named by its
hash, so two versions of the same weights share it.

Invariants: a path begins at a state that is held or at an anchor, and each way on it begins where the one before ended;
no path costs fewer bytes. What is in use and the head's state are never garbage; what is kept fits the budget, but for
those. A manifest is refused by its sizes before anything of it is fetched.
"""

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from p2prl.errors import BadRecord
from p2prl.records import Content, Hash, Manifest, Version
from p2prl.weights.messages import check_sizes

ANCHOR, DELTA = "anchor", "delta"
MAX_VERSION_BYTES = 2**40
ANCHOR_SHARE = 0.25  # of a state's bytes: when the deltas since the last anchor add up to more, the next one is due
ANCHOR_EVERY = 256  # versions at most, however small their deltas
CUMULATIVE_EVERY = 16  # versions after an anchor
KEEP_ANCHORS = 2


class Way(msgspec.Struct, frozen=True):
    """A content, the version that it gives, and who published it."""

    version: Version
    content: Content
    learner: str

    @property
    def id(self) -> "WayId":
        """The same content under another version or from another base is another way."""
        base = self.content.base
        return self.content.content_hash, self.version.hash, b"" if base is None else base.hash


WayId = tuple[Hash, Hash, bytes]


class Path(msgspec.Struct, frozen=True):
    """From `base`, a state that is held (None: from the anchor that comes first), over `ways` to the last one's version.

    `num_bytes` are to be fetched; contents that are held cost none.
    """

    base: Version | None
    ways: tuple[Way, ...]
    num_bytes: int


class Wanted(msgspec.Struct, frozen=True):
    """What the learner publishes with a version: deltas from these versions, its parent's first; the anchor too."""

    bases: tuple[Version, ...]
    anchor: bool


class Held(msgspec.Struct, frozen=True):
    """Bytes on disk by name: states by state hash, contents by content hash."""

    states: Mapping[Hash, int]
    contents: Mapping[Hash, int]


class Garbage(msgspec.Struct, frozen=True):
    states: frozenset[Hash]
    contents: frozenset[Hash]


def check(manifest: Manifest, most_bytes: int = MAX_VERSION_BYTES) -> None:
    """Raises BadRecord for ways that contradict themselves, or are of more than `most_bytes` each."""
    who, name = manifest.learner, f"the manifest of version {manifest.version}"
    for content in manifest.contents:
        if content.kind not in (ANCHOR, DELTA) or (content.base is None) != (content.kind == ANCHOR):
            raise BadRecord(f"{name} has a way that is neither an anchor nor a delta from a version", peer=who)
        if content.base is not None and content.base.step >= manifest.version.step:
            raise BadRecord(f"{name} has a delta from {content.base}, which is not before it", peer=who)
        try:
            check_sizes(content, most_bytes)
        except BadRecord as error:
            raise BadRecord(f"{name} announces {error}", peer=who) from None
    if len({content.content_hash for content in manifest.contents}) != len(manifest.contents):
        raise BadRecord(f"{name} gives one content twice", peer=who)


def has_anchor(manifest: Manifest) -> bool:
    return any(content.kind == ANCHOR for content in manifest.contents)


# -- the cheapest path ----------------------------------------------------------------------------------------------


def ways_of(manifests: Iterable[Manifest]) -> dict[Version, tuple[Way, ...]]:
    """All ways by the version that they give."""
    found: dict[Version, tuple[Way, ...]] = {}
    for manifest in manifests:
        ways = tuple(Way(manifest.version, content, manifest.learner) for content in manifest.contents)
        found[manifest.version] = (*found.get(manifest.version, ()), *ways)
    return found


def cheapest(
    target: Version,
    ways: Mapping[Version, Sequence[Way]],
    states: AbstractSet[Hash],
    contents: AbstractSet[Hash] = frozenset(),
    without: AbstractSet[Hash] = frozenset(),
    wrong: AbstractSet[WayId] = frozenset(),
) -> Path | None:
    """The path of the fewest bytes, then of the fewest ways; None when there is none.

    `states` and `contents` are held; contents in `without` and ways in `wrong` are not used. Dijkstra's search from the
    target back.
    """
    numbers = itertools.count()  # versions need no order among equals
    queue: list[tuple[int, int, int, Version | None, tuple]] = [(0, 0, next(numbers), target, ())]
    done: set[Version] = set()
    while queue:
        num_bytes, num_ways, _, version, linked = heapq.heappop(queue)
        if version is None or version.hash in states:
            return Path(version, tuple(_unlinked(linked)), num_bytes)
        if version in done:
            continue
        done.add(version)
        for way in ways.get(version, ()):
            content = way.content
            if content.content_hash in without or way.id in wrong:
                continue
            cost = 0 if content.content_hash in contents else content.content_bytes
            entry = num_bytes + cost, num_ways + 1, next(numbers), content.base, (way, linked)
            heapq.heappush(queue, entry)
    return None


def _unlinked(linked: tuple) -> Iterable[Way]:
    while linked:
        way, linked = linked
        yield way


# -- what to publish ------------------------------------------------------------------------------------------------


def to_publish(line: Iterable[Manifest], base: Version, state_bytes: int) -> Wanted:
    """With the version after the newest of `line`: its chain, the newest first, down to version 0, which is `base`.

    Version 0 counts as an anchor: every node has it. Where the line ends too early to tell, an anchor is due.
    """
    parent, anchor, since_bytes, num_since = base, base, 0, 0
    for manifest in line:
        parent = manifest.version if num_since == 0 else parent
        anchor = manifest.version
        if has_anchor(manifest):
            break
        since_bytes += manifest.contents[0].content_bytes
        num_since += 1
    else:
        is_cut = anchor.step > base.step + 1
        if is_cut:
            return Wanted((parent,), anchor=True)
        anchor = base
    if since_bytes > ANCHOR_SHARE * state_bytes or num_since >= ANCHOR_EVERY:
        return Wanted((parent,), anchor=True)
    cumulative = (num_since + 1) % CUMULATIVE_EVERY == 0
    return Wanted((parent, anchor) if cumulative else (parent,), anchor=False)


# -- what to collect ------------------------------------------------------------------------------------------------


class Needs(msgspec.Struct, frozen=True):
    """`max_age` in versions is the recipe's; `budget` in bytes is the owner's.

    `states` that somebody reads and `contents` that somebody fetches or applies stay whatever the rules say.
    """

    max_age: int
    budget: int
    states: frozenset[Hash] = frozenset()
    contents: frozenset[Hash] = frozenset()


def to_collect(line: Iterable[Manifest], held: Held, needs: Needs, beside: Sequence[Manifest] = ()) -> Garbage:
    """Of what is held. `line`: the head's chain, the newest first; read only as far back as something is kept.

    `beside` are not on it, and one may be the next head: their contents and anchors are kept. So are the head's state,
    the newest KEEP_ANCHORS anchors that are here and the deltas since the older of them (an anchor from which they are
    more bytes than a state is of no use), deltas of the last `max_age` versions. Then the oldest go, down to the budget.
    """
    states = {m.version.hash: m.version.step for m in beside if has_anchor(m)}  # what is kept, and its step
    contents = {content.content_hash: manifest.version.step for manifest in beside for content in manifest.contents}
    fixed_states, fixed_contents = set(needs.states), set(needs.contents)
    state_bytes = max(held.states.values(), default=0)
    num_anchors, since_bytes, head = 0, 0, None
    for manifest in line:
        version, names = manifest.version, {content.content_hash for content in manifest.contents}
        if head is None:
            head = version
            states[version.hash] = version.step
            fixed_states.add(version.hash)
            fixed_contents |= names
        linked = num_anchors < KEEP_ANCHORS and since_bytes <= state_bytes
        if not linked and head.step - version.step > needs.max_age:
            break
        contents |= dict.fromkeys(names, version.step)
        if has_anchor(manifest) and version.hash in held.states and num_anchors < KEEP_ANCHORS:
            states.setdefault(version.hash, version.step)
            num_anchors += 1
        since_bytes += manifest.contents[0].content_bytes
    return _within(held, needs.budget, states, contents, fixed_states, fixed_contents)


def _within(
    held: Held,
    budget: int,
    states: Mapping[Hash, int],
    contents: Mapping[Hash, int],
    fixed_states: AbstractSet[Hash],
    fixed_contents: AbstractSet[Hash],
) -> Garbage:
    """All but what is kept; of that the oldest, until the rest fits."""
    kept_states = {name for name in held.states if name in states or name in fixed_states}
    kept_contents = {name for name in held.contents if name in contents or name in fixed_contents}
    total = sum(held.states[name] for name in kept_states) + sum(held.contents[name] for name in kept_contents)
    loose = [(states[name], name, True) for name in kept_states - fixed_states]
    loose += [(contents[name], name, False) for name in kept_contents - fixed_contents]
    for _, name, is_state in sorted(loose):
        if total <= budget:
            break
        total -= held.states[name] if is_state else held.contents[name]
        (kept_states if is_state else kept_contents).discard(name)
    return Garbage(frozenset(held.states) - kept_states, frozenset(held.contents) - kept_contents)
