import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator

import msgspec
import pytest

from p2prl.models.builtin import WEIGHTS
from p2prl.models.char_tokenizer import END_ID, PAD_ID, CharTokenizer
from p2prl.pipes import BlockingPipe
from p2prl.rollout.engine_process import NICENESS, answer, take
from p2prl.rollout.messages import Failed, Generate, Generated, Load, Loaded, Ready, Reply, Request, Setup, Stop
from p2prl.rollout.scripted_engine import ScriptedEngine
from tests import factories

PROMPT = tuple(CharTokenizer().encode_prompt("12+34="))
SETUP = Setup("builtin:addition", "", (END_ID,), PAD_ID)


def generate(number: int) -> Generate:
    return Generate(number, (PROMPT, PROMPT), 3, factories.SAMPLING, seed=number)


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
    assert (generated.id, generated.version) == (3, factories.BASE)
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


def test_a_failure_names_its_request() -> None:
    engine = ScriptedEngine()
    assert answer(engine, generate(5)) == Failed("no weights are loaded yet; send Load first", 5)
    assert answer(engine, SETUP) == Failed("a Setup is out of place here", -1)


def test_an_engine_without_memory_says_so_and_lives() -> None:
    class Starved(ScriptedEngine):
        def generate(self, *args, **kwargs):
            raise MemoryError

    reply = answer(Starved(), generate(7))
    assert isinstance(reply, Failed)
    assert reply.id == 7
    assert "memory ran out" in reply.message
