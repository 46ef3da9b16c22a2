"""The scripted children keep the real ones' promises."""

import asyncio
from pathlib import Path

import async_solipsism
import msgspec
import pytest

from p2prl.errors import P2prlError
from p2prl.learner import messages as learning
from p2prl.models.state import state_hash
from p2prl.node.children import ChildDied
from p2prl.records import DeltaBase, StepInput, StepReport, Version
from p2prl.rollout import messages as drawing
from p2prl.simulate.scenarios import Pace
from p2prl.simulate.scripted_ports import (
    WEIGHTS_BYTES,
    EngineScript,
    LearnerScript,
    ScriptedChild,
    ScriptedEnvironment,
)
from p2prl.weights import delta
from p2prl.weights.contents import content_of
from p2prl.weights.store import path_of
from tests.factories import group, sealed

BASE = Version(0, 0, bytes(32))
SETUP = learning.Setup("{}", "", "", "", "", 1)


@pytest.fixture
def virtual_time():
    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        yield runner


def learner(folder: Path) -> LearnerScript:
    folders = [str(folder / name) for name in ("states", "blobs")]
    return LearnerScript(learning.Setup("{}", "", *folders, "", 1), Pace(), BASE)


def trained(script: LearnerScript, given: StepInput) -> StepReport:
    reply = script.answer(learning.Train(1, given))
    assert isinstance(reply, learning.Trained)
    return reply.report


def step(*counters: int, parent: Version = BASE, term: int = 1) -> StepInput:
    groups = tuple(group(counter=counter) for counter in counters)
    ids = tuple(sealed(record)[0] for record in groups)
    return StepInput(groups, ids, tuple((0,) for _ in groups), parent, term, 0.0)


def test_a_version_follows_from_parent_term_and_groups_and_its_file_is_whole(tmp_path: Path) -> None:
    one, again = (trained(learner(tmp_path / name), step(1, 2)) for name in ("a", "b"))
    assert (one.version, one.contents) == (again.version, again.contents)
    path = Path(one.path)
    assert state_hash(path) == one.version.hash
    assert one.contents == (content_of(path, "anchor", None),)
    assert (one.version.term, one.version.step) == (1, 1)
    others = (step(1), step(1, 2, term=2))
    assert all(trained(learner(tmp_path / "c"), s).version.hash != one.version.hash for s in others)


def test_a_version_is_a_small_delta_from_what_the_learner_follows(tmp_path: Path) -> None:
    first = trained(learner(tmp_path / "a"), step(1))
    script = learner(tmp_path / "b")
    script.answer(learning.Follow(1, first.path, first.version))
    onward = msgspec.structs.replace(
        step(2, parent=first.version), bases=(DeltaBase(first.version, first.path),), anchor=False
    )
    report = trained(script, onward)
    (way,) = report.contents
    assert (way.kind, way.base) == ("delta", first.version)
    assert way.content_bytes < 0.05 * WEIGHTS_BYTES
    delta_path = path_of(tmp_path / "b" / "blobs", way.content_hash)
    delta.apply(Path(first.path), [delta_path], tmp_path / "made", expected=report.version.hash)
    assert (tmp_path / "made").read_bytes() == Path(report.path).read_bytes()


def test_a_learner_refuses_a_step_on_what_it_does_not_hold(tmp_path: Path) -> None:
    script = learner(tmp_path)
    script.answer(learning.Train(1, step(1)))
    with pytest.raises(P2prlError, match="not the step's parent"):
        script.answer(learning.Train(2, step(2)))
    with pytest.raises(P2prlError, match="are not at"):
        script.answer(learning.Follow(3, str(tmp_path / "missing"), BASE))


def test_an_engine_answers_under_the_version_it_loaded(virtual_time) -> None:
    async def program() -> None:
        pace = Pace()
        child = ScriptedChild("engine", lambda setup: EngineScript(setup, pace))
        with pytest.raises(ChildDied):
            await child.request(lambda number: drawing.Load(number, "", BASE), timeout_s=1)
        await child.start(None)
        loaded = await child.request(lambda number: drawing.Load(number, "", BASE), timeout_s=1)
        assert loaded.version == BASE
        environment = ScriptedEnvironment(pace)
        await environment.start()
        (prompt,) = await environment.prompts([7])
        sampling = group().sampling
        drawn = await child.request(
            lambda number: drawing.Generate(number, BASE, (prompt.token_ids,), 8, sampling, 1), timeout_s=9
        )
        assert drawn.versions == (BASE,)
        assert len(drawn.completions[0]) == 8
        assert drawn.num_tokens == sum(len(answer.token_ids) for answer in drawn.completions[0])

    virtual_time.run(program())


def test_a_frozen_child_answers_after_the_thaw_and_dies_at_the_deadline(virtual_time) -> None:
    async def program() -> None:
        loop = asyncio.get_running_loop()
        child = ScriptedChild("learner", lambda setup: LearnerScript(SETUP, Pace(), BASE))
        await child.start(SETUP)
        child.freeze()
        loop.call_later(5.0, child.thaw)
        before = loop.time()
        await child.request(learning.Checkpoint, timeout_s=60)
        assert 5.0 <= loop.time() - before < 6.0
        child.freeze()
        with pytest.raises(ChildDied, match="within 60 s"):
            await child.request(learning.Checkpoint, timeout_s=60)
        assert not child.alive

    virtual_time.run(program())
