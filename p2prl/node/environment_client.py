"""The daemon's side of the environment process: prompts and judgements by request.

In: indices, groups. Out: prompts, judgements. A hung or dead child is started again by the next request.
"""

import json
from collections.abc import Callable, Sequence

from p2prl.environments.messages import (
    JudgeItem,
    Judgement,
    JudgeReply,
    JudgeRequest,
    PromptsReply,
    PromptsRequest,
    Ready,
    Reply,
)
from p2prl.node.children import Child
from p2prl.paths import Home
from p2prl.recipe import Recipe
from p2prl.records import Group, Prompt
from p2prl.rollout.worker import judge_group

TIMEOUT_S = 60.0


class EnvironmentClient:
    def __init__(self, recipe: Recipe, home: Home, stderr: int | None = None) -> None:
        environment = recipe.environment
        args = (recipe.model.source, str(home.models), environment.name, json.dumps(environment.params))
        environ = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        module = "p2prl.node.environment_process"
        self._child = Child(module, args, Reply, environ=environ, stderr=stderr)
        self.ready: Ready | None = None

    def on_death(self, handler: Callable[[str], None]) -> None:
        """`handler(why)` hears of a death that no request of ours ran into."""
        self._child.on_death = handler

    async def start(self) -> Ready:
        self.ready = await self._child.start(None)
        assert isinstance(self.ready, Ready)
        return self.ready

    async def prompts(self, indices: Sequence[int]) -> tuple[Prompt, ...]:
        await self._alive()
        reply: PromptsReply = await self._child.request(
            lambda number: PromptsRequest(number, tuple(indices)), timeout_s=TIMEOUT_S
        )
        return reply.prompts

    async def judge(self, groups: Sequence[Group]) -> tuple[Judgement, ...]:
        return await self.judge_items(tuple(map(judge_group, groups)))

    async def judge_items(self, items: tuple[JudgeItem, ...]) -> tuple[Judgement, ...]:
        await self._alive()
        reply: JudgeReply = await self._child.request(lambda number: JudgeRequest(number, items), timeout_s=TIMEOUT_S)
        return reply.items

    async def stop(self) -> None:
        await self._child.stop()

    async def _alive(self) -> None:
        if not self._child.alive:
            await self.start()
