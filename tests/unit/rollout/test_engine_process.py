import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator

import msgspec
import pytest

from p2prl.models.builtin import WEIGHTS
from p2prl.models.char_tokenizer import END_ID, PAD_ID, CharTokenizer
from p2prl.pipes import BlockingPipe, PipeClosed
from p2prl.rollout.engine import Engine, nothing_between
from p2prl.rollout.engine_process import BEAT_S, NICENESS, Server, take
from p2prl.rollout.messages import (
    Beat,
    Failed,
    Generate,
    Generated,
    Load,
    Loaded,
    Outdated,
    Planned,
    Ready,
    Reply,
    Request,
    Setup,
    Stop,
)
from p2prl.rollout.scripted_engine import ScriptedEngine
from tests import factories

PROMPT = tuple(CharTokenizer().encode_prompt("12+34="))
SETUP = Setup("builtin:addition", "", (END_ID,), PAD_ID)


def generate(number: int) -> Generate:
    return Generate(number, factories.BASE, (PROMPT, PROMPT), 3, factories.SAMPLING, seed=number)


class Child:
    def __init__(self) -> None:
        mine, theirs = socket.socketpair()
        command = [sys.executable, "-m", "p2prl.rollout.engine_process", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        mine.settimeout(60)
        self.socket = mine
        self.pipe: BlockingPipe[Reply] = BlockingPipe(mine, Reply)

    def close(self) -> int:
        self.socket.close()
        return self.process.wait(30)


@pytest.fixture
def child() -> Iterator[Child]:
    started = Child()
    yield started
    started.socket.close()
    started.process.kill()
    started.process.wait()


def test_it_loads_generates_and_ends_with_the_pipe(child: Child) -> None:
    child.pipe.send(SETUP)
    planned = child.pipe.receive()
    assert isinstance(planned, Planned)
    assert (planned.plan.engine, planned.plan.dtype) == ("transformers", "float32")
    ready = child.pipe.receive()
    assert isinstance(ready, Ready)
    assert ready.name.startswith("transformers ") and ready.vocab_size == 17
    assert os.getpriority(os.PRIO_PROCESS, child.process.pid) >= min(19, os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
    child.process.send_signal(signal.SIGINT)  # Ctrl-C is the daemon's business
    child.pipe.send(Load(1, str(WEIGHTS), factories.BASE))
    assert child.pipe.receive() == Loaded(1, factories.BASE)
    child.pipe.send(Load(2, "/nowhere.safetensors", factories.version(1)))
    failed = child.pipe.receive()
    assert isinstance(failed, Failed)
    assert (failed.id, failed.fatal) == (2, False)
    child.pipe.send(generate(3))
    generated = child.pipe.receive()
    assert isinstance(generated, Generated)
    assert (generated.id, generated.versions) == (3, (factories.BASE,))
    assert [len(answers) for answers in generated.completions] == [3, 3]
    assert generated.num_tokens == sum(len(a.token_ids) for answers in generated.completions for a in answers)
    assert generated.wall_s > 0
    assert child.close() == 0


def test_what_keeps_it_from_starting_is_said(child: Child) -> None:
    child.pipe.send(msgspec.structs.replace(SETUP, engine="steam"))
    failed = child.pipe.receive()
    assert isinstance(failed, Failed)
    assert failed.fatal and "no engine 'steam'" in failed.message
    assert child.process.wait(30) == 1


def test_a_request_before_setup_is_refused(child: Child) -> None:
    child.pipe.send(generate(1))
    failed = child.pipe.receive()
    assert isinstance(failed, Failed)
    assert failed.fatal and "not a Setup" in failed.message


def test_stop_ends_it(child: Child) -> None:
    child.pipe.send(msgspec.structs.replace(SETUP, engine="scripted"))
    assert isinstance(child.pipe.receive(), Ready)
    child.pipe.send(Stop())
    assert child.process.wait(30) == 0


def test_a_load_overtakes_what_waits_and_a_stop_all() -> None:
    load, other = Load(3, "a", factories.BASE), Load(4, "b", factories.BASE)
    queue: deque[Request] = deque([generate(1), generate(2), load, other])
    assert [take(queue) for _ in range(4)] == [load, other, generate(1), generate(2)]
    queue = deque([generate(1), load, Stop()])
    assert take(queue) == Stop()


class Talk:
    """A server around an engine, and the daemon's end of its pipe."""

    def __init__(self, engine: Engine, clock=time.monotonic) -> None:
        mine, theirs = socket.socketpair()
        mine.settimeout(10)
        self.daemon: BlockingPipe[Reply] = BlockingPipe(mine, Reply)
        self.server = Server(engine, BlockingPipe(theirs, Request), clock=clock)
        self._sockets = mine, theirs

    def close(self) -> None:
        for end in self._sockets:
            end.close()

    def received(self) -> list[Reply]:
        """Until the server has ended."""
        self._sockets[1].close()
        found: list[Reply] = []
        with contextlib.suppress(PipeClosed):
            while True:
                found.append(self.daemon.receive())
        return found


@pytest.fixture
def talk():
    opened: list[Talk] = []

    def start(engine: Engine, clock=time.monotonic) -> Talk:
        opened.append(Talk(engine, clock))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def loaded(engine: ScriptedEngine) -> ScriptedEngine:
    engine.load(WEIGHTS, factories.BASE)
    return engine


def test_a_failure_names_its_request(talk) -> None:
    server = talk(ScriptedEngine()).server
    assert server.answer(generate(5)) == Failed("no weights are loaded yet; send Load first", 5)
    assert server.answer(SETUP) == Failed("a Setup is out of place here", -1)


def test_an_engine_without_memory_says_so_and_lives(talk) -> None:
    class Starved(ScriptedEngine):
        def generate(self, *args, **kwargs):
            raise MemoryError

    reply = talk(loaded(Starved())).server.answer(generate(7))
    assert isinstance(reply, Failed)
    assert reply.id == 7
    assert "memory ran out" in reply.message


def test_nothing_is_begun_under_another_version(talk) -> None:
    engine = ScriptedEngine()
    engine.load(WEIGHTS, factories.version(1))
    assert talk(engine).server.answer(generate(5)) == Outdated(5, factories.version(1))
    other = msgspec.structs.replace(generate(6), version=factories.version(1))
    assert isinstance(talk(engine).server.answer(other), Generated)


def test_a_load_is_done_in_mid_answer_and_the_answer_goes_on(talk) -> None:
    conversation = talk(loaded(ScriptedEngine()))
    later = factories.version(1)
    conversation.daemon.send(Load(3, "", later))
    server = conversation.server
    first = server.answer(generate(1))
    assert isinstance(first, Generated)
    assert first.versions == (factories.BASE, later)
    assert {tuple(part.version for part in a.segments) for answers in first.completions for a in answers} == {(0, 1)}
    assert server.answer(generate(2)) == Outdated(2, later)
    assert conversation.received() == [Loaded(3, later)]


def test_a_stop_ends_the_work(talk) -> None:
    conversation = talk(loaded(ScriptedEngine()))
    conversation.server._queue.append(generate(1))
    threading.Timer(0, conversation.daemon.send, [Stop()]).start()
    conversation.server.serve()
    assert not [reply for reply in conversation.received() if isinstance(reply, Failed)]


def test_the_end_of_the_pipe_ends_the_work(talk) -> None:
    conversation = talk(loaded(ScriptedEngine()))
    conversation._sockets[0].close()
    with pytest.raises(PipeClosed):
        conversation.server.answer(generate(1))


def test_an_engine_at_work_gives_signs_of_life(talk) -> None:
    now = 0.0

    class Slow(ScriptedEngine):
        def generate(self, prompts, num_answers, sampling, seed, between=nothing_between):
            nonlocal now
            for _ in range(10):
                now += BEAT_S / 2
                between(True)
            return super().generate(prompts, num_answers, sampling, seed, between)

    conversation = talk(loaded(Slow()), clock=lambda: now)
    assert isinstance(conversation.server.answer(generate(4)), Generated)
    assert conversation.received() == [Beat(4)] * 5
