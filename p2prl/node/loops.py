"""Every loop of one node, wired to each other and to its ports: how they start, and how they end.

In: a NodeState, `Ports`. Out: loops at work under one supervisor; what the status shows of them.

Invariant: no process and no socket is made here, so that a simulation runs these very loops over its own ports.
"""

import asyncio
from collections.abc import Awaitable, Callable

from p2prl.buffer import admission
from p2prl.errors import P2prlError
from p2prl.node.election_loop import ElectionLoop
from p2prl.node.membership_loop import MembershipLoop
from p2prl.node.ports import Ports
from p2prl.node.receive_loop import ReceiveLoop
from p2prl.node.rollout_loop import RolloutLoop
from p2prl.node.state import NodeState
from p2prl.node.supervisor import Supervisor
from p2prl.node.train_loop import TrainLoop
from p2prl.node.weights_loop import WeightsLoop
from p2prl.records import Hello

PRUNE_S = 60.0
KEEP_BODIES_S = 600.0  # of trained groups: a losing branch gives them back
MAX_BODIES_BYTES = 512 * 2**20


class Loops:
    """`probe` says who answers at an address of our own peer id, `on_fatal` ends the node."""

    def __init__(
        self,
        state: NodeState,
        ports: Ports,
        threads: int,
        probe: Callable[[str], Awaitable[Hello | None]],
        on_fatal: Callable[[P2prlError], None],
    ) -> None:
        self._state, self._ports, self._threads = state, ports, threads
        self.supervisor = Supervisor(state.clock, state.emit)
        self.election = ElectionLoop(state)
        self.weights = WeightsLoop(state)
        self.membership = MembershipLoop(state, state.config.swarm.join, probe, on_fatal)
        self.receive: ReceiveLoop | None = None
        self.rollout: RolloutLoop | None = None
        self.train: TrainLoop | None = None

    @property
    def waiting(self) -> str:
        """Why nothing is drawn, "" when something is."""
        return self.rollout.waiting if self.rollout is not None else ""

    @property
    def last_step(self) -> dict[str, float]:
        """Metrics of our own last step."""
        return self.train.last if self.train is not None else {}

    async def start(self) -> None:
        """The environment first: nothing is admitted before its rules are known. Then the network, then the loops."""
        state, ports, supervisor = self._state, self._ports, self.supervisor
        ready = await ports.environment.start()
        rules = admission.rules_of(state.recipe, ready.tokenizer_hash, ready.stop_ids, ready.num_prompts)
        await state.transport.start()
        receive = self.receive = ReceiveLoop(state, ports.environment, rules, self.weights)
        rollout = self.rollout = RolloutLoop(
            state, ports.environment, receive, ports.engine, self._threads, self.weights.adopted
        )
        train = self.train = TrainLoop(state, self.weights, self.election, receive, ports.learner)
        train.set_threads(self._threads)
        await self.membership.dial()
        await self.membership.check_network()
        supervisor.start("membership", self.membership.run)
        supervisor.start("weights", self.weights.run)
        supervisor.start("receive", receive.run)
        supervisor.start("admission", receive.run_admission)
        supervisor.start("election", self.election.run)
        if state.can_learn:
            supervisor.start("train", train.run)
        if state.generates:
            supervisor.start("rollout", rollout.run)
        supervisor.start("lag", self._watch_lag)
        supervisor.start("prune", self._prune)

    @property
    def is_drained(self) -> bool:
        """While `draining`: the batch in hand was announced, or never will be."""
        idle = self.rollout is None or not self._state.generates or self.rollout.waiting == "draining"
        health = self.supervisor.health.get("rollout")
        if health is not None and not health.ok:
            return True  # it failed and waits for its next start: nothing is in hand
        return idle or not self._state.engine_ready or not self._ports.engine.alive

    async def stop(self) -> None:
        """End the loops, then what stands behind the ports."""
        await self.supervisor.stop()
        await self.election.stop()
        if self.receive is not None:
            await self.receive.stop()
        ports = self._ports
        await asyncio.gather(ports.engine.stop(), ports.learner.stop(), ports.environment.stop())

    async def _watch_lag(self) -> None:
        def report(lag_s: float) -> None:
            self._state.loop_lag_s = lag_s

        await self.supervisor.watch_lag(report)

    async def _prune(self) -> None:
        """Keep the store within its bound."""
        while True:
            await asyncio.sleep(PRUNE_S)
            older_than = self._state.clock.unix() - KEEP_BODIES_S
            await asyncio.to_thread(self._state.store.prune, MAX_BODIES_BYTES, older_than)
