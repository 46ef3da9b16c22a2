"""Who leads: a lease per term, won by a majority of a small electorate, renewed by gossip.

In: `ElectionState`, an event (of ballot.py), monotonic seconds. Out: the next state and the
actions that the driver carries out in their order. Records arrive verified: the driver has checked signatures, that the
signer is the leader, candidate or voter that the record names, and that the recipe allows it to learn.

Invariants: a voter grants a term once, and `PersistVote` comes before the `Grant` it covers, so a restart forgets no
vote; hence no voter stands behind two winners of one term, and two candidates who name the same electorate can't both
win. A lease is a claim: while the leader we follow lives and has published in its term, another takes its place only
with a version that was verified here, or our own vote; and no claim moves terms far (MAX_JUMP) unless a version proves
it, so that a stranger can neither unseat a leader nor use up the terms. Two leaders of one term need different views of
who lives (a partition: a lone survivor may lead). That is harmless by the chain order (head.py); the higher (term,
blake3 of peer id) stays when they hear each other. A leader whom nobody hears goes on for the same reason: it cannot
know whether it is alone.
"""

from collections.abc import Iterable

import msgspec
from blake3 import blake3

from p2prl.records import Lease, VoteRequest
from p2prl.swarm.ballot import (
    Action,
    AskVotes,
    BecomeLeader,
    ElectionRules,
    Event,
    Facts,
    Grant,
    HeadMoved,
    LeaseHeard,
    PersistVote,
    Refusal,
    Refuse,
    Renew,
    Role,
    StepDown,
    Tick,
    VoteAsked,
    VoteGiven,
)
from p2prl.swarm.rank import electorate, rank

__all__ = [
    "Action",
    "AskVotes",
    "BecomeLeader",
    "ElectionRules",
    "ElectionState",
    "Event",
    "Facts",
    "Grant",
    "HeadMoved",
    "LeaseHeard",
    "PersistVote",
    "Refusal",
    "Refuse",
    "Renew",
    "Role",
    "Round",
    "StepDown",
    "Tick",
    "VoteAsked",
    "VoteGiven",
    "decide",
    "rank",
    "standby",
    "suspect_at",
]

KEPT_LEASES = 8
MAX_TERM = 2**40  # a lease or request beyond is ignored: nobody may push terms to the end of what records carry
MAX_JUMP = 1024  # terms beyond what we voted for, followed or verified that a claim may name
MAX_DOUBLINGS = 9  # of our own step to the next term: below MAX_JUMP


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
    past: tuple[tuple[int, str, int], ...] = ()  # (term, leader, sequence) followed before: not to be replayed
    seen_term: int = 0  # the highest anyone spoke of
    listening_since: float | None = None  # when we began, or last stopped leading
    lease_at: float | None = None  # last renewal heard, or sent while we lead
    not_before: float = 0.0  # we don't ask for votes sooner
    silent_until: float = (
        0.0  # we don't vote sooner, not for ourselves either: the votes of an earlier life are unknown
    )
    attempts: int = 0  # failed rounds since the last lease
    outvoted: int = 0  # rounds of these that failed on ALREADY_VOTED: each doubles the step to the next term
    granted: tuple[int, str] = (0, "")  # the term and candidate that we voted for last
    round: Round | None = None
    facts: Facts | None = None


Decision = tuple[ElectionState, tuple[Action, ...]]


def decide(state: ElectionState, event: Event, now: float) -> Decision:
    """The whole of the election; every event of the driver goes through here."""
    match event:
        case Tick(facts):
            return _on_tick(state, facts, now)
        case HeadMoved():
            return _renew(state, now) if state.role is Role.LEADER else (state, ())
        case LeaseHeard(lease, proven):
            return _on_lease(state, lease, now, proven)
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
        if facts.head.term > state.term:  # after a partition: a manifest's term may not be below its parent's
            state, actions = _ask(_step_down(state, now), facts, now)
            return state, (StepDown(f"the chain has come to term {facts.head.term}, ours is {state.term}"), *actions)
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


def _on_lease(state: ElectionState, lease: Lease, now: float, proven: bool = False) -> Decision:
    if lease.term > MAX_TERM or not (proven or _is_near(state, lease.term)):
        return state, ()
    state = _set(state, seen_term=max(state.seen_term, lease.term))
    # Our own comes round, also from our life before a restart.
    if lease.leader == state.me or not _is_news(state, lease, now) or not (proven or _is_credible(state, lease, now)):
        return state, ()
    actions: tuple[Action, ...] = ()
    if state.role is Role.LEADER:
        actions = (StepDown(f"{lease.leader} leads term {lease.term}, ours is {state.term}"),)
    past = state.past
    if (lease.term, lease.leader) != (state.term, state.leader) and state.leader:
        past = (*state.past, (state.term, state.leader, state.sequence))[-KEPT_LEASES:]
    state = _set(state, role=Role.FOLLOWER, term=lease.term, leader=lease.leader, past=past)
    state = _set(state, sequence=lease.sequence, lease_at=now, round=None)
    return _set(state, attempts=0, outvoted=0, not_before=0.0), actions


def _is_news(state: ElectionState, lease: Lease, now: float) -> bool:
    """Whether to follow this renewal from now on."""
    if (lease.term, lease.leader) == (state.term, state.leader):
        return lease.sequence > state.sequence
    for term, leader, sequence in state.past:
        if (lease.term, lease.leader) == (term, leader) and lease.sequence <= sequence:
            return False
    if _rank_of_lease(lease.term, lease.leader) > _rank_of_lease(state.term, state.leader):
        return True
    # After a partition the living leader may be the one of the lower term: better than none.
    return state.role is not Role.LEADER and _expired(state, now)


def _is_near(state: ElectionState, term: int) -> bool:
    """Whether elections may have come to this term since we last knew."""
    head_term = state.facts.head.term if state.facts is not None else 0
    return term <= max(state.term, state.voted_term, head_term) + MAX_JUMP


def _is_credible(state: ElectionState, lease: Lease, now: float) -> bool:
    """A claim without a version that proves it, against the leader we have: see the module's invariants."""
    if lease.leader == state.leader or (lease.term, lease.leader) == state.granted:
        return True
    followed = state.leader and state.facts is not None and state.facts.proven
    return not followed or (state.role is not Role.LEADER and _expired(state, now))


def _on_request(state: ElectionState, request: VoteRequest, now: float) -> Decision:
    refusal = _refusal(state, request, now)
    if request.term <= MAX_TERM and _is_near(state, request.term):
        state = _set(state, seen_term=max(state.seen_term, request.term))
    if refusal is not None:
        return state, (Refuse(request, refusal),)
    # Leave the candidate the time to win; our own round of a lower term ends.
    wait = now + state.rules.vote_s + state.rules.rank_delay_s * _jitter(state, request.term)
    state = _set(state, voted_term=request.term, round=None, role=Role.FOLLOWER, not_before=wait)
    state = _set(state, granted=(request.term, request.candidate))
    return state, (PersistVote(request.term), Grant(request))


def _on_vote(state: ElectionState, given: VoteGiven, now: float) -> Decision:
    alive = given.reason in (Refusal.LEASE_ALIVE, Refusal.LEADING)
    if given.lease is not None and alive and given.lease.term > state.term:
        return _on_lease(state, given.lease, now)  # somebody won, and we did not hear it
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
    if request.term > MAX_TERM or not _is_near(state, request.term):
        return Refusal.BAD_TERM
    if state.facts is None or now < state.silent_until:
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
    turn = deadline + others.index(state.me) * state.rules.rank_delay_s
    return now >= max(turn, state.not_before, state.silent_until)


def _ask(state: ElectionState, facts: Facts, now: float) -> Decision:
    term = max(state.seen_term, state.voted_term, state.term, facts.head.term) + 2 ** min(state.outvoted, MAX_DOUBLINGS)
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
    # Longer with each failure: a node that hears no leader while the others do must not ask all day.
    pause_s = state.rules.rank_delay_s * _jitter(state, state.round.request.term) * min(state.attempts + 1, 5)
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
