import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from p2prl.learner import messages
from p2prl.learner.learner_process import Learner
from p2prl.learner.publish import Folders
from p2prl.models.state import state_hash
from p2prl.pipes import BlockingPipe
from p2prl.records import DeltaBase, Version
from p2prl.weights import delta
from p2prl.weights.contents import content_of
from p2prl.weights.store import path_of


@pytest.fixture
def child(recipe, tmp_path):
    """(pipe, process) of a started child."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "p2prl.learner.learner_process", str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
    theirs.close()
    ours.settimeout(100)
    yield BlockingPipe(ours, messages.Reply), process
    ours.close()
    assert process.wait(20) in (0, 1)


def setup_of(recipe, tmp_path: Path, text: str = "") -> messages.Setup:
    folders = [str(tmp_path / name) for name in ("models", "states", "blobs", "checkpoints")]
    return messages.Setup(text or recipe.model_dump_json(by_alias=True), *folders, 1)


def test_it_trains_publishes_follows_and_checkpoints(child, policy, recipe, tools, tmp_path) -> None:
    pipe, process = child
    pipe.send(setup_of(recipe, tmp_path))
    assert pipe.receive().version == policy.version

    pipe.send(messages.Train(1, tools.make_step(policy, 4, 1, rho_on=0.0)))
    trained = pipe.receive()
    assert isinstance(trained, messages.Trained) and trained.id == 1
    report = trained.report
    path = Path(report.path)
    assert (report.version.term, report.version.step) == (1, 1)
    assert state_hash(path) == report.version.hash
    assert path == path_of(tmp_path / "states", report.version.hash)
    assert report.contents == (content_of(path, "anchor", None),)
    assert report.rho_on > 0.999

    onward = msgspec.structs.replace(
        tools.make_step(policy, 4, 2, rho_on=1.0),
        parent=report.version,
        bases=(DeltaBase(report.version, report.path), DeltaBase(policy.version, str(tmp_path / "gone"))),
        anchor=True,
    )
    pipe.send(messages.Train(7, onward))
    second = pipe.receive()
    assert isinstance(second, messages.Trained)
    assert [(way.kind, way.base) for way in second.report.contents] == [("delta", report.version), ("anchor", None)]
    assert any("no delta from 0.0" in note for note in second.notes)
    way = second.report.contents[0]
    delta.apply(
        path, [path_of(tmp_path / "blobs", way.content_hash)], tmp_path / "x", expected=second.report.version.hash
    )
    assert second.report.metrics["delta_bytes"] == way.content_bytes
    assert 0 < second.report.metrics["delta_fraction"] <= 1
    assert second.report.metrics["encode_s"] > 0
    report = second.report

    pipe.send(messages.Train(2, tools.make_step(policy, 1, 2)))
    refused = pipe.receive()
    assert isinstance(refused, messages.Failed) and "follow" in refused.message

    pipe.send(messages.Checkpoint(3))
    assert pipe.receive() == messages.Checkpointed(3, report.version)
    elsewhere = Version(2, 1, report.version.hash)
    pipe.send(messages.Follow(4, report.path, elsewhere))
    assert pipe.receive() == messages.Followed(4, elsewhere)
    pipe.send(messages.Follow(5, report.path, report.version))
    assert "checkpoint" in pipe.receive().notes[0]
    pipe.send(messages.Follow(6, str(tmp_path / "absent"), elsewhere))
    assert isinstance(pipe.receive(), messages.Failed)
    pipe.send(messages.Stop())
    assert process.wait(20) == 0


def test_a_recipe_it_cannot_read_fails_the_start(child, recipe, tmp_path) -> None:
    pipe, process = child
    pipe.send(setup_of(recipe, tmp_path, "{}"))
    assert isinstance(pipe.receive(), messages.Failed)
    assert process.wait(20) == 1


def test_options_that_no_step_could_be_made_with_fail_the_start(child, recipe, tmp_path) -> None:
    pipe, process = child
    objective = recipe.objective.model_copy(update={"name": "a3po", "options": {"cpa": 5.0}})
    pipe.send(setup_of(recipe.model_copy(update={"objective": objective}), tmp_path))
    failed = pipe.receive()
    assert isinstance(failed, messages.Failed) and "did you mean 'cap'" in failed.message
    assert process.wait(20) == 1


def test_many_clipped_fresh_answers_are_said_once_in_a_while(policy, recipe, tools, tmp_path) -> None:
    objective = recipe.objective.model_copy(update={"clip": 1e-3})
    folders = Folders(tmp_path / "states", tmp_path / "blobs")
    learner = Learner(recipe.model_copy(update={"objective": objective}), policy, folders, tmp_path)
    said = []
    for number in range(2):
        step = msgspec.structs.replace(tools.make_step(policy, 4, number), parent=policy.version)
        reply = learner.handle(messages.Train(number, step))
        assert isinstance(reply, messages.Trained) and reply.report.metrics["clip_fraction_fresh"] > 0.25
        said.append([note for note in reply.notes if "fresh answers were clipped" in note])
    assert len(said[0]) == 1 and said[1] == []
