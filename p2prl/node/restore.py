"""What a node takes up from its home when it starts.

In: the store and the weights of an earlier life. Out: chain, head and groups that wait, in the NodeState; notices of what
was corrupt.

Invariants: a manifest counts only as what it hashes to, weights only when their hash is their version's; a node whose
store was lost votes for nobody until every round that it may have voted in is over.
"""

import msgspec

from p2prl import codec
from p2prl.errors import PeerError
from p2prl.node.state import NodeState
from p2prl.records import Manifest
from p2prl.weights.store import wrong_state

SILENT_S = 10.0  # a round of votes takes 2 s, a lease is lost after 3.5 s: by then we heard of the present term


def restore(state: NodeState) -> None:
    """Take up the chain where this home left it: manifests, the newest head whose weights are whole, our groups."""
    state.weights.open()
    usable = [codec.ZERO_HASH]
    for manifest_id, data in state.store.manifests():
        try:
            sealed = codec.unseal(data, Manifest, state.swarm)
            manifest = sealed.record
            if sealed.id != manifest_id:
                continue
            state.chain.add(manifest_id, manifest)
        except PeerError:
            continue  # of another recipe, or its parent is gone: fetched again when needed
        state.manifests[manifest_id], state.sealed_manifests[manifest_id] = manifest, data
        if state.has_state(manifest.version):
            usable.append(manifest_id)
    state.head_id = _newest_whole(state, usable)
    for row in state.store.own_waiting():
        state.wanted.own(state.me, row.header, state.now())
    if state.store.notice:
        state.health["store_corrupt"] = ("warning", state.store.notice, "check the disk", state.clock.unix())
        silent_until = state.now() + SILENT_S
        state.election = msgspec.structs.replace(state.election, silent_until=silent_until)


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
