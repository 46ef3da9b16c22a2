"""The engine without memory: RLIMIT_AS on the real process, while it runs and from its start; and killed for it."""

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

pytestmark = pytest.mark.timeout(300)
MIB = 2**20


def engines(node) -> list[psutil.Process]:
    return [child for child in node.descendants() if _runs(child, "engine_process")]


@contextmanager
def starved(node) -> Iterator[None]:
    """Every engine of the node, also those that are started meanwhile, gets no memory beyond what it has."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            for engine in engines(node):
                _limit(engine)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


@pytest.mark.slow
def test_an_engine_out_of_memory_is_restarted_until_there_is_some(make_node) -> None:
    node = make_node("one").start()
    node.wait(lambda: node.step() >= 2, "second version")
    (first,) = engines(node)
    with starved(node):
        node.wait(lambda: not first.is_running() or _starved_reply(node), "the engine's failure")
        node.wait(lambda: "engine_failed" in node.health(), "the failure in the status")
        item = node.health()["engine_failed"]
        assert item["level"] == "error"
        assert "rollout loop failed and is started again" in item["message"]
        node.wait(lambda: node.status()["state"]["loops"]["rollout"]["restarts"] >= 2, "another attempt")
        node.wait(lambda: node.now() == "degraded", "degraded")
    before = node.step()
    node.wait(lambda: node.step() > before, "a version after the limit was lifted")
    node.wait(lambda: node.now() == "working", "work as before")
    assert "engine_failed" not in node.health()
    left = node.descendants()
    assert len(engines(node)) == 1, "an engine of before still runs"
    assert node.end() == 0
    gone, alive = psutil.wait_procs(left, timeout=10)
    assert not alive
    assert "Traceback" not in node.log


@pytest.mark.slow
@pytest.mark.parametrize("module", ["engine_process", "learner_process", "environment_process"])
def test_a_child_that_the_kernel_killed_is_replaced(make_node, module: str) -> None:
    node = make_node("one").start()
    node.wait(lambda: node.step() >= 2, "second version")
    (first,) = (child for child in node.descendants() if _runs(child, module))
    first.kill()
    node.wait(lambda: "ran out of memory" in node.log, "the reason in the log")
    before = node.step()
    node.wait(lambda: node.step() > before + 1, "versions with another child")
    (second,) = (child for child in node.descendants() if _runs(child, module))
    assert second.pid != first.pid
    assert "Traceback" not in node.log
    assert node.end() == 0


def _starved_reply(node) -> bool:
    """An engine may also survive and say that it has no memory."""
    return "emory" in node.log


def _limit(process: psutil.Process) -> None:
    try:
        held = process.memory_info().vms
        resource.prlimit(process.pid, resource.RLIMIT_AS, (held, resource.RLIM_INFINITY))
    except (ProcessLookupError, psutil.NoSuchProcess):
        return


def _runs(process: psutil.Process, module: str) -> bool:
    try:
        return any(module in part for part in process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False
