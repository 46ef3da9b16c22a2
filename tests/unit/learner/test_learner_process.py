import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3

from p2prl.learner import messages
from p2prl.learner.learner_process import Learner
from p2prl.models.state import state_hash
from p2prl.pipes import BlockingPipe
from p2prl.records import PIECE_BYTES, Version


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
    folders = [str(tmp_path / name) for name in ("models", "blobs", "checkpoints")]
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
    content = path.read_bytes()
    assert report.version.term == 1 and report.version.step == 1
    assert state_hash(path) == report.version.hash
    assert blake3(content).digest() == report.content_hash
    assert path == tmp_path / "blobs" / report.content_hash.hex()[:2] / report.content_hash.hex()
    assert [blake3(content[at : at + PIECE_BYTES]).digest() for at in range(0, len(content), PIECE_BYTES)] == list(
        report.pieces
    )
    assert report.content_bytes == len(content)
    assert report.rho_on > 0.999

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
    learner = Learner(recipe.model_copy(update={"objective": objective}), policy, tmp_path, tmp_path)
    said = []
    for number in range(2):
        step = msgspec.structs.replace(tools.make_step(policy, 4, number), parent=policy.version)
        reply = learner.handle(messages.Train(number, step))
        assert isinstance(reply, messages.Trained) and reply.report.metrics["clip_fraction_fresh"] > 0.25
        said.append([note for note in reply.notes if "fresh answers were clipped" in note])
    assert len(said[0]) == 1 and said[1] == []
