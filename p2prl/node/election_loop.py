"""Carries out what `swarm/election.py` decides: asks for votes, grants them, renews the lease.

In: ticks, leases by gossip, vote requests by call. Out: votes, renewals, who leads.
"""

import asyncio

from p2prl import codec
from p2prl.errors import BadRecord, PeerError, StoreError, Unreachable
from p2prl.node.state import NodeState
from p2prl.node.supervisor import end_tasks
from p2prl.records import Lease, Vote, VoteReply, VoteRequest
from p2prl.swarm import election

TICK_S = 0.25
TOPIC = "lease"


class ElectionLoop:
    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._tasks: dict[asyncio.Task, None] = {}
        self._told = (0, "")  # the term and leader that the log named last
        self.changed = asyncio.Event()  # set whenever the leader or our role changed
        state.transport.serve("vote", self.on_vote_request)
        state.transport.subscribe(TOPIC, self.on_gossip)

    async def run(self) -> None:
        while True:
            self._decide(election.Tick(self._facts()))
            await asyncio.sleep(TICK_S)

    async def stop(self) -> None:
        """No call of ours outlives the loops: it would find the store closed."""
        await end_tasks(self._tasks)

    def on_gossip(self, publisher: str, data: bytes) -> None:
        state = self._state
        lease = self._unsealed(data)
        if publisher == lease.leader:
            state.membership.heard(publisher, state.now())
        before = (state.election.term, state.election.leader, state.election.sequence)
        self._decide(election.LeaseHeard(lease, self._proves(lease.manifest_id, lease.term, lease.leader)))
        after = (state.election.term, state.election.leader, state.election.sequence)
        if after != before and state.election.leader == lease.leader:
            state.sealed_lease = data

    def _proves(self, manifest_id: bytes, term: int, leader: str) -> bool:
        """Whether that version is on our chain, so verified, and of this term and leader."""
        manifest = self._state.manifests.get(manifest_id)
        return manifest is not None and (manifest.version.term, manifest.learner) == (term, leader)

    def _unsealed(self, data: bytes) -> Lease:
        lease = codec.unseal(data, Lease, self._state.swarm, owner=lambda lease: lease.leader).record
        self._check_eligible(lease.leader)
        return lease

    async def on_vote_request(self, peer: str, body: bytes) -> bytes:
        state = self._state
        request = codec.unseal(body, VoteRequest, state.swarm, owner=lambda request: request.candidate).record
        if request.candidate != peer:
            raise BadRecord("a vote is asked for by its candidate alone", peer=peer)  # a replay, by somebody else
        self._check_eligible(request.candidate)
        state.membership.heard(request.candidate, state.now())
        try:
            actions = self._decide(election.VoteAsked(request))
        except StoreError as error:  # a vote that is not on the disk is not given
            state.emit("log", level="error", event="no vote", why=str(error)[:200])
            return codec.encode(VoteReply(b"", str(election.Refusal.NOT_READY), state.sealed_lease))
        for action in actions:
            match action:
                case election.Grant(request):
                    return codec.encode(VoteReply(self._vote(request), "", state.sealed_lease))
                case election.Refuse(_, reason):
                    return codec.encode(VoteReply(b"", str(reason), state.sealed_lease))
        raise BadRecord("the request was not decided", peer=peer)

    def renew(self) -> None:
        """Gossip our lease at once, as after a new version."""
        self._decide(election.Tick(self._facts()))
        self._decide(election.HeadMoved())

    def _facts(self) -> election.Facts:
        state = self._state
        return election.Facts(
            live=state.live(),
            eligible=state.eligible(),
            head=state.head,
            num_groups=state.num_groups,
            can_lead=state.can_learn and state.learner_ready and not state.draining and not state.disk_full,
            manifest_id=state.head_id,
            lagged=state.loop_lag_s > 1.0,
            proven=self._proves(state.head_id, state.election.term, state.election.leader),
        )

    def _decide(self, event: election.Event) -> tuple[election.Action, ...]:
        state = self._state
        before = (state.election.role, state.election.term, state.election.leader)
        state.election, actions = election.decide(state.election, event, state.now())
        for action in actions:
            self._act(action)
        if (state.election.role, state.election.term, state.election.leader) != before:
            self._report()
        return actions

    def _act(self, action: election.Action) -> None:
        match action:
            case election.PersistVote(term):
                self._state.store.save_voted_term(term)
            case election.Grant(request) if request.candidate == self._state.me:
                self._decide(election.VoteGiven(request.term, self._state.me, self._vote(request)))
            case election.AskVotes(request, voters):
                sealed = codec.seal(request, self._state.identity, self._state.swarm)
                for voter in voters:
                    task = asyncio.create_task(self._ask(voter, request, sealed), name=f"ask {voter} for a vote")
                    self._keep(task)
            case election.BecomeLeader(_, votes):
                self._state.votes = votes
            case election.Renew(term, sequence):
                self._announce(term, sequence)
            case _:
                pass

    async def _ask(self, voter: str, request: VoteRequest, sealed: bytes) -> None:
        state = self._state
        try:
            body = await state.transport.call(voter, "vote", sealed, timeout_s=state.election.rules.vote_s)
            reply = codec.decode(body, VoteReply)
            state.membership.answered(voter, state.now())
            vote = None
            if reply.vote:
                granted = codec.unseal(reply.vote, Vote, state.swarm, owner=lambda vote: vote.voter).record
                if (granted.term, granted.candidate, granted.voter) != (request.term, state.me, voter):
                    raise BadRecord("the vote is for another request", peer=voter)
                vote = reply.vote
            lease = self._unsealed(reply.lease) if reply.lease and vote is None else None
        except PeerError as error:
            if isinstance(error, Unreachable):
                state.membership.unanswered(voter)
            state.blame(error, voter)
            return
        self._decide(election.VoteGiven(request.term, voter, vote, reply.reason, lease))

    def _vote(self, request: VoteRequest) -> bytes:
        vote = Vote(request.term, self._state.me, request.candidate, request.electorate)
        return codec.seal(vote, self._state.identity, self._state.swarm)

    def _announce(self, term: int, sequence: int) -> None:
        state = self._state
        manifest_bytes = len(state.sealed_manifests.get(state.head_id, b""))
        lease = Lease(term, state.me, sequence, state.head, state.head_id, manifest_bytes, state.num_groups)
        state.sealed_lease = codec.seal(lease, state.identity, state.swarm)
        task = asyncio.create_task(self._publish(state.sealed_lease), name="renew the lease")
        self._keep(task)

    def _keep(self, task: asyncio.Task) -> None:
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _publish(self, data: bytes) -> None:
        try:
            await self._state.transport.publish(TOPIC, data)
        except PeerError as error:
            self._state.blame(error)

    def _check_eligible(self, peer: str) -> None:
        allowed = self._state.recipe.learner.learners
        if allowed and peer not in allowed:
            raise BadRecord("the recipe does not let this peer lead", peer=peer)

    def _report(self) -> None:
        state = self._state
        term, leader = state.election.term, state.election.leader
        if leader and (term, leader) != self._told:
            self._told = (term, leader)
            state.emit("log", level="info", event="new leader", term=term, leader=leader)
        self.changed.set()
