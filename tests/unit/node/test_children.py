"""Children of the daemon: what is said of their end."""

import asyncio
import os
import signal
import socket

import pytest

from p2prl.environments.messages import Reply
from p2prl.node.children import Child, ChildDied, describe_exit, open_log
from p2prl.paths import Home
from p2prl.pipes import AsyncPipe
from p2prl.rollout import messages
from tests import factories


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (0, "exit code 0"),
        (1, "exit code 1; what it said last is in /home/x/children.log"),
        (-signal.SIGKILL, "ran out of memory"),
        (-signal.SIGSEGV, "SIGSEGV"),
    ],
)
def test_an_end_has_a_reason(code: int, says: str) -> None:
    assert says in describe_exit(code, "/home/x/children.log")


async def test_a_child_that_dies_at_its_start_is_told_of(tmp_path) -> None:
    home = Home.locate(tmp_path)
    home.create()
    file = home.state / "logs/children.log"
    with open_log(home) as log:
        child = Child("p2prl.no_such_module", (), Reply, environ={}, stderr=log)
        with pytest.raises(ChildDied) as told:
            await child.start(None)
    assert not child.alive
    assert "did not start" in str(told.value)
    assert str(told.value).endswith(f"(exit code 1; what it said last is in {file})")
    assert "no_such_module" in file.read_text() and file.stat().st_mode & 0o777 == 0o600


async def test_a_death_that_nobody_waits_for_is_told_of(tmp_path) -> None:
    args = ("builtin:addition", str(tmp_path), '{"members": [{"name": "addition"}]}')
    child = Child("p2prl.node.environment_process", args, Reply, environ={"PYTHONHASHSEED": "0"})
    told: asyncio.Queue[str] = asyncio.Queue()
    child.on_death = told.put_nowait
    await child.start(None)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    why = await asyncio.wait_for(told.get(), 20)
    assert "environment_process" in why and "ran out of memory" in why
    assert not child.alive
    await child.start(None)
    await child.stop()  # as we asked for it: not told
    assert told.empty()


class Scripted:
    """The daemon's end of a pipe whose other end the test holds."""

    def __init__(self) -> None:
        self.child = Child("engine", (), messages.Reply, environ={})
        self.theirs: AsyncPipe | None = None

    async def open(self) -> AsyncPipe:
        ours, theirs = socket.socketpair()
        self.child._pipe = await AsyncPipe.open(ours, messages.Reply)
        self.child._process = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
        self.child._reader = asyncio.create_task(self.child._read())
        self.theirs = await AsyncPipe.open(theirs, messages.Request)
        return self.theirs


async def test_signs_of_life_put_off_the_deadline_and_silence_ends_it() -> None:
    scripted = Scripted()
    theirs, child = await scripted.open(), scripted.child
    child._patience_s = 0.01
    heard: list[object] = []
    child.on_notice = heard.append
    asking = asyncio.create_task(child.request(lambda number: messages.Load(number, "", factories.BASE), timeout_s=0.3))
    number = (await theirs.receive()).id
    for _ in range(5):
        await asyncio.sleep(0.1)
        await theirs.send(messages.Beat(number))
    assert not asking.done()  # past the deadline, but alive
    with pytest.raises(ChildDied, match="did not answer within 0 s"):
        await asking
    assert len(heard) == 5 and not child.alive
    theirs.close()
