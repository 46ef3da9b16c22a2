"""The election over a lossy network with crashes and partitions: safety always, a leader soon after the trouble ends.

A few deciders on a heap of timed messages: no loop, no I/O, so that hypothesis can try many schedules.
"""

import heapq
import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from p2prl.records import Lease, Version
from p2prl.swarm import election
from p2prl.swarm.election import ElectionState, Facts, Role, decide

SWARM = bytes(range(32))
BASE = Version(0, 0, bytes(32))
TICK_S = 0.25


def peer(i: int) -> str:
    return f"12D3KooW{'abcdefghijkmnopqrstuvwxyz'[i] * 38}"


class Swarm:
    """N drivers of `decide`; votes survive a crash, nothing else does."""

    def __init__(self, num_nodes: int, seed: int, *, loss: float = 0.0, delay_s: float = 0.15) -> None:
        self.random = random.Random(seed)
        self.loss = loss
        self.delay_s = delay_s
        self.peers = [peer(i) for i in range(num_nodes)]
        self.ranked = election.rank({p: Ability(True, 0) for p in self.peers}, SWARM)
        self.disk = dict.fromkeys(self.peers, 0)
        self.states: dict[str, ElectionState] = {}
        self.heard: dict[str, dict[str, float]] = {}
        self.life = dict.fromkeys(self.peers, 0)
        self.wall: frozenset[str] = frozenset()
        self.winners: list[tuple[float, int, str, tuple[str, ...], tuple[bytes, ...]]] = []
        self.trace: list[tuple[float, str, str]] = []
        self.now = 0.0
        self.queue: list[tuple[float, int, str, int, object]] = []
        self.order = itertools.count()
        for p in self.peers:
            self.start(p)

    def start(self, p: str) -> None:
        self.states[p] = ElectionState(me=p, swarm=SWARM, voted_term=self.disk[p])
        self.heard[p] = {}
        self.push(p, self.random.uniform(0, TICK_S), None)

    def crash(self, p: str) -> None:
        del self.states[p]
        self.life[p] += 1

    def push(self, p: str, after_s: float, event: object) -> None:
        heapq.heappush(self.queue, (self.now + after_s, next(self.order), p, self.life[p], event))

    def send(self, source: str, target: str, event: object) -> None:
        if self.random.random() >= self.loss:
            self.push(target, self.random.uniform(0.001, self.delay_s), (source, event))

    def run(self, for_s: float) -> None:
        end = self.now + for_s
        while self.queue and self.queue[0][0] <= end:
            self.now, _, p, life, event = heapq.heappop(self.queue)
            if p not in self.states or life != self.life[p]:
                continue
            if event is None:
                self.push(p, TICK_S, None)
                for other in self.peers:
                    if other != p:
                        self.send(p, other, "alive")
                self.step(p, election.Tick(self.facts(p)))
                continue
            source, message = event
            if (source in self.wall) == (p in self.wall):
                self.heard[p][source] = self.now
                if message != "alive":
                    self.step(p, message, source)
        self.now = end

    def facts(self, p: str) -> Facts:
        live = frozenset([p, *(q for q, at in self.heard[p].items() if self.now - at <= 5.0)])
        return Facts(live, tuple(q for q in self.ranked if q in live), BASE, 0, can_lead=True)

    def step(self, p: str, event: object, source: str = "") -> None:
        race = self.states[p].round
        self.states[p], actions = decide(self.states[p], event, self.now)
        persisted = self.disk[p]
        for action in actions:
            self.trace.append((round(self.now, 6), p, type(action).__name__))
            match action:
                case election.PersistVote(term):
                    assert term > persisted, "a term is voted in once"
                    self.disk[p] = persisted = term
                case election.Grant(request):
                    assert persisted == request.term, "a vote was granted before it was on disk"
                    answer = election.VoteGiven(request.term, p, p.encode())
                    if request.candidate == p:
                        self.step(p, answer)
                    else:
                        self.send(p, source, answer)
                case election.Refuse(request, reason):
                    self.send(p, source, election.VoteGiven(request.term, p, None, reason))
                case election.AskVotes(request, voters):
                    for voter in voters:
                        self.send(p, voter, election.VoteAsked(request))
                case election.BecomeLeader(term, votes):
                    assert race is not None or len(votes) == 1
                    named = race.request.electorate if race is not None else (p,)
                    self.winners.append((self.now, term, p, named, votes))
                case election.Renew(term, sequence):
                    lease = Lease(term, p, sequence, BASE, bytes(32), 0, 0)
                    for other in self.peers:
                        if other != p:
                            self.send(p, other, election.LeaseHeard(lease))

    def leaders(self) -> list[str]:
        return [p for p in self.peers if p in self.states and self.states[p].role is Role.LEADER]

    def followed(self) -> set[tuple[int, str]]:
        return {(state.term, state.leader) for state in self.states.values()}

    def check_safety(self) -> None:
        for (_, term, one, named, votes), (_, other_term, two, other_named, other_votes) in itertools.combinations(
            self.winners, 2
        ):
            if term == other_term:
                assert one != two, "a peer won a term twice"
                assert not set(votes) & set(other_votes), "a voter stands behind two winners"
                assert set(named) != set(other_named), "one electorate chose two winners"
        for _, _, _, named, votes in self.winners:
            assert len(set(votes)) * 2 > len(named)


class Ability:
    def __init__(self, can_learn: bool, accelerator_bytes: int) -> None:
        self.can_learn = can_learn
        self.accelerator_bytes = accelerator_bytes


faults = st.lists(
    st.tuples(st.sampled_from(["crash leader", "crash", "wall", "quiet"]), st.integers(0, 8), st.floats(0.1, 9.0)),
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(num_nodes=st.integers(1, 9), seed=st.integers(0, 2**32), loss=st.sampled_from([0.0, 0.05, 0.3]), plan=faults)
def test_no_voter_backs_two_winners_and_one_leader_remains(num_nodes, seed, loss, plan):
    swarm = Swarm(num_nodes, seed, loss=loss)
    for fault, which, for_s in plan:
        chosen = swarm.peers[which % num_nodes]
        if fault == "crash leader":
            chosen = (swarm.leaders() or [chosen])[0]
        if fault.startswith("crash"):
            swarm.crash(chosen)
            swarm.run(for_s)
            swarm.start(chosen)
        elif fault == "wall":
            swarm.wall = frozenset(swarm.peers[: 1 + which % num_nodes])
            swarm.run(for_s)
            swarm.wall = frozenset()
        else:
            swarm.run(for_s)
    swarm.loss = 0.0
    swarm.run(40.0)
    swarm.check_safety()
    assert len(swarm.leaders()) == 1
    assert {leader for _, leader in swarm.followed()} == set(swarm.leaders())


@settings(max_examples=30, deadline=None)
@given(num_nodes=st.integers(2, 12), seed=st.integers(0, 2**32))
def test_a_killed_leader_is_replaced_within_its_budget(num_nodes, seed):
    swarm = Swarm(num_nodes, seed)
    swarm.run(12.0)
    (leader,) = swarm.leaders()
    won = len(swarm.winners)
    swarm.crash(leader)
    killed_at = swarm.now
    swarm.run(8.0)
    assert swarm.winners[won][0] - killed_at <= 3.5 + 2.0
    assert len(swarm.leaders()) == 1
    swarm.check_safety()


def test_a_healthy_leader_stays():
    swarm = Swarm(7, 3, loss=0.1)
    swarm.run(600.0)
    assert len(swarm.winners) == 1


def test_same_seed_same_trace():
    def trace() -> list[tuple[float, str, str]]:
        swarm = Swarm(6, 11, loss=0.2)
        swarm.run(10.0)
        swarm.crash(swarm.peers[2])
        swarm.run(20.0)
        return swarm.trace

    first = trace()
    assert len(first) > 30
    assert first == trace()


@given(st.integers(1, 2**40), st.lists(st.sampled_from([peer(i) for i in range(12)]), max_size=12), st.integers(1, 7))
def test_the_electorate_depends_on_members_only(term, members, size):
    chosen = election.electorate(SWARM, term, members, size)
    assert chosen == election.electorate(SWARM, term, list(reversed(members)), size)
    assert len(chosen) == min(size, len(set(members)))
    assert set(chosen) <= set(members)
