"""The nouns of the flow: what travels between rooms, processes and peers. No torch, no I/O.

Wire records are frozen and array-like: fields are told apart by position, new ones are added at the end, never renamed
or reordered. Limits here are the widest any recipe may ask for; admission applies the recipe's own.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

WIRE_SCHEMA = 4
PIECE_BYTES = 4 * 2**20

Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
PeerId = Annotated[str, Meta(min_length=46, max_length=64, pattern=r"^[1-9A-HJ-NP-Za-km-z]+$")]
Address = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=0, le=2**53)]
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Name = Annotated[str, Meta(max_length=128)]
Text = Annotated[str, Meta(max_length=4096)]
StopString = Annotated[str, Meta(min_length=1, max_length=64)]
Tokens = Annotated[tuple[Token, ...], Meta(max_length=2**17)]


class Wire(msgspec.Struct, frozen=True, array_like=True):
    """Base of every record that leaves the process."""


# -- versions and weights -------------------------------------------------------------------------------------------


class Version(Wire, frozen=True, order=True):
    """Which weights: election term, optimiser steps since the base model, blake3 of the bf16 state. Base is (0, 0, h)."""

    term: Count
    step: Count
    hash: Hash

    def __str__(self) -> str:
        return f"{self.term}.{self.step}.{self.hash.hex()[:8]}"


class Content(Wire, frozen=True):
    """One way to get a version: a file that any holder serves in pieces.

    `kind` "anchor": the version's whole state file; "delta": what changed since the version `base`. `pieces` are the
    blake3 of each PIECE_BYTES slice of the file, and `content_hash`, its name, that of `content_bytes` and `pieces`.
    """

    kind: Annotated[str, Meta(max_length=16)]
    base: Version | None
    content_hash: Hash
    content_bytes: Count
    pieces: Annotated[tuple[Hash, ...], Meta(max_length=2**16)]


class Manifest(Wire, frozen=True):
    """A published version. Made by the leader (train loop), consumed by every node (weights loop); sealed by its learner.

    `contents` are ways to get it, the one from `parent` first (an anchor where a delta would not be smaller);
    `version.hash` is the state hash of what each gives. `num_groups` is cumulative along the chain: the parent's plus
    len(group_ids). `group_rewards[i]` is the mean reward of `group_ids[i]`. `votes` (sealed `Vote`s) are there in the
    first manifest of a term. The base model (version 0) has no manifest: `parent_id` of step 1 is 32 zero bytes.
    """

    version: Version
    parent: Version
    parent_id: Hash
    learner: PeerId
    contents: Annotated[tuple[Content, ...], Meta(min_length=1, max_length=4)]
    group_ids: Annotated[tuple[Hash, ...], Meta(max_length=1024)]
    group_rewards: Annotated[tuple[float, ...], Meta(max_length=1024)]
    group_answers: Annotated[tuple[Count, ...], Meta(max_length=1024)]
    num_groups: Count
    rho_on: float
    votes: Annotated[tuple[Annotated[bytes, Meta(max_length=1024)], ...], Meta(max_length=16)]
    metrics: Annotated[dict[Name, float], Meta(max_length=64)]
    published_at: float  # unix seconds, the learner's clock


# -- rollouts -------------------------------------------------------------------------------------------------------


class Sampling(Wire, frozen=True):
    """How answers are drawn. top_p 1.0 and top_k 0 switch the filters off.

    An answer ends with the token that completes one of `stop` in its text (`models.stop_strings`).
    """

    temperature: float
    top_p: float
    top_k: Count
    max_new_tokens: Count
    stop: Annotated[tuple[StopString, ...], Meta(max_length=8)] = ()


class Segment(Wire, frozen=True):
    """A run of tokens drawn under one version: index into the group's `versions`, length in tokens (>= 1).

    Not `drawn`: what the environment gave between two turns. Those tokens' log-probs are 0.0, their version is that of
    the segment before, and nobody learns from them; they are only seen.
    """

    version: Count
    num_tokens: Annotated[int, Meta(ge=1, le=2**17)]
    drawn: bool = True


class Completion(Wire, frozen=True):
    """What an engine drew for one prompt. Made by an engine, consumed by the worker.

    `logprobs`: float32 little-endian, 4 * len(token_ids) bytes, of the distribution sampled from (after temperature).
    `finish_reason`: "stop" (the last of token_ids is an end token, or completes a stop string) or "length".
    """

    token_ids: Tokens
    logprobs: Annotated[bytes, Meta(max_length=2**19)]
    segments: Annotated[tuple[Segment, ...], Meta(max_length=4096)]
    finish_reason: Annotated[str, Meta(max_length=16)]


class Prompt(Wire, frozen=True):
    """One task of the environment. Made by the environment process, consumed by the worker and by admission."""

    index: Count
    text: Annotated[str, Meta(max_length=2**18)]
    token_ids: Tokens


class Trajectory(Wire, frozen=True):
    """A completion with its reward and the reward's reasons."""

    completion: Completion
    reward: float
    detail: Annotated[str, Meta(max_length=256)] = ""


class Group(Wire, frozen=True):
    """One prompt's answers by one node: what learners train on. Made by the worker, sealed by its maker's key.

    All answers start under `versions[0]` with the same sampling parameters. `counter` rises by 1 with each group of the
    maker; the prompt index follows from (maker, versions[0], counter) by the lottery. Its id is the blake3 of its
    sealed payload (`codec.Sealed.id`).
    """

    maker: PeerId
    counter: Count
    environment: Name
    environment_version: Name
    tokenizer_hash: Hash
    prompt_index: Count
    prompt_ids: Tokens
    versions: Annotated[tuple[Version, ...], Meta(min_length=1, max_length=64)]
    trajectories: Annotated[tuple[Trajectory, ...], Meta(min_length=1, max_length=256)]
    sampling: Sampling
    engine: Name
    made_at: float  # unix seconds, the maker's clock


class GroupHeader(Wire, frozen=True):
    """What gossip says of a group: enough to decide whether to pull its body."""

    id: Hash
    content_bytes: Count  # of the sealed group
    version: Version  # of the first token
    num_answers: Count
    reward_mean: float


# -- gossip and control ---------------------------------------------------------------------------------------------


class Announcement(Wire, frozen=True):
    """New groups at one maker. Gossiped, under 1 KiB sealed; bodies are pulled from `maker` or any holder."""

    maker: PeerId
    headers: Annotated[tuple[GroupHeader, ...], Meta(min_length=1, max_length=8)]


class Lease(Wire, frozen=True):
    """The leader's renewal, gossiped each second and with each new version; sealed by the leader.

    `sequence` rises with every renewal of the leader. `manifest_id` is 32 zero bytes while the head is the base model.
    """

    term: Count
    leader: PeerId
    sequence: Count
    head: Version
    manifest_id: Hash
    manifest_bytes: Count
    num_groups: Count


class VoteRequest(Wire, frozen=True):
    """A candidate asks the electorate it names. Sealed by the candidate."""

    term: Count
    candidate: PeerId
    electorate: Annotated[tuple[PeerId, ...], Meta(min_length=1, max_length=7)]
    head: Version
    num_groups: Count


class Vote(Wire, frozen=True):
    """A voter's grant of one term to one candidate; sealed by the voter, carried in the term's first manifest."""

    term: Count
    voter: PeerId
    candidate: PeerId
    electorate: Annotated[tuple[PeerId, ...], Meta(min_length=1, max_length=7)]


class VoteReply(Wire, frozen=True):
    """`vote` is the sealed `Vote` when granted, else empty with the reason; `lease` the sealed lease the voter follows."""

    vote: Annotated[bytes, Meta(max_length=1024)]
    reason: Name
    lease: Annotated[bytes, Meta(max_length=1024)] = b""


class Verdict(Wire, frozen=True):
    """What admission decided on a group; sent to its maker in batches."""

    group_id: Hash
    admitted: bool
    reason: Annotated[str, Meta(max_length=64)]  # "" when admitted, else the reason code
    message: Annotated[str, Meta(max_length=256)] = ""


class PeerInfo(Wire, frozen=True):
    """A node's directory record: soft state, renewed at a third of its lifetime; sealed by the node."""

    peer_id: PeerId
    boot_id: Annotated[bytes, Meta(min_length=8, max_length=8)]
    sequence: Count
    name: Name
    role: Annotated[str, Meta(max_length=16)]
    addresses: Annotated[tuple[Address, ...], Meta(max_length=16)]
    held: Version
    can_learn: bool
    accelerator_bytes: Count  # memory of the best accelerator, 0 without
    software: Name
    wire_schemas: Annotated[tuple[Count, ...], Meta(max_length=8)]


class Hello(Wire, frozen=True):
    """Unprefixed handshake `p2prl/hello`, asked and answered in kind: names wrong network, skewed clock, old version."""

    peer_id: PeerId
    boot_id: Annotated[bytes, Meta(min_length=8, max_length=8)]
    swarm: Hash
    recipe: Name
    wire_schemas: Annotated[tuple[Count, ...], Meta(max_length=8)]
    software: Name
    clock: float  # unix seconds


# -- between the daemon and its learner process ----------------------------------------------------------------------


class DeltaBase(Wire, frozen=True):
    """A version that a delta is wanted from, and its state file."""

    version: Version
    path: str


class StepInput(Wire, frozen=True):
    """One optimiser step's data. `ages[g][v]` is the age in versions of `groups[g].versions[v]` at this step's parent.

    The result is published as a delta from each of `bases`, the parent's first, and whole where `anchor` or no delta pays.
    """

    groups: tuple[Group, ...]
    group_ids: tuple[Hash, ...]
    ages: tuple[tuple[Count, ...], ...]
    parent: Version
    term: Count
    rho_on: float  # 0.0 when not measured yet: measure it on this (fresh) data
    fresh: tuple[Group, ...] = ()  # more groups of version 0, for that measure alone
    bases: tuple[DeltaBase, ...] = ()
    anchor: bool = False


class StepReport(Wire, frozen=True):
    """What the step gave: the new version's state file, the ways to it (all under their names), and metrics.

    `log_ratios[g]`: of the answers of the step's group `g`, new policy's parent over what they were drawn by.
    """

    version: Version
    path: str
    contents: tuple[Content, ...]
    rho_on: float
    metrics: dict[str, float]
    num_answers: Count
    num_tokens: Count
    wall_s: float
    log_ratios: tuple[tuple[float, ...], ...]
