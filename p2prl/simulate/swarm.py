"""Runs a scenario: N nodes' real loops and decisions on the memory transport, on whatever event loop runs this.

In: a `Scenario`, a folder for the nodes' files. Out: a `Trace`.

Under a loop with virtual time (tests use async-solipsism's) minutes take seconds and the same seed gives the same
trace; under a real one the same swarm runs in real time. The loop is the caller's, so that the package needs none.
"""

import asyncio
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from p2prl import codec
from p2prl.clock import LoopClock
from p2prl.recipe import EnvironmentSection, EvalSection, LearnerSection, ModelSection, Recipe, SamplingSection
from p2prl.records import Manifest
from p2prl.simulate import scenarios
from p2prl.simulate.life import Life, Place, World, added
from p2prl.simulate.scenarios import LAST, LEADER, Scenario
from p2prl.simulate.scripted_ports import WEIGHTS_BYTES, write_version
from p2prl.simulate.trace import End, Fall, Groups, HeadMove, LeaderMove, Recorder, Step, Trace
from p2prl.swarm.head import order_key
from p2prl.swarm.memory_transport import MemoryNetwork

SAMPLE_S = 0.25
LEAST_S = 1e-3  # less may be below a virtual clock's resolution: it would stand still


def run(scenario: Scenario, loop_factory: Callable[[], asyncio.AbstractEventLoop]) -> Trace:
    """`simulate` on a loop of its own, in a folder that is removed."""
    memory = Path("/dev/shm")
    home = memory if memory.is_dir() else None  # many small files that nobody keeps
    with tempfile.TemporaryDirectory(prefix="p2prl-simulate-", dir=home) as folder:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            return runner.run(simulate(scenario, Path(folder)))


async def simulate(scenario: Scenario, folder: Path) -> Trace:
    """From the first node's start to the scenario's end, when all are killed."""
    asyncio.get_running_loop().set_default_executor(_Inline())
    swarm = _Swarm(scenario, folder)
    try:
        return await swarm.run()
    finally:
        await swarm.close()


def recipe_of(scenario: Scenario, base_hash: bytes) -> Recipe:
    numbers = scenario.learning
    return Recipe(
        name="simulated",
        model=ModelSection(source="builtin:addition", hash=base_hash.hex()),
        environment=EnvironmentSection(name="addition"),
        sampling=SamplingSection(group_size=numbers.group_size, max_new_tokens=5),
        learner=LearnerSection(
            groups_per_step=numbers.groups_per_step,
            longest_wait_s=numbers.longest_wait_s,
            max_age=numbers.max_age,
            max_in_flight=numbers.max_in_flight,
        ),
        eval=EvalSection(prompts=0),
    )


class _Inline(ThreadPoolExecutor):
    """Runs at once what the loops give to a thread: a thread knows nothing of virtual time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))  # what it raises goes to the caller all the same
        return future


class _Swarm:
    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self._scenario = scenario
        self._recorder = Recorder()
        base_path = folder / "base"
        base_hash = write_version(base_path, bytes(WEIGHTS_BYTES))
        clock = LoopClock()
        self._world = World(
            recipe=recipe_of(scenario, base_hash),
            base_path=base_path,
            pace=scenario.pace,
            seed=scenario.seed,
            clock=clock,
            network=MemoryNetwork(scenario.seed, scenario.conditions, self._recorder.message),
            recorder=self._recorder,
            folder=folder,
        )
        self._places = [Place(self._world, number) for number in range(scenario.num_nodes)]
        self._number_of = {place.peer: place.number for place in self._places}
        self._last = -1  # node of the event before
        self._walls: list[tuple[frozenset[str], frozenset[str]]] = []
        self._leaving: dict[asyncio.Task, None] = {}

    async def run(self) -> Trace:
        scenario, clock = self._scenario, self._world.clock
        began = clock.monotonic()
        plan = [(began + index * scenario.stagger_s, node) for index, node in enumerate(scenario.first_nodes)]
        starts = [(at, scenarios.Join(at, node)) for at, node in plan]
        events = [(began + event.at, event) for event in scenario.events]
        agenda = sorted([*starts, *events], key=lambda item: item[0])  # stable: as given where times are equal
        ends_at = began + scenario.duration_s
        while clock.monotonic() < ends_at:
            while agenda and agenda[0][0] <= clock.monotonic():
                await self._happen(agenda.pop(0)[1])
            self._sample()
            due = agenda[0][0] if agenda else ends_at
            await asyncio.sleep(max(LEAST_S, min(SAMPLE_S, due - clock.monotonic(), ends_at - clock.monotonic())))
        self._sample()
        return self._trace()

    async def close(self) -> None:
        for task in self._leaving:
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)
        for place in self._places:
            if place.life is not None:
                await place.life.kill()
            place.database.close()

    # -- events -----------------------------------------------------------------------------------------------------

    async def _happen(self, event: scenarios.Event) -> None:
        match event:
            case scenarios.Kill(_, node):
                place = self._place(node)
                if place.life is not None:
                    self._fell(place, place.life)
                    await place.life.kill()
                    self._ended(place)
            case scenarios.Restart(_, node) | scenarios.Join(_, node):
                self._begin(self._place(node))
            case scenarios.Leave(_, node):
                place = self._place(node)
                if place.life is not None:
                    task = asyncio.create_task(self._leave(place, place.life), name=f"node {place.number} leaves")
                    self._leaving[task] = None
                    task.add_done_callback(lambda done: self._leaving.pop(done, None))
            case scenarios.Partition(_, side):
                one = {self._place(node).peer for node in side}
                self._wall(one)
            case scenarios.Silence(_, node, for_s):
                place = self._place(node)
                if place.life is not None:
                    self._fell(place, place.life)
                    self._silence(place, place.life, for_s)
            case scenarios.Heal():
                self._walls.clear()
                self._raise_walls()

    def _begin(self, place: Place) -> None:
        if place.life is None:
            bootstraps = tuple(other.address for other in self._places[: self._scenario.num_bootstraps])
            place.life = Life(self._world, place, bootstraps)

    async def _leave(self, place: Place, life: Life) -> None:
        await life.leave()
        if place.life is life:
            self._ended(place)

    def _silence(self, place: Place, life: Life, for_s: float) -> None:
        wall = self._wall({place.peer})
        life.freeze()

        def end() -> None:
            life.thaw()
            if wall in self._walls:
                self._walls.remove(wall)
                self._raise_walls()

        asyncio.get_running_loop().call_later(for_s, end)

    def _wall(self, one: set[str]) -> tuple[frozenset[str], frozenset[str]]:
        wall = (frozenset(one), frozenset(place.peer for place in self._places) - one)
        self._walls.append(wall)
        self._raise_walls()
        return wall

    def _raise_walls(self) -> None:
        network = self._world.network
        network.heal()
        for one, other in self._walls:
            network.partition(one, other)

    def _fell(self, place: Place, life: Life) -> None:
        state = life.state
        waiting = tuple(row.id.hex() for row in state.store.admitted_untrained())
        term = max(state.election.term, state.head.term)
        self._recorder.falls.append(Fall(state.now(), place.number, state.leads, term, waiting))

    def _ended(self, place: Place) -> None:
        self._recorder.gone(place.number)
        place.end_life()

    def _place(self, node: int) -> Place:
        """A node by its number, or the leader, or the node before."""
        if node == LEADER:
            lives = [(place.life.state, place.number) for place in self._places if place.life is not None]
            leading = [(state.election.term, number) for state, number in lives if state.leads]
            node = max(leading, default=(0, 0))[1]
        elif node == LAST:
            node = self._last
        self._last = node
        return self._places[node]

    # -- what is seen -----------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        now = self._world.clock.monotonic()
        for place in self._places:
            if place.life is None:
                continue
            state, node = place.life.state, place.number
            head, vote = state.head, state.election
            self._recorder.head(HeadMove(now, node, str(head), head.term, head.step, state.num_groups))
            self._recorder.leader(LeaderMove(now, node, vote.term, self._number_of.get(vote.leader, -1)))

    def _trace(self) -> Trace:
        steps, behind = self._steps()
        recorder = self._recorder
        sent: tuple[tuple[str, int], ...] = ()
        refused: tuple[tuple[str, int], ...] = ()
        for place in self._places:
            totals = place.totals()
            sent, refused = added(sent, dict(totals.sent)), added(refused, dict(totals.refused))
        ends = tuple(self._end(place, behind) for place in self._places)
        groups = Groups(
            made=sum(place.totals().made for place in self._places),
            trained=sum(len(step.groups) for step in steps if step.on_chain),
            refused=dict(refused),
            makers=self._makers(),
            dropped=self._dropped(),
        )
        seen = (recorder.heads, recorder.leaders, recorder.falls, recorder.faults, steps, ends, groups, sent)
        return Trace(
            heads=tuple(recorder.heads),
            leaders=tuple(recorder.leaders),
            steps=steps,
            falls=tuple(recorder.falls),
            faults=tuple(recorder.faults),
            ends=ends,
            groups=groups,
            sent_bytes=dict(sent),
            warnings=dict(sorted(recorder.warnings.items())),
            num_messages=recorder.num_messages,
            digest=recorder.digest(seen),
        )

    def _steps(self) -> tuple[tuple[Step, ...], dict[bytes, int]]:
        """Every version known to a living node; how far each on the best chain is behind its head."""
        living = [place.life.state for place in self._places if place.life is not None]
        sealed = {id: data for state in living for id, data in state.store.manifests()}
        manifests = {
            id: codec.unseal(data, Manifest, self._world.recipe.swarm_id).record for id, data in sealed.items()
        }
        behind: dict[bytes, int] = {}
        if living:
            # The best of all heads, as any node that knows them all would choose.
            best = max(living, key=lambda state: order_key(state.num_groups, state.head))
            behind = {id: index for index, id in enumerate(best.chain.ancestors(best.head_id))}
        steps = []
        for id, manifest in sorted(manifests.items(), key=lambda item: (item[1].version.step, item[0])):
            version, metrics = manifest.version, manifest.metrics
            steps.append(
                Step(
                    version=str(version),
                    term=version.term,
                    step=version.step,
                    learner=self._number_of[manifest.learner],
                    groups=tuple(group.hex() for group in manifest.group_ids),
                    at=manifest.published_at - self._world.clock.unix() + self._world.clock.monotonic(),
                    age_mean=metrics["age_mean"],
                    age_max=metrics["age_max"],
                    on_chain=id in behind,
                )
            )
        return tuple(steps), behind

    def _end(self, place: Place, behind: dict[bytes, int]) -> End:
        if place.life is None:
            return End(place.number, False, "", None, ())
        state = place.life.state
        waiting = tuple(row.id.hex() for row in state.store.own_waiting())
        return End(place.number, True, str(state.head), behind.get(state.head_id), waiting)

    def _makers(self) -> dict[str, int]:
        made: dict[str, int] = {}
        for place in self._places:
            rows = place.database.run("SELECT id FROM groups WHERE own = 1 ORDER BY rowid")
            made.update({row[0].hex(): place.number for row in rows})
        return made

    def _dropped(self) -> dict[str, str]:
        dropped: dict[str, str] = {}
        for place in self._places:
            sql = "SELECT id, reason FROM groups WHERE own = 1 AND trained = 0 AND state = 'dropped' ORDER BY rowid"
            dropped.update({row[0].hex(): row[1] for row in place.database.run(sql)})
        return dropped
