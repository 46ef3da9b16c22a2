"""Children of the daemon: what is said of their end."""

import asyncio
import os
import signal

import pytest

from p2prl.environments.messages import Reply
from p2prl.node.children import Child, ChildDied, describe_exit


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (0, "exit code 0"),
        (1, "children.log"),
        (-signal.SIGKILL, "ran out of memory"),
        (-signal.SIGSEGV, "SIGSEGV"),
    ],
)
def test_an_end_has_a_reason(code: int, says: str) -> None:
    assert says in describe_exit(code)


async def test_a_child_that_dies_at_its_start_is_told_of(tmp_path) -> None:
    with (tmp_path / "children.log").open("wb") as log:
        child = Child("p2prl.no_such_module", (), Reply, environ={}, stderr=log.fileno())
        with pytest.raises(ChildDied, match=r"did not start.*exit code 1; what it said last is in logs/children\.log"):
            await child.start(None)
    assert not child.alive
    assert "no_such_module" in (tmp_path / "children.log").read_text()


async def test_a_death_that_nobody_waits_for_is_told_of(tmp_path) -> None:
    args = ("builtin:addition", str(tmp_path), "addition", "{}")
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
