"""What the loops ask of the processes beside them, whatever stands behind: a child process, or a script in a simulation.

In: requests of the loops. Out: replies, or `ChildDied`. `children.py` and `environment_client.py` implement these for
the daemon; a simulation answers them itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from p2prl.environments.messages import JudgeItem, Judgement, Ready, TurnItem
from p2prl.records import Group, Prompt


class ChildPort(Protocol):
    """The engine or the learner: numbered requests, as in `children.Child`."""

    on_notice: Callable[[Any], None]  # hears what is no reply

    @property
    def alive(self) -> bool: ...

    async def start(self, setup: object | None, *, timeout_s: float = ...) -> Any:
        """From the beginning, also after it died; its Ready. Raises ChildDied."""
        ...

    async def request(self, make: Callable[[int], object], *, timeout_s: float) -> Any:
        """The reply to `make(id)`. Raises ChildDied, also when it is silent for `timeout_s`; P2prlError for a Failed."""
        ...

    async def stop(self) -> None: ...


class EnvironmentPort(Protocol):
    """Prompts and judgements, as in `environment_client.EnvironmentClient`."""

    @property
    def ready(self) -> Ready | None: ...

    async def start(self) -> Ready: ...
    async def prompts(self, indices: Sequence[int]) -> tuple[Prompt, ...]: ...
    async def turns(self, items: Sequence[TurnItem]) -> tuple[tuple[int, ...], ...]: ...
    async def judge(self, groups: Sequence[Group]) -> tuple[Judgement, ...]: ...
    async def judge_items(self, items: tuple[JudgeItem, ...]) -> tuple[Judgement, ...]: ...
    async def stop(self) -> None: ...


@dataclass(frozen=True)
class Ports:
    """All that one node has beside its loops."""

    engine: ChildPort
    learner: ChildPort
    environment: EnvironmentPort
