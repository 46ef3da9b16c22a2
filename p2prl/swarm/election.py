"""Who leads: a lease per term, won by a majority of a small electorate, renewed by gossip.

In: `ElectionState`, an event (Tick, LeaseHeard, VoteAsked, VoteGiven), monotonic seconds. Out: the next state and the
actions that the driver carries out in their order. Records arrive verified: the driver has checked signatures, that the
signer is the leader, candidate or voter that the record names, and that the recipe allows it to learn.

Invariants: a voter grants a term once, and `PersistVote` comes before the `Grant` it covers, so a restart forgets no
vote; hence no voter stands behind two winners of one term, and two candidates who name the same electorate can't both
win. Two leaders of one term need different views of who lives (a partition: a lone survivor may lead). That is
harmless by the chain order (head.py); the higher (term, blake3 of peer id) stays when they hear each other. A leader
whom nobody hears goes on for the same reason: it cannot know whether it is alone.
"""

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Protocol

import msgspec
from blake3 import blake3

from p2prl.records import Lease, Version, VoteRequest

MAX_TERM = 2**40  # a lease or request beyond is ignored: nobody may push terms to the end of what records carry


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


# -- events ---------------------------------------------------------------------------------------------------------


class Tick(msgspec.Struct, frozen=True):
    """Several times a second, and at once when a fact changed."""

    facts: Facts


class LeaseHeard(msgspec.Struct, frozen=True):
    lease: Lease


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


Event = Tick | LeaseHeard | VoteAsked | VoteGiven


# -- actions --------------------------------------------------------------------------------------------------------


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


# -- state ----------------------------------------------------------------------------------------------------------


class Round(msgspec.Struct, frozen=True):
    """One attempt of ours: the request, the votes that came, who refused."""

    request: VoteRequest
    ends_at: float
    votes: tuple[tuple[str, bytes], ...] = ()
    refused: frozenset[str] = frozenset()


class ElectionState(msgspec.Struct, frozen=True):
    """`voted_term` is what PersistVote last wrote; all times are monotonic seconds of this process."""

    me: str
    swarm: bytes
    voted_term: int = 0
    rules: ElectionRules = ElectionRules()
    role: Role = Role.FOLLOWER
    term: int = 0  # of the lease we follow or lead
    leader: str = ""  # of that term; "" while none was heard
    sequence: int = -1  # of the newest renewal of that leader; of our own while we lead
    seen_term: int = 0  # the highest anyone spoke of
    listening_since: float | None = None  # when we began, or last stopped leading
    lease_at: float | None = None  # last renewal heard, or sent while we lead
    not_before: float = 0.0  # we don't ask for votes sooner
    attempts: int = 0  # failed rounds since the last lease
    outvoted: int = 0  # rounds of these that failed on ALREADY_VOTED: each doubles the step to the next term
    round: Round | None = None
    facts: Facts | None = None


Decision = tuple[ElectionState, tuple[Action, ...]]


def decide(state: ElectionState, event: Event, now: float) -> Decision:
    """The whole of the election; every event of the driver goes through here."""
    match event:
        case Tick(facts):
            return _on_tick(state, facts, now)
        case LeaseHeard(lease):
            return _on_lease(state, lease, now)
        case VoteAsked(request):
            return _on_request(state, request, now)
        case VoteGiven():
            return _on_vote(state, event, now)


def suspect_at(state: ElectionState) -> float | None:
    """When the lease is lost unless a renewal comes; None before the first tick."""
    if state.listening_since is None:
        return None
    lagged = state.facts is not None and state.facts.lagged
    patience_s = state.rules.suspect_after_lag_s if lagged else state.rules.suspect_s
    last = state.listening_since if state.lease_at is None else state.lease_at
    return last + patience_s


def standby(state: ElectionState, eligible: Iterable[str]) -> str | None:
    """Who keeps a warm learner: the first in rank beside the leader."""
    return next((peer for peer in eligible if peer != state.leader), None)


# -- transitions ----------------------------------------------------------------------------------------------------


def _on_tick(state: ElectionState, facts: Facts, now: float) -> Decision:
    since = now if state.listening_since is None else state.listening_since
    state = _set(state, facts=facts, listening_since=since)
    if state.role is Role.LEADER:
        if not facts.can_lead:
            return _step_down(state, now), (StepDown("this node can't lead now"),)
        if state.lease_at is None or now - state.lease_at >= state.rules.renew_s:
            return _renew(state, now)
        return state, ()
    if state.round is not None:
        if now < state.round.ends_at:
            return state, ()
        state = _fail_round(state, now)
    if _may_ask(state, facts, now):
        return _ask(state, facts, now)
    return state, ()


def _on_lease(state: ElectionState, lease: Lease, now: float) -> Decision:
    if lease.term > MAX_TERM:
        return state, ()
    state = _set(state, seen_term=max(state.seen_term, lease.term))
    if lease.leader == state.me:
        return state, ()  # our own, sent round, or of our life before a restart
    newer = lease.sequence > state.sequence if (lease.term, lease.leader) == (state.term, state.leader) else None
    if newer is None:
        newer = _rank_of_lease(lease.term, lease.leader) > _rank_of_lease(state.term, state.leader)
    if not newer:
        return state, ()
    actions: tuple[Action, ...] = ()
    if state.role is Role.LEADER:
        actions = (StepDown(f"{lease.leader} leads term {lease.term}, ours is {state.term}"),)
    followed = _set(
        state,
        role=Role.FOLLOWER,
        term=lease.term,
        leader=lease.leader,
        sequence=lease.sequence,
        lease_at=now,
    )
    return _set(followed, round=None, attempts=0, outvoted=0, not_before=0.0), actions


def _on_request(state: ElectionState, request: VoteRequest, now: float) -> Decision:
    refusal = _refusal(state, request, now)
    if request.term <= MAX_TERM:
        state = _set(state, seen_term=max(state.seen_term, request.term))
    if refusal is not None:
        return state, (Refuse(request, refusal),)
    # Leave the candidate the time to win; our own round of a lower term ends.
    wait = now + state.rules.vote_s + state.rules.rank_delay_s * _jitter(state, request.term)
    state = _set(state, voted_term=request.term, round=None, role=Role.FOLLOWER, not_before=wait)
    return state, (PersistVote(request.term), Grant(request))


def _on_vote(state: ElectionState, given: VoteGiven, now: float) -> Decision:
    if given.lease is not None and given.lease.term > max(state.term, given.term - 1):
        return _on_lease(state, given.lease, now)  # somebody won without us
    race = state.round
    if race is None or given.term != race.request.term or given.voter not in race.request.electorate:
        return state, ()
    if given.voter in race.refused or any(voter == given.voter for voter, _ in race.votes):
        return state, ()
    num_named = len(race.request.electorate)
    needed = num_named // 2 + 1
    if given.vote is None:
        race = msgspec.structs.replace(race, refused=race.refused | {given.voter})
        state = _set(state, round=race)
        if num_named - len(race.refused) < needed:
            return _fail_round(state, now, given.reason), ()
        return state, ()
    race = msgspec.structs.replace(race, votes=(*race.votes, (given.voter, given.vote)))
    if len(race.votes) < needed:
        return _set(state, round=race), ()
    term = race.request.term
    state = _set(state, role=Role.LEADER, term=term, leader=state.me, sequence=-1, round=None)
    state, renewal = _renew(_set(state, attempts=0, outvoted=0), now)
    return state, (BecomeLeader(term, tuple(vote for _, vote in race.votes)), *renewal)


def _refusal(state: ElectionState, request: VoteRequest, now: float) -> Refusal | None:
    if state.me not in request.electorate:
        return Refusal.NOT_NAMED
    if request.term > MAX_TERM:
        return Refusal.BAD_TERM
    if state.facts is None:
        return Refusal.NOT_READY
    if state.role is Role.LEADER:
        return Refusal.LEADING
    # The leader itself asking for a new term has given up its lease (it restarted).
    if not _expired(state, now) and request.candidate != state.leader:
        return Refusal.LEASE_ALIVE
    if request.term <= max(state.voted_term, state.term):
        return Refusal.ALREADY_VOTED
    own, theirs = state.facts, request
    if (theirs.num_groups, theirs.head.term, theirs.head.step) < (
        own.num_groups,
        own.head.term,
        own.head.step,
    ):
        return Refusal.HEAD_BEHIND
    return None


def _may_ask(state: ElectionState, facts: Facts, now: float) -> bool:
    deadline = suspect_at(state)
    if deadline is None or not facts.can_lead or state.me not in facts.eligible:
        return False
    others = [peer for peer in facts.eligible if peer != state.leader or peer == state.me]
    return now >= max(deadline + others.index(state.me) * state.rules.rank_delay_s, state.not_before)


def _ask(state: ElectionState, facts: Facts, now: float) -> Decision:
    term = max(state.seen_term, state.voted_term, state.term) + 2 ** min(state.outvoted, 16)
    if term > MAX_TERM:
        return state, ()
    members = (facts.live | {state.me}) - ({state.leader} - {state.me})  # it may still count as heard: it isn't alive
    voters = electorate(state.swarm, term, members, state.rules.electorate)
    request = VoteRequest(
        term=term,
        candidate=state.me,
        electorate=voters,
        head=facts.head,
        num_groups=facts.num_groups,
    )
    state = _set(
        state,
        role=Role.CANDIDATE,
        seen_term=term,
        round=Round(request, now + state.rules.vote_s),
    )
    ask = AskVotes(request, tuple(voter for voter in voters if voter != state.me))
    if state.me not in voters:
        return state, (ask,)
    return _set(state, voted_term=term), (PersistVote(term), Grant(request), ask)


def _fail_round(state: ElectionState, now: float, reason: str = "") -> ElectionState:
    assert state.round is not None
    pause_s = state.rules.rank_delay_s * _jitter(state, state.round.request.term)
    if reason == Refusal.HEAD_BEHIND and state.facts is not None:
        pause_s += state.rules.rank_delay_s * len(state.facts.eligible)  # let those with the newer head ask
    outvoted = state.outvoted + 1 if reason == Refusal.ALREADY_VOTED else state.outvoted
    state = _set(
        state,
        role=Role.FOLLOWER,
        round=None,
        attempts=state.attempts + 1,
        outvoted=outvoted,
    )
    return _set(state, not_before=now + pause_s)


def _renew(state: ElectionState, now: float) -> Decision:
    state = _set(state, sequence=state.sequence + 1, lease_at=now)
    return state, (Renew(state.term, state.sequence),)


def _step_down(state: ElectionState, now: float) -> ElectionState:
    state = _set(state, role=Role.FOLLOWER, leader="", sequence=-1, round=None)
    return _set(state, lease_at=None, listening_since=now)


def _expired(state: ElectionState, now: float) -> bool:
    deadline = suspect_at(state)
    return deadline is not None and now >= deadline


def _jitter(state: ElectionState, term: int) -> float:
    """In [0.2, 1.2), the same in every run, different for each peer and term: breaks ties of candidates."""
    digest = blake3(state.swarm + b"jitter%d" % term + state.me.encode()).digest()
    return 0.2 + int.from_bytes(digest[:4], "big") / 2**32


def _rank_of_lease(term: int, leader: str) -> tuple[int, bytes]:
    return term, blake3(leader.encode()).digest() if leader else b""


def _set(state: ElectionState, **changes: object) -> ElectionState:
    return msgspec.structs.replace(state, **changes)


# -- rank and electorate --------------------------------------------------------------------------------------------


class Candidate(Protocol):
    """What ranking reads of a directory record."""

    @property
    def can_learn(self) -> bool: ...

    @property
    def accelerator_bytes(self) -> int: ...


def rank(peers: Mapping[str, Candidate], swarm: bytes) -> tuple[str, ...]:
    """Those that can learn, best first: the larger class of accelerator memory, then by a hash, equal on every node."""
    able = [peer for peer, info in peers.items() if info.can_learn]
    return tuple(
        sorted(
            able,
            key=lambda peer: (
                -memory_class(peers[peer].accelerator_bytes),
                _place(swarm, peer),
            ),
        )
    )


def memory_class(accelerator_bytes: int) -> int:
    """Doublings from 4 GiB on; below and without an accelerator 0: like machines rank by the hash, not by a few MB."""
    return max(0, (accelerator_bytes >> 32).bit_length())


def electorate(swarm: bytes, term: int, members: Iterable[str], size: int) -> tuple[str, ...]:
    """The `size` members nearest (XOR of hashes) to blake3(swarm, term), nearest first."""
    point = int.from_bytes(blake3(swarm + b"electorate%d" % term).digest(), "big")
    nearness = sorted((int.from_bytes(blake3(peer.encode()).digest(), "big") ^ point, peer) for peer in set(members))
    return tuple(peer for _, peer in nearness[:size])


def _place(swarm: bytes, peer: str) -> bytes:
    return blake3(swarm + peer.encode()).digest()
