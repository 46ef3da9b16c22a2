"""Which way leads to a version in the fewest bytes, what is published with the next one, what is no longer needed.

In: manifests, what is held, what is in use. Out: a `Path`, `Wanted`, `Garbage`. Pure: no file, no clock.

A version has one way or more: an anchor (its whole state file), or a delta from another version. A state is named by its
hash, so two versions of the same weights share it.

Invariants: a path begins at a state that is held or at an anchor, and each way on it begins where the one before ended;
no path costs fewer bytes. What is in use and the head's state are never garbage; what is kept fits the budget, but for
those. A manifest is refused by its sizes and names before anything of it is fetched.
"""

import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from p2prl.errors import BadRecord
from p2prl.records import Content, Hash, Manifest, Version
from p2prl.weights.contents import check_content

ANCHOR, DELTA = "anchor", "delta"
MAX_VERSION_BYTES = 2**40
ANCHOR_SHARE = 0.25  # of a state's bytes: when the deltas since the last anchor add up to more, the next one is due
ANCHOR_EVERY = 256  # versions at most, however small their deltas
CUMULATIVE_EVERY = 16  # versions after an anchor
KEEP_ANCHORS = 2
KEEP_PULLED = 4  # anchors that peers take, beyond those


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
    """Bytes on disk by name: states by state hash, contents by content hash; `parts`: contents on their way."""

    states: Mapping[Hash, int]
    contents: Mapping[Hash, int]
    parts: Mapping[Hash, int] = {}


class Garbage(msgspec.Struct, frozen=True):
    states: frozenset[Hash]
    contents: frozenset[Hash]
    parts: frozenset[Hash] = frozenset()

    def without(self, spared: AbstractSet[Hash]) -> "Garbage":
        return Garbage(self.states - spared, self.contents - spared, self.parts - spared)


def check(manifest: Manifest, most_bytes: int = MAX_VERSION_BYTES) -> None:
    """Raises BadRecord for ways that contradict themselves, or are of more than `most_bytes` each."""
    who, name = manifest.learner, f"the manifest of version {manifest.version}"
    for content in manifest.contents:
        if content.kind not in (ANCHOR, DELTA) or (content.base is None) != (content.kind == ANCHOR):
            raise BadRecord(f"{name} has a way that is neither an anchor nor a delta from a version", peer=who)
        if content.base is not None and content.base.step >= manifest.version.step:
            raise BadRecord(f"{name} has a delta from {content.base}, which is not before it", peer=who)
        try:
            check_content(content, most_bytes)
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
    parts: Mapping[Hash, int] = {},
) -> Path | None:
    """The path of the fewest bytes, then of the fewest ways; None when there is none.

    `states` and `contents` are held, and so many bytes of `parts`; contents in `without` and ways in `wrong` are not
    used. Dijkstra's search from the target back.
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
            name = content.content_hash
            cost = 0 if name in contents else max(1, content.content_bytes - parts.get(name, 0))
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

    `states` that somebody reads and `contents` that somebody fetches or applies stay whatever the rules say. `pulled`
    are contents that peers take from us now.
    """

    max_age: int
    budget: int
    states: frozenset[Hash] = frozenset()
    contents: frozenset[Hash] = frozenset()
    pulled: frozenset[Hash] = frozenset()


class _Kept:
    """What is kept, by kind and name: when it goes where the budget is too small, the least first; None: never."""

    def __init__(self, held: Held, needs: Needs) -> None:
        self._tables = {"state": held.states, "content": held.contents, "part": held.parts}
        self._budget = needs.budget
        self.ranks: dict[tuple[str, Hash], tuple[int, int] | None] = {}
        self.ranks |= {("state", name): None for name in needs.states}
        self.ranks |= {(kind, name): None for name in needs.contents for kind in ("content", "part")}

    def add(self, kind: str, name: Hash, rank: tuple[int, int] | None) -> None:
        """Who names it several times keeps it for the best reason."""
        if name in self._tables[kind]:
            before = self.ranks.get((kind, name), (-1, 0))
            self.ranks[kind, name] = None if rank is None or before is None else max(rank, before)

    def garbage(self) -> Garbage:
        kept = {(kind, name) for kind, name in self.ranks if name in self._tables[kind]}
        total = sum(self._tables[kind][name] for kind, name in kept)
        loose = [(rank, name, kind) for (kind, name), rank in self.ranks.items() if rank is not None]
        for _, name, kind in sorted(loose):
            if total <= self._budget:
                break
            total -= self._tables[kind][name]
            kept.discard((kind, name))
        gone = {kind: frozenset(n for n in table if (kind, n) not in kept) for kind, table in self._tables.items()}
        return Garbage(gone["state"], gone["content"], gone["part"])


PLAIN, PULLED, PART = range(3)  # of what is loose: the first go first


def to_collect(line: Iterable[Manifest], held: Held, needs: Needs, beside: Sequence[Manifest] = ()) -> Garbage:
    """Of what is held. `line`: the head's chain, the newest first.

    `beside` are not on it, and one may be the next head: their contents and anchors are kept, and what came of them. So
    are the head's state, the newest KEEP_ANCHORS anchors that are here and the deltas since the older of them (an anchor
    from which they are more bytes than a state is of no use), deltas of the last `max_age` versions; and what peers take
    from us now with all deltas since, as whoever is slow needs them next. Down to the budget the oldest go, and of what
    peers take or is on its way nothing before the rest, but for the newest anchor where they take none: whoever asks for
    old deltas for ever drives out no anchor, nor does who takes an old anchor where that one is too large (`_taken`).
    """
    line, kept = list(line), _Kept(held, needs)
    for manifest in beside:
        _keep(kept, manifest, (PLAIN, manifest.version.step), state=has_anchor(manifest))
        for content in manifest.contents:
            kept.add("part", content.content_hash, (PART, manifest.version.step))
    pulled, pulled_anchors = _taken(line, held, needs)
    since_pulled = max(pulled, default=-1)
    state_bytes = max(held.states.values(), default=0)
    num_anchors = num_pulled = since_bytes = 0
    for number, manifest in enumerate(line):
        linked = num_anchors < KEEP_ANCHORS and since_bytes <= state_bytes
        if not linked and line[0].version.step - manifest.version.step > needs.max_age and number > since_pulled:
            break
        rank = (PULLED if number <= since_pulled else PLAIN), manifest.version.step
        is_anchor = has_anchor(manifest) and manifest.version.hash in held.states
        is_pulled = number in pulled_anchors and num_pulled < KEEP_PULLED
        is_kept = is_anchor and num_anchors < KEEP_ANCHORS
        _keep(kept, manifest, rank, state=False)
        if is_kept or is_pulled:
            outlives = is_pulled or (num_anchors == 0 and not pulled_anchors)
            kept.add("state", manifest.version.hash, rank if outlives else (PLAIN, manifest.version.step))
        if number == 0:
            _keep(kept, manifest, None, state=True)
        num_anchors, num_pulled = num_anchors + is_kept, num_pulled + is_pulled
        since_bytes += manifest.contents[0].content_bytes
    return kept.garbage()


def _taken(line: Sequence[Manifest], held: Held, needs: Needs) -> tuple[set[int], set[int]]:
    """The versions of which peers take something, and those of which they take the anchor.

    No anchor counts where a newer one is here and the budget does not hold the old one with the head's state and all
    deltas until the next is here: it would drive out the newer one, then go itself.
    """
    versions: set[int] = set()
    anchors: set[int] = set()
    since_bytes = largest = newer = 0
    for number, manifest in enumerate(line):
        state_bytes = held.states.get(manifest.version.hash, 0) if has_anchor(manifest) else 0
        counts = not newer or (2 + ANCHOR_SHARE) * state_bytes + since_bytes + 2 * largest <= needs.budget
        for content in manifest.contents:
            is_taken = content.content_hash in needs.pulled
            if is_taken and (counts or content.kind == DELTA):
                versions.add(number)
            if is_taken and counts and content.kind == ANCHOR and state_bytes:
                anchors.add(number)
            num_bytes = held.contents.get(content.content_hash, 0)
            since_bytes, largest = since_bytes + num_bytes, max(largest, num_bytes)
        newer += state_bytes > 0
    return versions, anchors


def _keep(kept: _Kept, manifest: Manifest, rank: tuple[int, int] | None, *, state: bool) -> None:
    for content in manifest.contents:
        kept.add("content", content.content_hash, rank)
    if state:
        kept.add("state", manifest.version.hash, rank)
