"""What a node takes up from its home when it starts.

In: the store and the weights of an earlier life. Out: chain, head and groups that wait, in the NodeState; notices of what
was corrupt, and of what this release can't read.

Invariants: a manifest counts only as what it hashes to, weights only when their hash is their version's; weights that
another release trained stay; a node whose store was lost votes for nobody until every round that it may have voted in is
over.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from p2prl import codec
from p2prl.errors import PeerError, StoreError, WrongSwarm
from p2prl.node.state import NodeState
from p2prl.records import Group, Hash, Manifest
from p2prl.swarm.head import MissingParent
from p2prl.weights.partial import part_paths
from p2prl.weights.store import WeightStore, wrong_state

SILENT_S = 10.0  # a round of votes takes 2 s, a lease is lost after 3.5 s: by then we heard of the present term


def restore(state: NodeState) -> None:
    """Take up the chain where this home left it: manifests, the newest head whose weights are whole, our groups."""
    state.home.create()
    state.weights.open()
    num_unread = _take_up_chain(state)
    _take_from_older(state)
    _spare_unread(state, num_unread)
    _drop_unread_groups(state)
    usable = [name for name, manifest in state.manifests.items() if state.has_state(manifest.version)]
    state.head_id = _newest_whole(state, [codec.ZERO_HASH, *usable])
    for row in state.store.own_waiting():
        state.wanted.own(state.me, row.header, state.now())
    if state.store.notice:
        state.health["store_corrupt"] = ("warning", state.store.notice, "check the disk", state.clock.unix())
        silent_until = state.now() + SILENT_S
        state.election = msgspec.structs.replace(state.election, silent_until=silent_until)


def _take_up_chain(state: NodeState) -> int:
    """How many manifests of this swarm could not be read."""
    num_unread = 0
    for manifest_id, data in state.store.manifests():
        try:
            sealed = codec.unseal(data, Manifest, state.swarm)
            if sealed.id != manifest_id:
                continue
            state.chain.add(manifest_id, sealed.record)
        except (WrongSwarm, MissingParent):
            continue  # of another recipe, or its parent is gone: fetched again when needed
        except PeerError:
            num_unread += 1
            continue
        state.manifests[manifest_id], state.sealed_manifests[manifest_id] = sealed.record, data
    return num_unread


def _named(manifests: Iterable[Manifest]) -> tuple[set[Hash], set[Hash]]:
    """Their states, their contents."""
    manifests = list(manifests)
    contents = {content.content_hash for manifest in manifests for content in manifest.contents}
    return {manifest.version.hash for manifest in manifests}, contents


def _spare_unread(state: NodeState, num_unread: int) -> None:
    """Another release made them, and it may come back: what lies here and may be theirs is not ours to collect."""
    above = state.home.of(b"")
    older = WeightStore(above.states, above.blobs)  # where releases before had the weights of all recipes
    older.open()
    states, contents = _named(state.manifests.values())
    unread = set[Hash]()
    for held in (state.weights.held, older.held):
        unread |= (held.states.keys() - states) | ((held.contents.keys() | held.parts.keys()) - contents)
    if not num_unread or not unread:
        return
    state.unread = frozenset(unread)
    text = (
        f"{num_unread} versions in the store can't be read by this p2prl: another release made them. {len(unread)} files "
        "of weights that may be theirs are kept"
    )
    fix = (
        "to go on with them, run the release that made them; to give them up, stop the node and run: "
        f"{state.home.command} weights gc --unread"
    )
    state.health["weights_unread"] = ("warning", text, fix, state.clock.unix())


def _drop_unread_groups(state: NodeState) -> None:
    """What waits from another release: nobody could train on it."""
    store, lost = state.store, []
    for row in {row.id: row for row in (*store.own_waiting(), *store.admitted_untrained(), *store.unjudged(10**6))}:
        body = store.body(row)
        try:
            codec.unseal(body or b"", Group, state.swarm)
        except PeerError:
            lost.append(row)
    store.drop(lost, "unread", state.clock.unix())


def _take_from_older(state: NodeState) -> None:
    """Releases before had one folder for the weights of all recipes: what our versions are made of moves into ours."""
    above = state.home.of(b"")
    older = WeightStore(above.states, above.blobs)
    older.open()
    held, (states, contents) = older.held, _named(state.manifests.values())
    ours = state.weights
    for name in states & held.states.keys():
        _move([(older.state_path(name), ours.state_path(name))])
        ours.found_state(name)
    for name in contents & held.contents.keys():
        _move([(older.content_path(name), ours.content_path(name))])
        ours.found_content(name)
    for name in contents & held.parts.keys():
        _move(zip(part_paths(above.blobs, name), part_paths(state.home.blobs, name), strict=True))
        ours.found_part(name)


def _move(pairs: Iterable[tuple[Path, Path]]) -> None:
    for source, target in pairs:
        try:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.replace(source, target)
        except OSError as error:
            raise StoreError(
                f"can't move weights from {source.parent} to {target.parent}: {error.strerror or error}; "
                "give this user both folders"
            ) from error


def _newest_whole(state: NodeState, usable: list[bytes]) -> bytes:
    """The best head whose weights are what its manifest says; others are dropped, to be fetched or made again."""
    while (head := state.chain.best(usable)) != codec.ZERO_HASH:
        version = state.manifests[head].version
        why = wrong_state(state.state_path(version), version.hash)
        if not why:
            return head
        text = f"the weights of version {version} were corrupt ({why[:120]}) and were deleted"
        fix = "check the disk; they are made again, or fetched from a peer"
        state.health["weights_corrupt"] = ("warning", text, fix, state.clock.unix())
        state.weights.drop_state(version.hash)
        usable = [other for other in usable if state.chain.link(other).version.hash != version.hash]
    return head
