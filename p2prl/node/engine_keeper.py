"""Starts the engine as config and recipe say, and remembers over restarts what memory allowed.

In: config, recipe, what the engine says of itself. Out: a started engine; its plan in the log; `engine.json` in the home.

Invariants: a bound that memory forced is kept per model, engine, device and precision, and only ever lowered; an engine
that ran on a GPU is not started on the CPU instead: the node goes on without one and says why.
"""

import os
from collections.abc import Sequence
from typing import IO, Any, Protocol

import msgspec

from p2prl.config import NodeConfig
from p2prl.errors import P2prlError
from p2prl.models.lora_rule import lora_of
from p2prl.node.children import Child, ChildDied
from p2prl.node.ports import ChildPort
from p2prl.paths import Home
from p2prl.recipe import Recipe
from p2prl.rollout import messages
from p2prl.rollout.plan import Plan, Wish, after_kill

MODULE = "p2prl.rollout.engine_process"
START_S = 600.0  # a large model from a slow disk, GPU kernels that are compiled


class Host(Protocol):
    """What is needed here of `state.NodeState`."""

    @property
    def home(self) -> Home: ...
    @property
    def config(self) -> NodeConfig: ...
    @property
    def recipe(self) -> Recipe: ...
    def emit(self, kind: str, **data: object) -> None: ...


def child_threads(config: NodeConfig) -> int:
    """Of each child that computes."""
    return config.limits.threads or max(1, (os.cpu_count() or 1) // 2)


def child_environ(threads: int) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}


def engine_child(threads: int, stderr: IO[bytes] | None) -> Child:
    """The engine's process, not started yet."""
    environ = child_environ(threads)
    return Child(MODULE, (), messages.Reply, environ=environ, stderr=stderr, patience_s=10.0)


def was_killed(error: P2prlError) -> bool:
    """Whether it tells of an engine that the system killed, most likely for its memory."""
    return isinstance(error, ChildDied) and error.module == MODULE and error.killed


class EngineKeeper:
    def __init__(self, state: Host, engine: ChildPort, threads: int) -> None:
        self._state, self._engine, self._threads = state, engine, threads
        self._file = state.home.state / "engine.json"
        self._plan: Plan | None = None
        engine.on_notice = self._on_notice

    async def start(self, stop_ids: Sequence[int], pad_id: int) -> messages.Ready:
        """Raises ChildDied with the reason; again with less where memory was it."""
        state, config = self._state, self._state.config.rollout
        wish = self._wish()
        setup = messages.Setup(
            source=state.recipe.model.source,
            models_cache=str(state.home.models),
            stop_ids=tuple(stop_ids),
            pad_id=pad_id,
            threads=self._threads,
            engine=config.engine,
            lora=lora_of(state.recipe.learner),
            adapters=config.adapters,
            device="cuda" if self._plan is not None and self._plan.device == "cuda" else "auto",
            dtype=config.dtype,
            group_size=wish.group_size,
            max_new_tokens=wish.max_new_tokens,
            most_batch_tokens=wish.most_batch_tokens,
            stop=state.recipe.sampling.stop,
        )
        try:
            return await self._engine.start(setup, timeout_s=START_S)
        except P2prlError as error:
            self.failed(error)
            raise

    def failed(self, error: P2prlError) -> None:
        """A kill of the engine by the system is a reason to ask for less; another child's end is none, nor a hang."""
        if self._plan is None or not was_killed(error):
            return
        less = after_kill(self._plan, self._wish())
        if less is not None:
            self._remember(msgspec.structs.replace(self._plan, batch_tokens=less, why="it was killed with more"))

    def _wish(self) -> Wish:
        config, recipe = self._state.config.rollout, self._state.recipe
        known = self._read().get(self._key(self._plan), 0) if self._plan is not None else min(self._known(), default=0)
        return Wish(config.engine, config.dtype, recipe.sampling.group_size, recipe.longest_answer, known)

    def _known(self) -> list[int]:
        """Bounds of this model in whatever engine: before the first plan it is not known which will be chosen."""
        source = self._state.recipe.model.source
        return [bound for key, bound in self._read().items() if key.startswith(f"{source} ")]

    def _on_notice(self, notice: Any) -> None:
        if not isinstance(notice, messages.Planned):
            return
        before, plan = self._plan, notice.plan
        self._plan = plan
        self._state.emit("log", level="info", event="engine", plan=str(plan))
        if before is not None and self._key(before) == self._key(plan) and plan.batch_tokens < before.batch_tokens:
            self._remember(plan)

    def _key(self, plan: Plan) -> str:
        return f"{self._state.recipe.model.source} {plan.engine} {plan.device} {plan.dtype}"

    def _read(self) -> dict[str, int]:
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, int])
        except (OSError, msgspec.MsgspecError):  # none yet, or damaged: it is learnt again
            return {}

    def _remember(self, plan: Plan) -> None:
        self._plan = plan
        known = self._read()
        key = self._key(plan)
        known[key] = min(plan.batch_tokens, known.get(key, plan.batch_tokens))
        staged = self._file.with_suffix(".staged")
        try:
            staged.write_bytes(msgspec.json.encode(known))
            staged.replace(self._file)
        except OSError as error:
            self._state.emit("log", level="warning", event="the engine's bound was not kept", why=str(error)[:200])
        self._state.emit("log", level="warning", event="engine: less at once from now on", plan=str(plan))
