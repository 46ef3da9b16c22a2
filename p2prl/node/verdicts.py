"""What admission decided, told to who made the group; and what a leader decided on ours.

In: verdicts of our admission, batches of a leader's. Out: standings, figures, calls to makers; our refused groups given up.

Invariants: only a leader's verdicts are told and count; one call to a maker at a time, and nobody waits for one that does
not answer.
"""

import asyncio

from p2prl import codec
from p2prl.buffer.admission import refusal
from p2prl.errors import BadRecord, PeerError
from p2prl.node.state import NodeState
from p2prl.node.supervisor import end_tasks
from p2prl.records import Verdict, Wire

PASSING = frozenset({"duplicate", "quarantined"})  # refusals that say nothing against the group itself
BATCH = 160  # fit into one call, whatever they say


class VerdictBatch(Wire, frozen=True):
    verdicts: tuple[Verdict, ...]


class Verdicts:
    def __init__(self, state: NodeState) -> None:
        self._state = state
        self._waiting: dict[str, list[Verdict]] = {}
        self._calls: dict[str, asyncio.Task] = {}
        state.transport.serve("verdicts", self._on_verdicts)

    async def stop(self) -> None:
        await end_tasks([*self._calls.values()])

    def judged(self, maker: str, verdict: Verdict) -> None:
        """What it does to its maker's standing; the maker hears it."""
        state = self._state
        if maker != state.me and state.standings.judged(maker, verdict, state.clock.unix()):
            state.emit("log", level="warning", event="peer in quarantine", peer=maker, why=verdict.reason)
        self._tell(maker, verdict)

    def disbelieve(self, maker: str, trained: bytes) -> None:
        """Nobody draws by the log-probs of its groups that were trained on, `trained` the last: all that wait go."""
        state = self._state
        if maker == state.me:
            state.emit("log", level="error", event="this node's own log-probs are not those it draws by; "
                       "restart it, with --engine transformers if it happens again")  # fmt: skip
            return
        self.judged(maker, refusal(trained, "unlikely_draws"))
        for row in state.store.admitted_untrained():
            if row.maker == maker:
                verdict = refusal(row.id, "unlikely_draws")
                state.store.save_verdict(verdict, state.clock.unix())
                state.wanted.forget((row.id,))
                state.counts.refused_here[verdict.reason] = state.counts.refused_here.get(verdict.reason, 0) + 1
                self.judged(maker, verdict)
        state.standings.flush(state.store)

    def _tell(self, maker: str, verdict: Verdict) -> None:
        if not self._state.leads:
            return  # our own judgement: the leader's is the one that counts
        if maker == self._state.me:
            self._count(verdict)
        else:
            batch = self._waiting.setdefault(maker, [])
            if len(batch) < BATCH:
                batch.append(verdict)

    def send(self) -> None:
        """What waits, to those who have no call under way."""
        for maker in [maker for maker in self._waiting if maker not in self._calls]:
            call = self._send(maker, tuple(self._waiting.pop(maker)))
            self._calls[maker] = task = asyncio.create_task(call, name=f"verdicts to {maker}")
            task.add_done_callback(lambda _, maker=maker: self._calls.pop(maker, None))

    async def _send(self, maker: str, verdicts: tuple[Verdict, ...]) -> None:
        try:
            await self._state.transport.call(maker, "verdicts", codec.encode(VerdictBatch(verdicts)))
        except PeerError as error:
            self._state.blame(error, maker)

    async def _on_verdicts(self, peer: str, body: bytes) -> bytes:
        batch = codec.decode(body, VerdictBatch)
        if peer != self._state.election.leader:
            return b""  # of a leader of before, or of nobody whose verdicts count
        for verdict in batch.verdicts:
            self._count(verdict)
            if peer == self._state.election.leader and not verdict.admitted and verdict.reason not in PASSING:
                self._give_up(verdict)
        return b""

    def _give_up(self, verdict: Verdict) -> None:
        """Who trains refused it for good: it waits no longer, and something else may be drawn in its place."""
        state = self._state
        row = state.store.group(verdict.group_id)
        if row is not None and row.own and row.state in ("own", "admitted"):
            state.store.drop([verdict.group_id], verdict.reason[:64], state.clock.unix())
            state.wanted.forget([verdict.group_id])

    def _count(self, verdict: Verdict) -> None:
        counts = self._state.counts
        if verdict.admitted:
            counts.admitted += 1
        elif verdict.reason != "duplicate":
            if len(counts.refused) >= 64 and verdict.reason not in counts.refused:
                raise BadRecord("too many kinds of refusal")
            counts.refused[verdict.reason] = counts.refused.get(verdict.reason, 0) + 1
