"""What elections are told, answer and go by: rules, facts, events, actions. Decided on in election.py.

In: filled by the driver (events) and by `election.decide` (actions). Out: frozen records, no behaviour.

Invariant: every record that came from a peer was verified before it is put into an event.
"""

from enum import StrEnum

import msgspec

from p2prl.records import Lease, Version, VoteRequest


class Role(StrEnum):
    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    LEADER = "leader"


class Refusal(StrEnum):
    """Why a vote was refused."""

    NOT_NAMED = "not_named"
    NOT_READY = "not_ready"
    LEADING = "leading"
    LEASE_ALIVE = "lease_alive"
    ALREADY_VOTED = "already_voted"
    HEAD_BEHIND = "head_behind"
    BAD_TERM = "bad_term"


class ElectionRules(msgspec.Struct, frozen=True):
    """The clock of a take-over: suspect_s + vote_s + one step is its budget."""

    renew_s: float = 1.0
    suspect_s: float = 3.5
    suspect_after_lag_s: float = 5.0  # our own loop stood still: the missing renewals may wait in our sockets
    vote_s: float = 2.0
    heard_s: float = 5.0
    electorate: int = 7
    rank_delay_s: float = 1.0  # the k-th in rank waits k of these, so that a dead first doesn't block


class Facts(msgspec.Struct, frozen=True):
    """What the driver knows now: members heard within `heard_s` (us too), candidates in rank, our head, ourselves."""

    live: frozenset[str]
    eligible: tuple[str, ...]
    head: Version
    num_groups: int
    can_lead: bool
    manifest_id: bytes = bytes(32)
    lagged: bool = False
    proven: bool = False  # the head is of the term and learner whom we follow (or are)


class Tick(msgspec.Struct, frozen=True):
    """Several times a second, and at once when a fact changed."""

    facts: Facts


class LeaseHeard(msgspec.Struct, frozen=True):
    """`proven`: the lease names a version of its own term and leader that we verified, votes and all."""

    lease: Lease
    proven: bool = False


class HeadMoved(msgspec.Struct, frozen=True):
    """We published a version: a leader renews at once, with the new head."""


class VoteAsked(msgspec.Struct, frozen=True):
    request: VoteRequest


class VoteGiven(msgspec.Struct, frozen=True):
    """The answer of one voter to the request of `term`: its sealed vote, or None with a reason and the lease it knows.

    A voter that did not answer needs no event: the round ends after `vote_s`.
    """

    term: int
    voter: str
    vote: bytes | None
    reason: str = ""
    lease: Lease | None = None


Event = Tick | HeadMoved | LeaseHeard | VoteAsked | VoteGiven


class PersistVote(msgspec.Struct, frozen=True):
    """Write the voted term to disk before the next action of the tuple."""

    term: int


class Grant(msgspec.Struct, frozen=True):
    """Seal a Vote for `request`; reply with it, or, where we are the candidate, feed it back as our own VoteGiven."""

    request: VoteRequest


class Refuse(msgspec.Struct, frozen=True):
    request: VoteRequest
    reason: str


class AskVotes(msgspec.Struct, frozen=True):
    """Call every voter (never ourselves) with `request`, for at most `vote_s`."""

    request: VoteRequest
    voters: tuple[str, ...]


class BecomeLeader(msgspec.Struct, frozen=True):
    """We lead `term`; `votes` (sealed) go into its first manifest."""

    term: int
    votes: tuple[bytes, ...]


class StepDown(msgspec.Struct, frozen=True):
    reason: str


class Renew(msgspec.Struct, frozen=True):
    """Seal and gossip a Lease of this term with the next sequence number."""

    term: int
    sequence: int


Action = PersistVote | Grant | Refuse | AskVotes | BecomeLeader | StepDown | Renew
