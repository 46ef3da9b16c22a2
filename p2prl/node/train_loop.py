"""Trains while we lead: admitted groups to a step, a step to a published version. Warm while we stand by.

In: admitted groups in the store. Out: manifests, leases that name them; a learner process that holds the head.

Invariants: a group is in one manifest of a chain; a manifest is kept and its weights are in the store before its lease
is gossiped, so whoever hears of a version can fetch it; a step whose parent is no longer the head is thrown away.
"""

import asyncio
import itertools
import math
import os

from p2prl import codec
from p2prl.buffer import replay
from p2prl.buffer.claims import Claims
from p2prl.errors import P2prlError
from p2prl.learner import messages
from p2prl.node.election_loop import ElectionLoop
from p2prl.node.ports import ChildPort
from p2prl.node.receive_loop import ReceiveLoop
from p2prl.node.state import NodeState
from p2prl.node.weights_loop import WeightsLoop
from p2prl.records import DeltaBase, Group, StepInput, StepReport
from p2prl.weights import chain
from p2prl.weights.publish import Trained, make_manifest

STEP_TIMEOUT_S = 900.0
POLL_S = 0.1
LEAST_S = 1e-3
RHO_ON_GROUPS = 64  # of version 0, what a fresh batch's effective sample size is measured on


class TrainLoop:
    def __init__(
        self, state: NodeState, weights: WeightsLoop, election: ElectionLoop, receive: ReceiveLoop, learner: ChildPort
    ) -> None:
        self._state, self._weights, self._election, self._receive = state, weights, election, receive
        self._learner = learner
        self._holds: bytes | None = None  # the manifest whose weights the learner process has
        self._rules = replay.rules_of(state.recipe)
        # Waits are counted on the clock that never goes back: an hour put right by NTP must not stop the steps.
        self._last_step_at = float("-inf")
        self._waiting_since: dict[bytes, float] = {}
        self._threads = 1
        self._claims = Claims()
        self.last: dict[str, float] = {}

    def set_threads(self, threads: int) -> None:
        self._threads = threads

    async def run(self) -> None:
        state = self._state
        state.learner_ready = False
        self._weights.settle()
        self._holds = None  # after a failure nobody knows what the learner holds
        while True:
            if not state.stands_by():
                # Anyone who may lead must be able to: a candidate starts its learner when it wins.
                state.learner_ready = state.can_learn
                if self._learner.alive and not state.leads:
                    await self._learner.stop()
                    self._holds = None
                await asyncio.sleep(POLL_S * 5)
                continue
            await self._be_warm()
            if self._holds != state.head_id:
                continue  # it moved while the learner followed
            if not state.leads or state.draining or state.disk_full:
                await asyncio.sleep(POLL_S)
                continue
            await self._step_when_full()

    async def _be_warm(self) -> None:
        state = self._state
        if not self._learner.alive:
            self._holds = None
            await asyncio.to_thread(state.weights.sweep, os.getpid())  # what the last one left half-way
            ready: messages.Ready = await self._learner.start(
                messages.Setup(
                    recipe_json=state.recipe.model_dump_json(by_alias=True),
                    models_cache=str(state.home.models),
                    states=str(state.home.states),
                    blobs=str(state.home.blobs),
                    checkpoints=str(state.home.checkpoints),
                    threads=self._threads,
                )
            )
            self._tell(ready.notes)
        if self._holds != state.head_id:
            head_id, head, path = state.head_id, state.head, str(state.head_path)
            with state.reading(head):
                followed = await self._learner.request(
                    lambda number: messages.Follow(number, path, head), timeout_s=STEP_TIMEOUT_S
                )
            self._tell(followed.notes)
            self._holds = head_id
        state.learner_ready = True

    async def _step_when_full(self) -> None:
        state = self._state
        choice = replay.choose(self._candidates(), state.now(), self._rules, since=self._last_step_at)
        state.store.drop(choice.dropped, "too_old", state.clock.unix())
        if choice.batch:
            await self._step(choice.batch)
            self._last_step_at = state.now()
            return
        self._receive.admitted.clear()
        try:
            await asyncio.wait_for(self._receive.admitted.wait(), min(max(choice.wait_s, LEAST_S), POLL_S))
        except TimeoutError:
            pass

    def _candidates(self) -> list[replay.Entry]:
        """Admitted and not on our chain, with their ages."""
        state, now, unix, known = self._state, self._state.now(), self._state.clock.unix(), self._waiting_since
        rows = state.store.admitted_untrained()
        since = self._waiting_since = {row.id: known.get(row.id, now - max(0.0, unix - row.made_at)) for row in rows}
        return [replay.Entry(row.id, row.maker, state.age_of(row.version), since[row.id]) for row in rows]

    async def _step(self, chosen: tuple[bytes, ...]) -> None:
        state = self._state
        parent = state.parent
        groups, ids = [], []
        for group_id in chosen:
            body = state.store.body(group_id)
            if body is None:
                state.store.drop([group_id], "lost", state.clock.unix())
                continue
            groups.append(codec.unseal(body, Group, state.swarm).record)
            ids.append(group_id)
        if not groups:
            return
        ages = tuple(tuple(state.age_of(version) or 0 for version in group.versions) for group in groups)
        rho_on = self._rho_on()
        fresh = self._fresh(ids) if rho_on == 0.0 else ()
        bases, anchor = self._bases()
        term = state.election.term
        step = StepInput(tuple(groups), tuple(ids), ages, parent.version, term, rho_on, fresh, bases, anchor)
        with state.reading(*(base.version for base in bases)):
            reply = await self._learner.request(lambda number: messages.Train(number, step), timeout_s=STEP_TIMEOUT_S)
        report: StepReport = reply.report
        self._tell(reply.notes)
        self.last = report.metrics
        if state.head_id != parent.id or not state.leads or report.version.term != state.election.term:
            self._holds = None  # another head won meanwhile: the groups wait for the next step
            self._weights.versions.came_to_nothing(report)
            return
        self._publish(report, groups, ids, ages)
        self._doubt(report, groups, ids)
        await self._checkpoint_when_due()

    def _bases(self) -> tuple[tuple[DeltaBase, ...], bool]:
        """What the next version is published as a delta from, of what is here; whether whole too."""
        state = self._state
        if not state.head_path.is_file():  # the cache may be deleted at any time
            return (), True
        line = (manifest for _, manifest in state.line())
        wanted = chain.to_publish(line, state.base, state.head_path.stat().st_size)
        here = [version for version in wanted.bases if state.has_state(version)]
        return tuple(DeltaBase(version, str(state.state_path(version))) for version in here), wanted.anchor

    def _fresh(self, chosen: list[bytes]) -> tuple[Group, ...]:
        """More groups of version 0 that wait here, up to RHO_ON_GROUPS with the chosen."""
        rows = [row for row in self._state.store.admitted_untrained() if row.id not in chosen]
        bodies = (self._state.store.body(row.id) for row in rows if self._state.age_of(row.version) == 0)
        wanted = itertools.islice((body for body in bodies if body), max(0, RHO_ON_GROUPS - len(chosen)))
        return tuple(codec.unseal(body, Group, self._state.swarm).record for body in wanted)

    def _publish(
        self, report: StepReport, groups: list[Group], ids: list[bytes], ages: tuple[tuple[int, ...], ...]
    ) -> None:
        state = self._state
        trained = [
            Trained(
                group_id, sum(t.reward for t in group.trajectories) / len(group.trajectories), len(group.trajectories)
            )
            for group_id, group in zip(ids, groups, strict=True)
        ]
        now = state.clock.unix()
        age_p50, age_p95 = replay.age_quantiles(groups, ages, (0.5, 0.95))
        began = state.now() - report.wall_s
        waited_s = max(0.0, began - self._last_step_at) if math.isfinite(self._last_step_at) else 0.0
        report.metrics.update(wall_s=report.wall_s, wait_s=waited_s, age_p50=age_p50, age_p95=age_p95)
        state.measures.trained(report, [of_group[0] for of_group in ages], now)
        if state.eval_reward is not None:
            report.metrics["eval_reward"] = state.eval_reward
            report.metrics["eval_error"] = state.eval_error
            report.metrics["eval_step"] = float(state.eval_step)
        manifest = make_manifest(report, state.parent, state.me, trained, self._votes(report), now)
        sealed = codec.seal(manifest, state.identity, state.swarm)
        manifest_id = codec.sealed_id(sealed)
        self._weights.versions.published(report)
        self._weights.manifests.keep(manifest_id, manifest, sealed)
        self._weights.adopt(manifest_id)
        self._holds = manifest_id
        self._election.renew()

    def _doubt(self, report: StepReport, groups: list[Group], ids: list[bytes]) -> None:
        """Makers whose answers nobody draws by the log-probs they claim: nothing more is taken from them for a while."""
        for group, group_id, log_ratios in zip(groups, ids, report.log_ratios, strict=True):
            if self._claims.drew(group.maker, log_ratios):
                self._receive.verdicts.disbelieve(group.maker, group_id)

    def _votes(self, report: StepReport) -> tuple[bytes, ...]:
        """The mandate, where the parent is not of our term: also when another branch won over our first version."""
        parent = self._state.manifests.get(self._state.head_id)
        if parent is not None and (parent.version.term, parent.learner) == (report.version.term, self._state.me):
            return ()
        return self._state.votes

    def _tell(self, notes: tuple[str, ...]) -> None:
        for note in notes:
            self._state.emit("log", level="warning" if "corrupt" in note else "info", event="learner", note=note)

    async def _checkpoint_when_due(self) -> None:
        if self._state.head.step % self._state.recipe.learner.checkpoint_every == 0:
            try:
                await self._learner.request(messages.Checkpoint, timeout_s=STEP_TIMEOUT_S)
            except P2prlError as error:
                if not self._learner.alive:
                    raise
                # The versions are what counts, they are published: go on without this checkpoint.
                self._state.emit("log", level="error", event="no checkpoint", why=str(error)[:300])

    def _rho_on(self) -> float:
        manifest = self._state.manifests.get(self._state.head_id)
        return 0.0 if manifest is None else manifest.rho_on
