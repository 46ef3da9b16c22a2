"""What a person sees of the demo while it runs: a live table on a terminal, a line every few seconds elsewhere.

In: what the nodes said last. Out: text on stderr, so that stdout holds the summary alone.
"""

import sys
from typing import TYPE_CHECKING

import click
import msgspec

from p2prl.cli.render import plain, reward, size, span
from p2prl.status import Status

if TYPE_CHECKING:
    from rich.table import Table

LINES_EVERY_S, TABLE_EVERY_S = 5.0, 0.5
BAR_CHARS = 16
HEADER = ("  node", "state", "version", "groups", "tok/s", "peers", "out", "in")


class Seen(msgspec.Struct, frozen=True):
    """One moment of the swarm. `statuses[i]` is None while node i does not answer; `notes` are what happened so far."""

    elapsed_s: float
    target: float
    page: str
    statuses: tuple[Status | None, ...]
    notes: tuple[str, ...] = ()

    @property
    def furthest(self) -> Status:
        return max((status or Status() for status in self.statuses), key=lambda status: status.training.step)


def open_view() -> "Lines | LiveTable":
    return LiveTable() if sys.stderr.isatty() else Lines()


class Lines:
    """For logs and pipes."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self._told = 0
        self._page = ""

    def say(self, text: str) -> None:
        click.echo(text, err=True)

    def show(self, seen: Seen) -> None:
        for note in seen.notes[self._told :]:
            self.say(note)
        self._told = len(seen.notes)
        if seen.elapsed_s < self._next_s:
            return
        self._next_s = seen.elapsed_s + LINES_EVERY_S
        if not self._page:
            self.say(
                "for each node: its version and the groups it made; * leads. The first election takes some seconds"
            )
        if seen.page != self._page:  # a login code is good once, for a minute
            self._page = seen.page
            self.say(f"page: {seen.page}")
        parts = [
            f"{'*' if status.swarm.role == 'leader' else ' '}v{step_of(status):<4}{status.given.groups:>5}g"
            if status
            else " silent     "
            for status in seen.statuses
        ]
        self.say(f"{seen.elapsed_s:5.0f} s  reward {reward(seen.furthest.training.reward_last):>5}  {'  '.join(parts)}")

    def close(self) -> None:
        """Nothing is held."""


class LiveTable:
    """For a terminal."""

    def __init__(self) -> None:
        from rich.console import Console  # some 50 ms
        from rich.live import Live

        self._live = Live(console=Console(stderr=True), auto_refresh=False)
        self._live.start()
        self._next_s = 0.0

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def show(self, seen: Seen) -> None:
        if seen.elapsed_s < self._next_s:
            return
        self._next_s = seen.elapsed_s + TABLE_EVERY_S
        self._live.update(table_of(seen), refresh=True)

    def close(self) -> None:
        self._live.stop()


def table_of(seen: Seen) -> "Table":
    """The swarm's reward on its way to the target, then a row for each node."""
    from rich.markup import escape
    from rich.table import Table

    training = seen.furthest.training
    last = training.reward_last if training.reward_last is not None else 0.0
    done = round(BAR_CHARS * min(1.0, last / seen.target)) if seen.target else BAR_CHARS
    title = (
        f"reward {reward(training.reward_first)} -> {reward(training.reward_last)} of {seen.target:g}  "
        f"{'#' * done}{'.' * (BAR_CHARS - done)}  {training.step} versions in {span(seen.elapsed_s)}"
    )
    caption = "\n".join((f"page: {seen.page}", *seen.notes[-4:]))
    table = Table(
        title=title, caption=caption, title_justify="left", caption_justify="left", title_style="bold", box=None
    )
    for index, name in enumerate(HEADER):
        table.add_column(name, justify="right" if index >= HEADER.index("groups") else "left", no_wrap=True)
    for index, status in enumerate(seen.statuses):
        if status is None:
            table.add_row(f"node{index}", "-", "silent", *["-"] * 6, style="dim")
            continue
        leads = status.swarm.role == "leader"
        table.add_row(
            f"{'*' if leads else ' '} {escape(plain(status.node.name))}", status.state.now, status.swarm.policy_version,
            str(status.given.groups), f"{status.rates.rollout_tokens_per_s:.0f}", str(status.swarm.peers_alive),
            size(sum(status.traffic.sent.values())), size(sum(status.traffic.received.values())),
            style="bold" if leads else "",
        )  # fmt: skip
    return table


def step_of(status: Status | None) -> int:
    return status.training.step if status else 0
