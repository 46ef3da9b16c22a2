"""Children of the daemon: what is said of their end."""

import asyncio
import gc
import os
import signal
import socket

import psutil
import pytest

from p2prl.environments.messages import Reply
from p2prl.exits import KILLED
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
        (None, "by force"),
    ],
)
def test_an_end_has_a_reason(code: int | None, says: str) -> None:
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
    with pytest.raises(ChildDied, match="did not answer within 0 s") as told:
        await asking
    assert len(heard) == 5 and not child.alive
    assert not told.value.killed and KILLED not in str(told.value), "the machine had no part in it"
    theirs.close()


def load(number: int) -> messages.Load:
    return messages.Load(number, "", factories.BASE)


async def test_whoever_asks_of_a_killed_child_hears_that_it_was_killed() -> None:
    scripted = Scripted()
    theirs, child = await scripted.open(), scripted.child
    child._patience_s = 20.0
    assert child.pid is not None and child._process is not None
    pid, process = child.pid, child._process
    waiting = asyncio.create_task(child.request(load, timeout_s=20))
    await theirs.receive()
    theirs.close()
    while child.alive:  # noqa: ASYNC110
        await asyncio.sleep(0)  # until the end of its pipe is seen
    late = asyncio.create_task(child.request(load, timeout_s=20))
    await asyncio.sleep(0)
    os.kill(pid, signal.SIGKILL)
    await process.wait()
    later = asyncio.create_task(child.request(load, timeout_s=20))
    for asked in (waiting, late, later):
        with pytest.raises(ChildDied) as told:
            await asyncio.wait_for(asked, 20)
        assert told.value.killed and told.value.module == "engine" and KILLED in str(told.value)
    await child.stop()


async def test_a_missed_deadline_is_told_once() -> None:
    heard: list[dict] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))
    scripted = Scripted()
    theirs, child = await scripted.open(), scripted.child
    child._patience_s = 0.01
    said = ""
    try:
        await child.request(load, timeout_s=0.01)
    except ChildDied as error:
        said = str(error)
    gc.collect()
    assert "did not answer" in said and heard == []
    theirs.close()


async def test_a_child_never_started_is_not_running() -> None:
    with pytest.raises(ChildDied, match="engine is not running$") as told:
        await Scripted().child.request(load, timeout_s=20)
    assert not told.value.killed


async def test_a_hung_child_ends_also_where_whoever_ends_it_is_cancelled() -> None:
    scripted = Scripted()
    theirs, child = await scripted.open(), scripted.child
    child._patience_s, process = 0.05, child._process
    assert process is not None
    asking = asyncio.create_task(child.request(load, timeout_s=0.01))
    while child.alive:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    asking.cancel()
    assert await asyncio.wait_for(process.wait(), 20) == -signal.SIGKILL
    theirs.close()


async def test_a_start_that_is_cancelled_leaves_no_child() -> None:
    child = Child("p2prl.rollout.engine_process", (), messages.Reply, environ={})  # silent until a Setup
    starting = asyncio.create_task(child.start(None))
    for _ in range(1000):
        if child.pid is not None:
            break
        await asyncio.sleep(0.01)  # a process has no event
    process = psutil.Process(child.pid)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not child.alive and not process.is_running()
