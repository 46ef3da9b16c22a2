"""Task sets in the format of `verifiers` 0.4: `verifiers:NAME`, NAME being the installed package that exports one.

In: a task set's id, its own parameters, and its environment's as the table `env`. Out: prompts, what is said between an
answer's turns, and rewards, by index.

A task with tools has several turns, and so has one whose package brings an `Env` that talks to its one agent. Everything
runs in this process, from the beginning of the conversation each time (`verifiers_play`). What needs more is refused with
a sentence: a container or another runtime, a tool server elsewhere, set-up and clean-up, several agents or a harness of
its own, rewritten answers (they are trained on as they were drawn), a model as judge or user (receivers could not come to
the same reward). Rewards are the task's own, weighted; where weights add up to more than 1 the sum is divided by theirs.
The last tenth of the tasks is held out.
"""

import asyncio
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from p2prl.environments.registry import nearest, package_version, refuse_unknown
from p2prl.environments.split import Split
from p2prl.errors import ConfigError

MAX_TASKS = 100_000


class TasksetEnvironment:
    """Implements `registry.Environment`."""

    def __init__(self, name: str, version: str, tasks: list[Any], env: Any, taskset: Any) -> None:
        self.name, self.version, self._tasks, self._env, self._taskset = name, version, tasks, env, taskset
        self._split = Split.tail(len(tasks))
        self.num_prompts: int | None = self._split.num_training

    def _task(self, index: int) -> Any:
        return self._tasks[self._split.place(index)]

    def prompt(self, index: int) -> str:
        said = asyncio.run(self._play(self._task(index), []))
        if said is None:
            raise ValueError("the task is over before anything was asked")
        return said

    def reward(self, index: int, answer: str) -> tuple[float, str]:
        return self._rewarded(index, [answer])

    def _rewarded(self, index: int, answers: Sequence[str]) -> tuple[float, str]:
        trace = asyncio.run(self._scored(self._task(index), answers))
        given = {name: reward for name, reward in trace.rewards.items() if reward is not None}
        total = sum(reward.value for reward in given.values())
        weights = sum(max(0.0, reward.weight) for reward in given.values())
        detail = ", ".join(f"{name} {reward.score:g}" for name, reward in sorted(given.items()))
        return total / max(1.0, weights), detail or "the task gave no reward"

    async def _play(self, task: Any, answers: Sequence[str]) -> str | None:
        """What is said after these answers; None: it is over."""
        from p2prl.environments.verifiers_text import opening

        play, asked = await self._run(task, answers)
        if not asked:
            return None
        return play.heard[-1] if answers else opening(play.asked, play.tools)

    async def _run(self, task: Any, answers: Sequence[str]) -> tuple[Any, bool]:
        """The conversation, and whether the model is asked for more."""
        from verifiers.v1.agent import Agents  # pyright: ignore[reportMissingImports]

        from p2prl.environments.verifiers_play import Asked, Seat

        seats: list[Seat] = []

        def make(name: str, config: Any) -> Any:
            seats.append(Seat(name, config, answers, self._taskset.toolsets(self._taskset.config)))
            return seats[-1]

        agents = Agents(self._env.config, make)
        asked = False
        try:
            await self._env.setup(agents)
            await self._env.run(task, agents)
        except Asked:
            asked = True
        except BaseExceptionGroup as group:  # of an environment that waits for it in a task
            if group.subgroup(Asked) is None:
                raise
            asked = True
        play = seats[0].played
        if play is None:
            raise ValueError("the environment ran no agent")
        return play, asked

    async def _scored(self, task: Any, answers: Sequence[str]) -> Any:
        from verifiers.v1.episode import EnvInfo, Episode  # pyright: ignore[reportMissingImports]

        play, asked = await self._run(task, answers)
        trace = play.trace
        if asked:
            await play.close("max_turns")
        episode = Episode(env=EnvInfo(id=self._env.config.env_id), task=trace.task, traces=[trace], ok=True)
        await self._env.finalize(task, episode)
        return trace


class ConversingTaskset(TasksetEnvironment):
    """Implements `registry.Conversing` and `registry.Replaying` too."""

    def respond(self, index: int, answers: Sequence[str]) -> str | None:
        return asyncio.run(self._play(self._task(index), answers))

    def responses(self, index: int, answers: Sequence[str]) -> Sequence[str]:
        play, _ = asyncio.run(self._run(self._task(index), answers))
        return play.heard[1:]

    def reward_turns(self, index: int, answers: Sequence[str]) -> tuple[float, str]:
        return self._rewarded(index, answers)

    def reference(self, index: int) -> Sequence[str] | None:
        return None


def load_taskset(name: str, params: Mapping[str, object]) -> TasksetEnvironment:
    """Raises ConfigError for a task set that isn't there, can't be made, or can't be run here."""
    owner = f"environment verifiers:{name}"
    try:
        from verifiers.v1.envs.single_agent import SingleAgentEnv  # pyright: ignore[reportMissingImports]
        from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(
            f"{owner} needs the package verifiers; install it with: pip install 'p2prl[verifiers]'"
        ) from error
    try:
        config_type, env_kind = loaders.taskset_config_type(name), loaders.environment_class(name)
    except Exception as error:  # noqa: BLE001  # another package's code: whatever it raises, a sentence
        said = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(f"{owner} can't be loaded: {said}{_hint(name)}") from error
    plain = env_kind is SingleAgentEnv
    refuse_unknown("parameter", params, _usual_params(config_type, plain), owner)
    own = {key: value for key, value in params.items() if key != "env"}
    try:
        config = loaders.resolve_env_config({**_table(params), "taskset": own | {"id": name}})
        env = env_kind(config)
        taskset = env.taskset
        tasks = list(itertools.islice(taskset, MAX_TASKS))
    except Exception as error:  # noqa: BLE001  # another package's code: whatever it raises, a sentence
        said = f"{type(error).__name__}: {str(error)[:200]}"
        raise ConfigError(f"{owner} can't be made from {dict(params)}: {said}; correct its parameters") from error
    if not tasks:
        raise ConfigError(f"{owner} has no tasks; an environment needs at least one")
    lacks = _wants_elsewhere(name, env, taskset) or next(filter(None, (_needs_more(task, plain) for task in tasks)), "")
    if lacks:
        raise ConfigError(f"{owner} {lacks}: p2prl plays a task with one agent, by code alone; take another")
    talks = not plain or bool(taskset.toolsets(taskset.config)) or any(map(_toolsets, tasks))
    return (ConversingTaskset if talks else TasksetEnvironment)(
        f"verifiers:{name}", _version(name), tasks, env, taskset
    )


def usual_params(name: str) -> dict[str, Any]:
    """What may be set of a task set that could be loaded, and its value otherwise."""
    from verifiers.v1.envs.single_agent import SingleAgentEnv  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]

    return _usual_params(loaders.taskset_config_type(name), loaders.environment_class(name) is SingleAgentEnv)


def _usual_params(config_type: Any, plain: bool) -> dict[str, Any]:
    usual: dict[str, Any] = {} if plain else {"env": {}}
    for key, field in config_type.model_fields.items():
        if key != "id":
            usual[key] = None if field.is_required() or field.default_factory else field.default
    return usual


def _table(params: Mapping[str, object]) -> dict[str, Any]:
    """The environment's own parameters."""
    given = params.get("env", {})
    if not isinstance(given, Mapping):
        raise TypeError(f"env is {given!r}, not a table")
    return dict(given)


def _hint(name: str) -> str:
    from p2prl.environments import catalogue

    known = [entry.name.partition(":")[2] for entry in catalogue.entries() if entry.name.startswith("verifiers:")]
    return f"; did you mean {nearest(name, known)!r}?" if known else "; is its package installed?"


def _version(name: str) -> str:
    """Of the package that has the task set; those inside verifiers come with it."""
    found = package_version(name.replace("_", "-"))
    return package_version("verifiers") if found.startswith("p2prl==") else found


def _wants_elsewhere(name: str, env: Any, taskset: Any) -> str:
    """Why an environment can't be played in this process; "" when it can."""
    from verifiers.v1.configs.agent import agent_config_fields  # pyright: ignore[reportMissingImports]
    from verifiers.v1.env import Env  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]

    seats = agent_config_fields(env.config)
    needs = {
        f"has {len(seats)} agents": len(seats) != 1,
        "brings a harness of its own": loaders.default_harness_id(name) != "bash"
        or any(seat.harness is not None and seat.harness.id not in ("null", "bash") for seat in seats.values()),
        "starts and stops something around its rollouts": type(env).start is not Env.start,
        "has tool servers elsewhere": any(map(_is_elsewhere, taskset.toolsets(taskset.config))),
    }
    return next((what for what, wanted in needs.items() if wanted), "")


def _toolsets(task: Any) -> list[Any]:
    return type(task).toolsets(task.config)


def _is_elsewhere(toolset: Any) -> bool:
    config = toolset.config
    return bool(config.url) or config.runtime.type != "subprocess"


def _needs_more(task: Any, plain: bool) -> str:
    """Why it can't be played without a runtime; "" when it can. `plain`: no environment speaks for its user."""
    from verifiers.v1.session import Response, hook_boundary  # pyright: ignore[reportMissingImports]
    from verifiers.v1.task import Task  # pyright: ignore[reportMissingImports]
    from verifiers.v1.utils.decorators import discover_decorated  # pyright: ignore[reportMissingImports]

    data, kind = task.data, type(task)
    messages = [] if data.prompt is None or isinstance(data.prompt, str) else data.prompt
    needs = {
        "has tasks without a prompt, and no user who speaks": data.prompt is None and plain,
        "has prompts of several speakers": any(message.role not in ("user", "system") for message in messages),
        "has tasks without text": data.prompt is not None and not prompt_text(task).strip(),
        "has tool servers elsewhere": any(map(_is_elsewhere, _toolsets(task))),
        "rewrites answers": any(
            hook_boundary(hook, allow_trace=False) is Response for hook in discover_decorated(task, "intercept")
        ),
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


def prompt_text(task: Any) -> str:
    parts = (task.data.system_prompt, task.data.prompt_text)
    return "\n\n".join(part for part in parts if part)
