"""Single decisions of the election: when to ask, whom to grant, when to step down."""

import msgspec
import pytest

from p2prl.records import Lease, Version, VoteRequest
from p2prl.swarm import election
from p2prl.swarm.election import ElectionState, Facts, Refusal, Role, decide

SWARM = bytes(32)
A, B, C = (f"12D3KooW{letter * 38}" for letter in "abc")
BASE = Version(0, 0, bytes(32))


def facts(*live: str, eligible: tuple[str, ...] = (A, B, C), **over) -> Facts:
    given = {"live": frozenset(live or (A, B, C)), "eligible": eligible, "head": BASE, "num_groups": 0}
    return Facts(**{**given, "can_lead": True, **over})


def node(me: str = A, at: float = 0.0, **over) -> ElectionState:
    state, actions = decide(ElectionState(me=me, swarm=SWARM, **over), election.Tick(facts()), at)
    assert actions == ()
    return state


def lease(leader: str = B, term: int = 1, sequence: int = 0) -> Lease:
    return Lease(term, leader, sequence, BASE, bytes(32), 0, 0)


def hear(state: ElectionState, record: Lease, at: float):
    return decide(state, election.LeaseHeard(record), at)


def request(candidate: str = B, term: int = 1, **over) -> VoteRequest:
    given = {"term": term, "candidate": candidate, "electorate": (A, B, C), "head": BASE, "num_groups": 0}
    return VoteRequest(**{**given, **over})


def kinds(actions) -> list[str]:
    return [type(action).__name__ for action in actions]


def ask_of(state: ElectionState, at: float, given: Facts | None = None):
    state, actions = decide(state, election.Tick(given or facts()), at)
    asks = [action for action in actions if isinstance(action, election.AskVotes)]
    return state, asks[0] if asks else None, actions


def lead(me: str = A, at: float = 4.0) -> ElectionState:
    alone = facts(me, eligible=(me,))
    state, _, _ = ask_of(node(me), at, alone)
    state, actions = decide(state, election.VoteGiven(state.round.request.term, me, b"own"), at)
    assert kinds(actions) == ["BecomeLeader", "Renew"]
    return state


def test_a_node_alone_listens_for_suspect_s_and_then_leads():
    alone = facts(A, eligible=(A,))
    state, ask, actions = ask_of(node(), 3.4, alone)
    assert ask is None and actions == ()
    state, ask, actions = ask_of(state, 3.5, alone)
    assert kinds(actions) == ["PersistVote", "Grant", "AskVotes"]
    assert ask.voters == () and ask.request.electorate == (A,)
    state, actions = decide(state, election.VoteGiven(1, A, b"own"), 3.5)
    assert actions == (election.BecomeLeader(1, (b"own",)), election.Renew(1, 0))
    assert state.role is Role.LEADER and state.leader == A


def test_the_kth_in_rank_waits_k_delays():
    _, ask, _ = ask_of(node(C), 5.4)
    assert ask is None
    _, ask, _ = ask_of(node(C), 5.5)
    assert ask is not None


def test_the_lost_leader_is_neither_ranked_nor_named():
    state, _ = hear(node(A), lease(B), 1.0)
    state, ask, _ = ask_of(state, 4.5, facts(A, B, C, eligible=(B, A, C)))
    assert ask is not None and set(ask.request.electorate) == {A, C}
    assert ask.request.term == 2


def test_renewals_keep_a_follower_quiet_but_replayed_ones_do_not():
    state, _ = hear(node(A), lease(B, sequence=7), 1.0)
    state, _ = hear(state, lease(B, sequence=7), 4.0)
    state, _ = hear(state, lease(B, sequence=6), 4.2)
    state, ask, _ = ask_of(state, 4.5)
    assert ask is not None


def test_an_old_leaders_lease_cant_be_replayed_after_its_successors_died():
    state, _ = hear(node(A), lease(B, term=1, sequence=9), 1.0)
    state, _ = hear(state, lease(C, term=2), 2.0)
    state, _ = hear(state, lease(B, term=1, sequence=9), 9.0)
    assert state.leader == C
    state, _ = hear(state, lease(B, term=1, sequence=10), 9.0)
    assert state.leader == B  # it does live: after a partition the lower term may be the one that leads


def test_after_a_lag_of_its_own_a_node_waits_longer():
    state, _ = hear(node(A), lease(B), 1.0)
    _, ask, _ = ask_of(state, 4.6, facts(lagged=True))
    assert ask is None
    _, ask, _ = ask_of(state, 6.0, facts(lagged=True))
    assert ask is not None


def test_who_cant_lead_never_asks():
    assert ask_of(node(A), 50.0, facts(can_lead=False))[1] is None
    assert ask_of(node(A), 50.0, facts(eligible=(B, C)))[1] is None


def test_a_grant_is_persisted_first_and_given_once():
    state, actions = decide(node(A), election.VoteAsked(request()), 4.0)
    assert actions == (election.PersistVote(1), election.Grant(request()))
    _, actions = decide(state, election.VoteAsked(request(C)), 4.1)
    assert actions == (election.Refuse(request(C), Refusal.ALREADY_VOTED),)


def test_a_vote_outlives_a_restart():
    _, actions = decide(node(A, voted_term=5), election.VoteAsked(request(term=5)), 4.0)
    assert actions == (election.Refuse(request(term=5), Refusal.ALREADY_VOTED),)


@pytest.mark.parametrize(
    "over, reason",
    [
        ({"electorate": (B, C)}, Refusal.NOT_NAMED),
        ({"term": election.MAX_TERM + 1}, Refusal.BAD_TERM),
    ],
)
def test_refused_by_what_the_request_says(over, reason):
    asked = request(**over)
    assert decide(node(A), election.VoteAsked(asked), 4.0)[1] == (election.Refuse(asked, reason),)


def test_refused_while_the_voter_hears_its_leader():
    state, _ = hear(node(A), lease(B), 3.0)
    asked = request(C, term=2)
    assert decide(state, election.VoteAsked(asked), 6.4)[1] == (election.Refuse(asked, Refusal.LEASE_ALIVE),)
    assert kinds(decide(state, election.VoteAsked(asked), 6.5)[1]) == ["PersistVote", "Grant"]


def test_granted_to_the_leader_itself_that_wants_a_new_term():
    state, _ = hear(node(A), lease(B), 3.0)
    assert kinds(decide(state, election.VoteAsked(request(B, term=2)), 3.1)[1]) == ["PersistVote", "Grant"]


def test_refused_in_the_first_seconds_and_before_the_first_tick():
    asked = request()
    assert decide(node(A), election.VoteAsked(asked), 1.0)[1] == (election.Refuse(asked, Refusal.LEASE_ALIVE),)
    fresh = ElectionState(me=A, swarm=SWARM)
    assert decide(fresh, election.VoteAsked(asked), 9.0)[1] == (election.Refuse(asked, Refusal.NOT_READY),)


@pytest.mark.parametrize(
    "num_groups, head, granted",
    [
        (31, Version(9, 9, bytes(32)), False),
        (32, Version(1, 8, bytes(32)), False),
        (32, Version(2, 7, bytes(32)), True),
        (33, Version(0, 1, bytes(32)), True),
    ],
)
def test_refused_to_a_head_behind_ours_in_chain_order(num_groups, head, granted):
    own = facts(head=Version(2, 7, bytes(32)), num_groups=32)
    state, _ = decide(node(C), election.Tick(own), 4.0)
    asked = request(term=10, num_groups=num_groups, head=head)
    _, actions = decide(state, election.VoteAsked(asked), 4.0)
    assert kinds(actions) == (["PersistVote", "Grant"] if granted else ["Refuse"])


def test_a_leader_refuses_and_renews_each_second():
    state = lead(at=4.0)
    asked = request(term=9)
    assert decide(state, election.VoteAsked(asked), 4.1)[1] == (election.Refuse(asked, Refusal.LEADING),)
    alone = facts(A, eligible=(A,))
    assert decide(state, election.Tick(alone), 4.9)[1] == ()
    assert decide(state, election.Tick(alone), 5.0)[1] == (election.Renew(1, 1),)


def test_a_new_version_renews_at_once_and_only_a_leader():
    assert decide(lead(at=4.0), election.HeadMoved(), 4.1)[1] == (election.Renew(1, 1),)
    assert decide(node(A), election.HeadMoved(), 4.1)[1] == ()


def test_a_leader_yields_to_a_higher_term_only():
    state = lead(at=4.0)
    assert hear(state, lease(B, term=0), 4.5)[1] == ()
    state, actions = hear(state, lease(B, term=2), 4.5)
    assert kinds(actions) == ["StepDown"] and (state.role, state.leader) == (Role.FOLLOWER, B)


def test_of_two_leaders_of_one_term_exactly_one_yields():
    (one, _), (two, _) = (hear(lead(me), lease(other, term=1), 4.5) for me, other in ((A, B), (B, A)))
    assert sorted([one.role, two.role]) == [Role.FOLLOWER, Role.LEADER]
    assert one.leader == two.leader


def test_a_leader_whose_learner_died_steps_down():
    state, actions = decide(lead(), election.Tick(facts(can_lead=False)), 4.2)
    assert kinds(actions) == ["StepDown"] and state.role is Role.FOLLOWER


def test_a_leader_whose_chain_has_a_higher_term_gets_itself_a_new_one():
    merged = facts(A, B, eligible=(A, B), head=Version(6, 3, bytes(32)))
    state, actions = decide(lead(), election.Tick(merged), 4.2)
    assert kinds(actions) == ["StepDown", "PersistVote", "Grant", "AskVotes"]
    assert state.round.request.term == 7


def test_a_majority_wins_and_strangers_and_late_votes_dont_count():
    state, ask, _ = ask_of(node(A), 3.5)
    term = ask.request.term
    state, actions = decide(state, election.VoteGiven(term, "stranger", b"x"), 3.6)
    assert actions == ()
    state, actions = decide(state, election.VoteGiven(term - 1, B, b"x"), 3.6)
    assert actions == ()
    for _ in range(3):  # one voter, however often
        state, actions = decide(state, election.VoteGiven(term, A, b"a"), 3.6)
        assert actions == ()
    state, actions = decide(state, election.VoteGiven(term, C, b"c"), 3.7)
    assert actions == (election.BecomeLeader(term, (b"a", b"c")), election.Renew(term, 0))


def test_a_round_without_majority_ends_after_vote_s_and_is_tried_again_higher():
    state, ask, _ = ask_of(node(A), 3.5)
    state, again, _ = ask_of(state, 5.4)
    assert again is None and state.round is not None
    state, again, _ = ask_of(state, 5.5)
    assert again is None and state.round is None
    state, again, _ = ask_of(state, 5.5 + 1.2)
    assert again is not None and again.request.term == ask.request.term + 1


def test_refusals_end_a_round_early_and_outvoted_terms_are_overtaken():
    state = node(A)
    now, terms = 3.5, []
    for _ in range(4):
        state, ask, _ = ask_of(state, now)
        terms.append(ask.request.term)
        for voter in (B, C):
            given = election.VoteGiven(ask.request.term, voter, None, Refusal.ALREADY_VOTED)
            state, _ = decide(state, given, now)
        assert state.round is None
        now += 7.0
    assert terms == [1, 3, 7, 15]


def test_a_refusing_voters_live_lease_is_followed_a_dead_one_is_not():
    state, ask, _ = ask_of(node(A), 3.5)
    dead = election.VoteGiven(1, B, None, Refusal.ALREADY_VOTED, lease(C, term=4))
    assert decide(state, dead, 3.6)[0].leader == ""
    alive = election.VoteGiven(1, B, None, Refusal.LEASE_ALIVE, lease(C, term=4))
    assert decide(state, alive, 3.6)[0].leader == C


def test_our_own_lease_coming_round_moves_nothing_but_the_term():
    state, actions = hear(node(A), lease(A, term=6), 1.0)
    assert (state.leader, state.seen_term, actions) == ("", 6, ())


def test_absurd_terms_are_ignored():
    state, _ = hear(node(A), lease(B, term=2**50), 1.0)
    assert (state.leader, state.seen_term) == ("", 0)


def test_standby_is_the_next_in_rank():
    state, _ = hear(node(A), lease(B), 1.0)
    assert election.standby(state, (B, A, C)) == A
    assert election.standby(state, (B,)) is None
    assert election.suspect_at(state) == 4.5


def test_states_are_values():
    state = node(A)
    copy = msgspec.structs.replace(state)
    assert decide(state, election.VoteAsked(request()), 4.0) == decide(copy, election.VoteAsked(request()), 4.0)


def test_who_may_have_forgotten_a_vote_is_silent_for_a_while():
    alone = facts(A, eligible=(A,))
    state = node(silent_until=10.0)
    state, actions = decide(state, election.VoteAsked(request()), 9.9)
    assert actions == (election.Refuse(request(), Refusal.NOT_READY),)
    state, ask, _ = ask_of(state, 9.9, alone)
    assert ask is None
    granted, actions = decide(state, election.VoteAsked(request()), 10.0)
    assert kinds(actions) == ["PersistVote", "Grant"]
    state, ask, _ = ask_of(state, 10.0, alone)
    assert ask is not None


# -- claims --------------------------------------------------------------------------------------------------------


def follower(at: float = 1.0) -> ElectionState:
    """A follows B in term 1, whose version of that term A has verified."""
    state, _ = decide(node(), election.LeaseHeard(lease(B)), at)
    state, _ = decide(state, election.Tick(facts(proven=True)), at)
    return state


def test_a_claim_without_a_version_unseats_no_living_leader():
    state = follower()
    state, actions = hear(state, lease(C, term=2), 1.5)
    assert (state.leader, state.term, actions) == (B, 1, ())
    state, _ = decide(state, election.LeaseHeard(lease(C, term=2, sequence=1), proven=True), 1.6)
    assert (state.leader, state.term) == (C, 2)


def test_a_leader_that_published_does_not_step_down_for_a_claim():
    state = lead()
    state, _ = decide(state, election.Tick(facts(proven=True)), 4.1)
    state, actions = hear(state, lease(C, term=9), 4.2)
    assert state.role is Role.LEADER and actions == ()
    state, actions = decide(state, election.LeaseHeard(lease(C, term=9, sequence=1), proven=True), 4.3)
    assert state.role is Role.FOLLOWER and kinds(actions) == ["StepDown"]


def test_whom_we_voted_for_is_followed_at_once():
    state = follower()
    state, actions = decide(state, election.VoteAsked(request(C, term=2)), 20.0)
    assert "Grant" in kinds(actions)
    state, _ = decide(state, election.Tick(facts(proven=True)), 20.0)
    state, _ = hear(state, lease(B, sequence=5), 20.1)  # the old one is back
    state, _ = hear(state, lease(C, term=2), 20.2)
    assert (state.leader, state.term) == (C, 2)


def test_when_the_leader_is_silent_a_claim_is_better_than_nothing():
    state, _ = hear(follower(), lease(C, term=2), 30.0)
    assert state.leader == C


@pytest.mark.parametrize("term", [election.MAX_JUMP + 2, 2**39, election.MAX_TERM])
def test_no_claim_uses_up_the_terms(term: int):
    state = follower()
    for sequence in range(3):
        state, _ = hear(state, lease(C, term=term, sequence=sequence), 30.0)
        state, actions = decide(state, election.VoteAsked(request(C, term=term)), 30.0)
        assert actions == (election.Refuse(request(C, term=term), Refusal.BAD_TERM),)
    state, ask, _ = ask_of(state, 60.0, facts(A, C, eligible=(A, C)))
    assert ask is not None and ask.request.term <= election.MAX_JUMP + 2


def test_a_far_term_that_a_version_proves_is_followed():
    state, _ = decide(node(), election.LeaseHeard(lease(B, term=5000), proven=True), 1.0)
    assert (state.leader, state.term) == (B, 5000)
