"""The tree of versions that manifests span: which head to follow, how old a version is, what a branch trained on.

In: verified manifests with their ids, parents before children. Out: chain order, ages, trained groups, rewards.

Invariants: every link's cumulative count of groups is its parent's plus its own, its step its parent's plus one, its
term no lower; no group is trained twice on one chain. A link is one version deep per step, so depth is the step.

Memory: a link keeps no pieces, votes or metrics: about 0.5 kB plus 0.12 kB a group (10,000 versions of 32 groups:
some 45 MB). `prune` drops side branches; the chain of the head itself is kept, for receipts and for rewards.
"""

import math
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet

import msgspec

from p2prl.errors import BadRecord
from p2prl.records import Manifest, Version

BASE_ID = bytes(32)  # stands for version 0, which has no manifest


class MissingParent(BadRecord):
    """The manifest may be good, its parent is not here yet: get `parent_id` first."""

    code = "missing_parent"

    def __init__(self, message: str, parent_id: bytes, *, peer: str = "") -> None:
        super().__init__(message, peer=peer)
        self.parent_id = parent_id


class Link(msgspec.Struct, frozen=True):
    """What the tree keeps of a manifest."""

    id: bytes
    version: Version
    parent_id: bytes
    learner: str
    num_groups: int
    group_ids: tuple[bytes, ...] = ()
    group_rewards: tuple[float, ...] = ()
    group_answers: tuple[int, ...] = ()


OrderKey = tuple[int, int, int, int]


def order_key(num_groups: int, version: Version) -> OrderKey:
    """Chain order, the greater is followed: more groups; then higher term; higher step; smaller hash."""
    return num_groups, version.term, version.step, -int.from_bytes(version.hash, "big")


def is_better(num_groups: int, version: Version, than_groups: int, than: Version) -> bool:
    return order_key(num_groups, version) > order_key(than_groups, than)


class Chain:
    """The tree of one swarm, from its base version.

    The chain of the head asked about last is kept as a list by step with the set of its groups, and moved along when
    another head is asked about: a step forward costs its own groups, a change of branch the length of the branches.
    """

    def __init__(self, base: Version, *, max_batch: int = 1024) -> None:
        self._max_batch = max_batch
        root = Link(BASE_ID, base, BASE_ID, "", 0)
        self._links: dict[bytes, Link] = {BASE_ID: root}
        self._by_version: dict[Version, tuple[bytes, ...]] = {base: (BASE_ID,)}
        self._line: list[bytes] = [BASE_ID]  # ids by step - base.step
        self._trained: set[bytes] = set()
        self._side: tuple[bytes, set[bytes]] = (BASE_ID, set())  # a tip beside the line, the groups of its chain
        self._base_step = base.step

    def __contains__(self, manifest_id: object) -> bool:
        return manifest_id in self._links

    def __len__(self) -> int:
        """Versions known, the base too."""
        return len(self._links)

    def link(self, manifest_id: bytes) -> Link:
        """KeyError when unknown; BASE_ID gives the base."""
        return self._links[manifest_id]

    def find(self, version: Version) -> bytes | None:
        """The id of a manifest of this version."""
        ids = self._by_version.get(version)
        return ids[0] if ids else None

    def add(self, manifest_id: bytes, manifest: Manifest) -> bool:
        """Check and keep; False when it was there. Raises BadRecord, or MissingParent."""
        if manifest_id in self._links:
            return False
        self._check(manifest)
        version = manifest.version
        self._links[manifest_id] = Link(
            manifest_id,
            version,
            manifest.parent_id,
            manifest.learner,
            manifest.num_groups,
            manifest.group_ids,
            manifest.group_rewards,
            manifest.group_answers,
        )
        self._by_version[version] = (*self._by_version.get(version, ()), manifest_id)
        return True

    def best(self, candidates: Iterable[bytes]) -> bytes:
        """First in chain order of known ids (equal ones: the smaller id); BASE_ID when there are none."""
        return max(candidates, key=self._order, default=BASE_ID)

    def ancestors(self, manifest_id: bytes) -> Iterator[bytes]:
        """From the manifest itself down to BASE_ID."""
        while manifest_id != BASE_ID:
            yield manifest_id
            manifest_id = self._links[manifest_id].parent_id
        yield BASE_ID

    def common_ancestor(self, one: bytes, other: bytes) -> bytes:
        while one != other:
            if self._depth(one) >= self._depth(other):
                one = self._links[one].parent_id
            else:
                other = self._links[other].parent_id
        return one

    def is_on_chain(self, head: bytes, manifest_id: bytes) -> bool:
        """Whether `manifest_id` is `head` or an ancestor of it."""
        if manifest_id not in self._links:
            return False
        self._focus(head)
        return self._on_line(manifest_id)

    def branch(self, ancestor: bytes, head: bytes) -> tuple[bytes, ...]:
        """Ids after `ancestor` up to `head`, in order of steps."""
        ids = []
        for manifest_id in self.ancestors(head):
            if manifest_id == ancestor:
                break
            ids.append(manifest_id)
        return tuple(reversed(ids))

    def age(self, head: bytes, version: Version) -> int | None:
        """Versions between `version` and `head`, over their last common ancestor; None when unknown."""
        ids = self._by_version.get(version)
        if not ids:
            return None
        self._focus(head)
        head_step = self._links[head].version.step
        ages = []
        for manifest_id in ids:
            ancestor_step = self._links[self._fork_of(manifest_id)].version.step
            ages.append(head_step - ancestor_step + version.step - ancestor_step)
        return min(ages)

    def trained(self, head: bytes) -> AbstractSet[bytes]:
        """Ids of the groups on `head`'s chain. A view: good until another head is asked about."""
        self._focus(head)
        return self._trained

    def rollback(self, old_head: bytes, new_head: bytes) -> tuple[bytes, ...]:
        """Groups trained on `old_head`'s chain but not on `new_head`'s: they go back to the buffer."""
        ancestor = self.common_ancestor(old_head, new_head)
        trained = self.trained(new_head)
        lost = (group for link in self.branch(ancestor, old_head) for group in self._links[link].group_ids)
        return tuple(group for group in lost if group not in trained)

    def first_last_rewards(self, head: bytes, num_answers: int = 400) -> tuple[float, float] | None:
        """Mean reward of the first and of the last `num_answers` answers trained on; None before there are any."""
        self._focus(head)
        first = _mean(_rewards(self._links[link] for link in self._line), num_answers)
        last = _mean(_rewards((self._links[link] for link in reversed(self._line)), newest=True), num_answers)
        return None if first is None or last is None else (first, last)

    def prune(self, head: bytes, keep_steps: int) -> tuple[bytes, ...]:
        """Drop versions off `head`'s chain more than `keep_steps` behind it, with all that grew on them."""
        self._focus(head)
        floor = self._links[head].version.step - keep_steps
        dead: set[bytes] = set()
        for manifest_id in sorted(self._links, key=self._depth):
            link = self._links[manifest_id]
            if not self._on_line(manifest_id) and (link.version.step < floor or link.parent_id in dead):
                dead.add(manifest_id)
        self.drop(dead)
        return tuple(sorted(dead))

    def drop(self, manifest_ids: Iterable[bytes]) -> None:
        """Versions off the chain of the head asked about last, with all that grew on them."""
        for manifest_id in manifest_ids:
            version = self._links.pop(manifest_id).version
            left = tuple(other for other in self._by_version[version] if other != manifest_id)
            if left:
                self._by_version[version] = left
            else:
                del self._by_version[version]

    # -- inside -----------------------------------------------------------------------------------------------------

    def _check(self, manifest: Manifest) -> None:
        parent = self._links.get(manifest.parent_id)
        who, name = manifest.learner, f"manifest of version {manifest.version}"
        if parent is None:
            raise MissingParent(f"the parent of the {name} is unknown here", manifest.parent_id, peer=who)
        groups = manifest.group_ids
        rules = (
            (manifest.parent == parent.version, f"names parent {manifest.parent}, its parent is {parent.version}"),
            (manifest.version.step == parent.version.step + 1, "isn't one step after its parent"),
            (manifest.version.term >= parent.version.term, "has a lower term than its parent"),
            (
                0 < len(groups) <= self._max_batch,
                f"trained on {len(groups)} groups, allowed are 1 to {self._max_batch}",
            ),
            (
                len(groups) == len(manifest.group_rewards) == len(manifest.group_answers),
                "doesn't give one reward and one count of answers for each group",
            ),
            (manifest.num_groups == parent.num_groups + len(groups), "counts its groups wrongly"),
            (len(set(groups)) == len(groups), "lists a group twice"),
            (all(map(math.isfinite, manifest.group_rewards)), "has a reward that isn't finite"),
            (all(count > 0 for count in manifest.group_answers), "lists a group without answers"),
        )
        for good, fault in rules:
            if not good:
                raise BadRecord(f"the {name} {fault}", peer=who)
        if not self._used(manifest.parent_id).isdisjoint(groups):
            raise BadRecord(f"the {name} trains on a group that its chain already used", peer=who)

    def _used(self, tip: bytes) -> AbstractSet[bytes]:
        """Groups of the chain of `tip`, without moving the line: checking a side branch must not make the head slow."""
        if tip == self._line[-1]:
            return self._trained
        side, used = self._side
        if tip == side:
            return used
        if self._links[tip].parent_id == side and side != BASE_ID:  # a branch that grows costs its own groups alone
            used.update(self._links[tip].group_ids)
            self._side = tip, used
            return used
        fork = self._fork_of(tip)
        used = set(self._trained)
        for manifest_id in self._line[self._depth(fork) + 1 :]:
            used.difference_update(self._links[manifest_id].group_ids)
        for manifest_id in self.branch(fork, tip):
            used.update(self._links[manifest_id].group_ids)
        self._side = tip, used
        return used

    def _focus(self, head: bytes) -> None:
        if head == self._line[-1]:
            return
        if head == self._side[0]:
            self._side = BASE_ID, set()
        fork = self._fork_of(head)
        while self._line[-1] != fork:
            self._trained.difference_update(self._links[self._line.pop()].group_ids)
        for manifest_id in self.branch(fork, head):
            self._line.append(manifest_id)
            self._trained.update(self._links[manifest_id].group_ids)

    def _fork_of(self, manifest_id: bytes) -> bytes:
        """The nearest of it and its ancestors that lies on the line."""
        while not self._on_line(manifest_id):
            manifest_id = self._links[manifest_id].parent_id
        return manifest_id

    def _on_line(self, manifest_id: bytes) -> bool:
        depth = self._depth(manifest_id)
        return depth < len(self._line) and self._line[depth] == manifest_id

    def _depth(self, manifest_id: bytes) -> int:
        return self._links[manifest_id].version.step - self._base_step

    def _order(self, manifest_id: bytes) -> tuple[OrderKey, int]:
        link = self._links[manifest_id]
        return order_key(link.num_groups, link.version), -int.from_bytes(manifest_id, "big")


def _rewards(links: Iterable[Link], *, newest: bool = False) -> Iterator[tuple[float, int]]:
    """(mean reward, answers) of each group in the order of training, or the newest first."""
    for link in links:
        pairs = list(zip(link.group_rewards, link.group_answers, strict=True))
        yield from reversed(pairs) if newest else pairs


def _mean(groups: Iterator[tuple[float, int]], num_answers: int) -> float | None:
    total, count = 0.0, 0
    for reward, answers in groups:
        taken = min(answers, num_answers - count)
        total += reward * taken
        count += taken
        if count >= num_answers:
            break
    return total / count if count else None
