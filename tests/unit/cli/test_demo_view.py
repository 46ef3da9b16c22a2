"""The demo's table and lines, as text."""

import io

from rich.console import Console

from p2prl.cli.demo_view import Lines, Seen, table_of
from p2prl.status import GivenStatus, NodeStatus, Status, SwarmStatus, TrainingStatus

LEADER = Status(
    node=NodeStatus(name="quiet\x1b[31m [/bold] otter"),
    swarm=SwarmStatus(role="leader", policy_version="1.7.aabbccdd"),
    given=GivenStatus(groups=12),
    training=TrainingStatus(step=7, reward_first=0.7, reward_last=0.8),
)


def seen(elapsed_s: float = 1.0, notes: tuple[str, ...] = ()) -> Seen:
    return Seen(elapsed_s, 0.9, "http://127.0.0.1:1/login#code", (LEADER, None), notes)


def test_the_table_shows_every_node_the_reward_and_the_page() -> None:
    console = Console(file=io.StringIO(), width=140, force_terminal=False)
    console.print(table_of(seen(notes=("killed the leader",))))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("0.700 -> 0.800 of 0.9", "7 versions", "1.7.aabbccdd", "[/bold]", "silent", "login#code", "killed"):
        assert part in text
    assert "\x1b" not in text


def test_lines_come_at_intervals_and_notes_once(capsys) -> None:
    view = Lines()
    for tenth in range(100):
        view.show(seen(tenth / 10, notes=("killed the leader",)))
    said = capsys.readouterr().err.splitlines()
    assert said.count("killed the leader") == 1
    assert len(said) == 5 and "* leads" in said[1] and "login#code" in said[2]
    assert "*v7" in said[3] and "0.800" in said[3] and "silent" in said[3]
