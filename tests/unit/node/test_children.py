"""Children of the daemon: what is said of their end."""

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
