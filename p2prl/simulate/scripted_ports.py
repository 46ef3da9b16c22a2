"""What stands in for a node's child processes in a simulation: the same requests and replies, without torch or processes.

In: requests of the node's loops, how long each takes (`Pace`). Out: answers of the scripted engine, prompts and rewards
of the real addition environment, versions that differ from their parent in a few words, by parent, term and groups.

Invariants: nothing depends on the clock or on this process; a version is a real weights file, hashed and verified like
any other; a learner refuses a step whose parent it does not hold, as the real one does.
"""

import asyncio
import itertools
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from blake3 import blake3

from p2prl.environments.addition import Addition
from p2prl.environments.judge import Judge
from p2prl.environments.messages import JudgeItem, Judgement, Ready, TurnItem
from p2prl.errors import P2prlError
from p2prl.learner import messages as learning
from p2prl.learner.publish import Folders, publish
from p2prl.models.char_tokenizer import VOCAB_SIZE, CharTokenizer
from p2prl.models.state import Payload, open_state, write_payloads
from p2prl.node.children import ChildDied
from p2prl.records import Completion, Group, Hash, Prompt, StepInput, StepReport, Version
from p2prl.rollout import messages as drawing
from p2prl.rollout.scripted_engine import ScriptedEngine, stamped
from p2prl.rollout.worker import judge_group
from p2prl.simulate.scenarios import Pace

WEIGHTS_BYTES = 2**15  # enough that a delta is small beside it
NUM_CHANGED = 16  # words that a step changes, at most
T = TypeVar("T")


class ScriptedChild:
    """Implements `node.ports.ChildPort`. `open` makes what answers, anew with each start."""

    def __init__(self, name: str, open: Callable[[Any], "Script"]) -> None:
        self._name, self._open = name, open
        self._script: Script | None = None
        self._ids = itertools.count()
        self.on_notice: Callable[[Any], None] = lambda notice: None  # it has nothing to say
        self._running = asyncio.Event()
        self._running.set()

    @property
    def alive(self) -> bool:
        return self._script is not None

    def freeze(self) -> None:
        """Answer nothing until `thaw`, as a stopped process does."""
        self._running.clear()

    def thaw(self) -> None:
        self._running.set()

    async def start(self, setup: object | None, *, timeout_s: float = 120.0) -> Any:
        self._script = None
        script = self._open(setup)
        await self._spend(script.start_s, timeout_s)
        self._script = script
        return script.ready

    async def request(self, make: Callable[[int], object], *, timeout_s: float) -> Any:
        if self._script is None:
            raise ChildDied(f"{self._name} is not running")
        script, request = self._script, make(next(self._ids))
        finish = script.begin(request)
        await self._spend(script.takes_s(request), timeout_s)
        return finish()

    async def stop(self) -> None:
        self._script = None

    async def _spend(self, seconds: float, timeout_s: float) -> None:
        """A child at work gives signs of life, a frozen one none."""
        await asyncio.sleep(seconds)
        try:
            async with asyncio.timeout(timeout_s):
                await self._running.wait()
        except TimeoutError:
            self._script = None
            raise ChildDied(f"{self._name} did not answer within {timeout_s:.0f} s") from None


class Script(Protocol):
    """One life of a child: how long its start and each request take, and what it answers."""

    start_s: float

    @property
    def ready(self) -> object: ...

    def takes_s(self, request: Any) -> float: ...

    def begin(self, request: Any) -> Callable[[], Any]:
        """What gives the answer once the time has passed. It raises P2prlError where the real child replies Failed."""
        ...


class EngineScript:
    def __init__(self, setup: drawing.Setup, pace: Pace) -> None:
        self._engine, self._pace = ScriptedEngine(), pace
        self.start_s = pace.engine_start_s
        self.ready = drawing.Ready(self._engine.name, VOCAB_SIZE)

    def takes_s(self, request: drawing.Request) -> float:
        return self._pace.load_s if isinstance(request, drawing.Load) else self._pace.generate_s

    def begin(self, request: drawing.Request) -> Callable[[], drawing.Reply]:
        match request:
            case drawing.Load(id, path, version):
                return partial(self._load, id, path, version)
            case drawing.Generate(id, version, prompts, num_answers, sampling, seed):
                loaded = self._engine.version
                if loaded is not None and loaded != version:
                    return partial(drawing.Outdated, id, loaded)
                drawn = self._engine.generate(prompts, num_answers, sampling, seed)
                return partial(self._generated, id, drawn.completions, version)
            case _:
                raise P2prlError(f"a {type(request).__name__} is out of place here")

    def _load(self, id: int, path: str, version: Version) -> drawing.Reply:
        self._engine.load(Path(path), version)
        return drawing.Loaded(id, version)

    def _generated(self, id: int, drawn: list[list[Completion]], begun: Version) -> drawing.Reply:
        completions, versions = stamped(drawn, begun, self._engine.version or begun)
        num_tokens = sum(len(answer.token_ids) for answers in completions for answer in answers)
        return drawing.Generated(id, tuple(map(tuple, completions)), versions, num_tokens, self._pace.generate_s)


class LearnerScript:
    def __init__(self, setup: learning.Setup, pace: Pace, base: Version) -> None:
        self._folders, self._pace, self._held = Folders(Path(setup.states), Path(setup.blobs)), pace, base
        self._weights = bytes(WEIGHTS_BYTES)
        self.start_s = pace.learner_start_s
        self.ready = learning.Ready(base, "none")

    def takes_s(self, request: learning.Request) -> float:
        return self._pace.step_s if isinstance(request, learning.Train) else self._pace.follow_s

    def begin(self, request: learning.Request) -> Callable[[], learning.Reply]:
        return partial(self.answer, request)

    def answer(self, request: learning.Request) -> learning.Reply:
        match request:
            case learning.Follow(id, path, version):
                if not Path(path).is_file():
                    raise P2prlError(f"the weights of {version} are not at {path}")
                self._held, self._weights = version, read_version(Path(path))
                return learning.Followed(id, version)
            case learning.Train(id, step):
                if step.parent != self._held:
                    raise P2prlError(f"the learner holds {self._held}, not the step's parent {step.parent}")
                report = self._train(step)
                self._held = report.version
                return learning.Trained(id, report)
            case learning.Checkpoint(id):
                return learning.Checkpointed(id, self._held)
            case _:
                raise P2prlError(f"the learner can't be asked for {type(request).__name__} now")

    def _train(self, step: StepInput) -> StepReport:
        ages = [age for ages in step.ages for age in ages]
        rewards = [trajectory.reward for group in step.groups for trajectory in group.trajectories]
        self._weights = weights_of(self._weights, step.parent, step.term, step.group_ids)
        published = publish(lambda path: write_version(path, self._weights), self._folders, step.bases, step.anchor)
        metrics = {"age_mean": sum(ages) / len(ages), "age_max": max(ages), "reward_mean": sum(rewards) / len(rewards)}
        return StepReport(
            version=Version(step.term, step.parent.step + 1, published.hash),
            path=str(published.path),
            contents=published.contents,
            rho_on=1.0,
            metrics=metrics,
            num_answers=len(rewards),
            num_tokens=sum(len(t.completion.token_ids) for group in step.groups for t in group.trajectories),
            wall_s=self._pace.step_s,
            log_ratios=tuple((0.0,) * len(group.trajectories) for group in step.groups),
        )


def weights_of(before: bytes, parent: Version, term: int, group_ids: Sequence[Hash]) -> bytes:
    """The bytes of the version that a step gives."""
    seed = blake3(b"p2prl simulated version\0" + b"%d,%d," % (term, parent.step) + parent.hash + b"".join(group_ids))
    drawn, after = seed.digest(length=4 * NUM_CHANGED), bytearray(before)
    for place, value in struct.iter_unpack("<H2s", drawn):
        at = 2 * (place % (len(after) // 2))
        after[at : at + 2] = value
    return bytes(after)


def write_version(path: Path, weights: bytes) -> Hash:
    """A weights file of one tensor; its state hash."""
    return write_payloads(path, [Payload("policy", (len(weights) // 2,), lambda: memoryview(weights))])


def read_version(path: Path) -> bytes:
    with open_state(path) as ((place,), data):
        return data[place.begin : place.end]


class ScriptedEnvironment:
    """Implements `node.ports.EnvironmentPort` with the real judge over additions, without the child around it."""

    def __init__(self, pace: Pace) -> None:
        self._pace, tokenizer = pace, CharTokenizer()
        environment = Addition("simulated")
        self._judge = Judge(environment, tokenizer, _unlimited)
        self._tokenizer, self._environment = tokenizer, environment
        self.ready: Ready | None = None

    async def start(self) -> Ready:
        tokenizer = self._tokenizer
        self.ready = Ready(tokenizer.hash, self._environment.version, None, tokenizer.stop_ids, tokenizer.pad_id)
        return self.ready

    async def prompts(self, indices: Sequence[int]) -> tuple[Prompt, ...]:
        await asyncio.sleep(self._pace.judge_s)
        return tuple(self._judge.prompt(index) for index in indices)

    async def turns(self, items: Sequence[TurnItem]) -> tuple[tuple[int, ...], ...]:
        return tuple(map(self._judge.turn, items))

    async def judge(self, groups: Sequence[Group]) -> tuple[Judgement, ...]:
        return await self.judge_items(tuple(map(judge_group, groups)))

    async def judge_items(self, items: tuple[JudgeItem, ...]) -> tuple[Judgement, ...]:
        await asyncio.sleep(self._pace.judge_s)
        return tuple(self._judge.check(item) for item in items)

    async def stop(self) -> None:
        pass


def _unlimited(work: Callable[[], T]) -> T:
    """Our own environment needs no guard."""
    return work()
