"""Task sets in the format of `verifiers` 0.4: `verifiers:NAME`, NAME being the installed package that exports one.

In: a task set's id, its own parameters. Out: prompts and rewards by index, for tasks of a single turn.

A node draws one answer to a prompt, so what needs more is refused with a sentence: tools, a container or another
runtime, a user who speaks first, set-up and clean-up, a model as judge (receivers could not come to the same reward).
Rewards are the task's own, weighted; where weights add up to more than 1 the sum is divided by theirs. The last tenth
of the tasks is held out.
"""

import asyncio
import inspect
import itertools
from collections.abc import Mapping
from typing import Any

from p2prl.environments.registry import nearest, package_version, refuse_unknown
from p2prl.environments.split import Split
from p2prl.errors import ConfigError

MAX_TASKS = 100_000


class TasksetEnvironment:
    """Implements `registry.Environment`."""

    def __init__(self, name: str, version: str, tasks: list[Any]) -> None:
        self.name, self.version, self._tasks = name, version, tasks
        self._split = Split.tail(len(tasks))
        self.num_prompts: int | None = self._split.num_training

    def prompt(self, index: int) -> str:
        return prompt_text(self._tasks[self._split.place(index)])

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        task = self._tasks[self._split.place(index)]
        trace = _trace(task, answer)
        asyncio.run(task.score(trace, None))
        given = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        total = sum(reward.value for reward in given.values())
        weights = sum(max(0.0, reward.weight) for reward in given.values())
        detail = ", ".join(f"{name} {reward.score:g}" for name, reward in sorted(given.items()))
        return total / max(1.0, weights), detail or "the task gave no reward"


def prompt_text(task: Any) -> str:
    parts = (task.data.system_prompt, task.data.prompt_text)
    return "\n\n".join(part for part in parts if part)


def load_taskset(name: str, params: Mapping[str, object]) -> TasksetEnvironment:
    """Raises ConfigError for a task set that isn't there, can't be made, or can't be run in a single turn."""
    owner = f"environment verifiers:{name}"
    try:
        from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"{owner} needs the package verifiers; install it with: pip install 'p2prl[verifiers]'"
        ) from error
    try:
        kind, config_type = loaders.taskset_class(name), loaders.taskset_config_type(name)
    except Exception as error:  # noqa: BLE001  # another package's code: whatever it raises, a sentence
        said = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(f"{owner} can't be loaded: {said}{_hint(name)}") from error
    refuse_unknown("parameter", params, set(config_type.model_fields) - {"id"}, owner)
    try:
        config = config_type(**(dict(params) | {"id": name}))
        taskset = kind(config)
        tasks = list(itertools.islice(taskset, MAX_TASKS))
    except Exception as error:  # noqa: BLE001  # another package's code: whatever it raises, a sentence
        said = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(f"{owner} can't be made from {dict(params)}: {said}; correct its parameters") from error
    if not tasks:
        raise ConfigError(f"{owner} has no tasks; an environment needs at least one")
    lacks = _shared_tools(kind, config) or next(filter(None, map(_needs_more, tasks)), "")
    if lacks:
        raise ConfigError(f"{owner} {lacks}: p2prl runs tasks of a single turn, judged by code alone; take another")
    return TasksetEnvironment(f"verifiers:{name}", _version(name), tasks)


def _hint(name: str) -> str:
    from p2prl.environments import catalogue

    known = [entry.name.partition(":")[2] for entry in catalogue.entries() if entry.name.startswith("verifiers:")]
    return f"; did you mean {nearest(name, known)!r}?" if known else "; is its package installed?"


def _version(name: str) -> str:
    """Of the package that has the task set; those inside verifiers come with it."""
    found = package_version(name.replace("_", "-"))
    return package_version("verifiers") if found.startswith("p2prl==") else found


def _shared_tools(kind: Any, config: Any) -> str:
    return "shares tools among its tasks" if kind.toolsets(config) else ""


def _needs_more(task: Any) -> str:
    """Why a single turn without a runtime is not enough for it; "" when it is."""
    from verifiers.v1.task import Task  # pyright: ignore[reportMissingImports]

    data, kind = task.data, type(task)
    messages = [] if data.prompt is None or isinstance(data.prompt, str) else data.prompt
    needs = {
        "has tasks without a prompt, where the user speaks later": data.prompt is None,
        "has prompts of several speakers": any(message.role not in ("user", "system") for message in messages),
        "has tasks without text": not prompt_text(task).strip(),
        "has tools": bool(kind.toolsets(task.config)),
        "has tasks that need a container": bool(data.image) or bool(getattr(task, "NEEDS_CONTAINER", False)),
        "prepares or clears up a runtime": kind.setup is not Task.setup or kind.finalize is not Task.finalize,
        "has a model as judge": bool(task.config.judges),
        "has rewards that need a runtime": any(map(_wants_runtime, task.hooks("reward"))),
        "has no rewards": not task.hooks("reward"),
    }
    return next((what for what, wanted in needs.items() if wanted), "")


def _wants_runtime(reward: Any) -> bool:
    parameter = inspect.signature(reward).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _trace(task: Any, answer: str) -> Any:
    """What a rollout of one turn looks like to the task."""
    from verifiers.v1.configs.agent import AgentConfig  # pyright: ignore[reportMissingImports]
    from verifiers.v1.graph import MessageNode  # pyright: ignore[reportMissingImports]
    from verifiers.v1.state import state_cls  # pyright: ignore[reportMissingImports]
    from verifiers.v1.trace import AgentInfo, Trace, TraceTask  # pyright: ignore[reportMissingImports]
    from verifiers.v1.types import AssistantMessage, UserMessage  # pyright: ignore[reportMissingImports]

    nodes = [
        MessageNode(message=UserMessage(content=task.data.prompt_text)),
        MessageNode(parent=0, message=AssistantMessage(content=answer), sampled=True),
    ]
    return Trace(
        task=TraceTask(type=type(task).__name__, data=task.data), agent=AgentInfo(config=AgentConfig()), nodes=nodes,
        state=state_cls(type(task))(), is_completed=True, ok=True,
    )  # fmt: skip
