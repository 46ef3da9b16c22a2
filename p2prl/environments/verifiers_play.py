"""One conversation with a task of `verifiers` 0.4, played from its beginning with answers that are there already.

In: a task, its environment, the answers so far. Out: what the model would be asked next, or that it is over; a trace to
be scored.

Its own code runs as it would there: tool servers with the rollout's state, stops and interceptions at the model's
boundary (`RolloutSession`), an environment's `run` with the one agent it has. What is ours is what stands around it in
verifiers: the loop of its `null` harness, without a model server, sockets or processes.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from mcp.server.mcpserver import MCPServer  # pyright: ignore[reportMissingImports]
from pydantic import TypeAdapter
from verifiers.v1 import graph  # pyright: ignore[reportMissingImports]
from verifiers.v1.agent import Segment  # pyright: ignore[reportMissingImports]
from verifiers.v1.configs.agent import AgentConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.utils.compaction import bound_tool_message  # pyright: ignore[reportMissingImports]
from verifiers.v1.mcp import server as tool_server  # pyright: ignore[reportMissingImports]
from verifiers.v1.session import RolloutLimits, RolloutSession, hook_boundary  # pyright: ignore[reportMissingImports]
from verifiers.v1.state import state_cls  # pyright: ignore[reportMissingImports]
from verifiers.v1.trace import AgentInfo, Trace, TraceTask  # pyright: ignore[reportMissingImports]
from verifiers.v1.types import (  # pyright: ignore[reportMissingImports]
    AssistantMessage,
    Request,
    Response,
    SystemMessage,
    Tool,
    ToolCall,
    ToolMessage,
    UserMessage,
)
from verifiers.v1.utils.decorators import discover_decorated  # pyright: ignore[reportMissingImports]

from p2prl.environments.verifiers_text import assistant, going_on, result


class Asked(BaseException):
    """The model is asked and there is no answer yet. Not an Exception, so that an environment's code lets it pass."""


class Over(Exception):
    """A stop ended the conversation."""


class Seat:
    """The one agent of an environment, as its `run` sees it: `run(task)` or `interaction(task)`, once."""

    def __init__(self, name: str, config: AgentConfig, answers: Sequence[str], shared: Sequence[Any]) -> None:
        """`shared`: tool servers of the whole task set."""
        self.name, self.config, self.trainable = name, config, True
        self._left, self._shared = list(answers), shared
        self.played: Play | None = None

    async def run(self, task: Any, **_: Any) -> Any:
        async with self._open(task) as play:
            await play.segment([])
        return play.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator["Interaction"]:
        async with self._open(task) as play:
            yield Interaction(play)
            await play.close("user_closed")

    @asynccontextmanager
    async def _open(self, task: Any) -> AsyncIterator["Play"]:
        if self.played is not None:
            raise TypeError("the environment runs its agent more than once, which are several conversations")
        info = AgentInfo(config=self.config, name=self.name, trainable=self.trainable)
        self.played = play = Play(task, self._left, info)
        async with AsyncExitStack() as stack:
            await play.start(stack, self._shared)
            yield play
        await play.close("agent_completed")


class Interaction:
    """What `verifiers.Interaction` is to an environment's code: it is the user, turn by turn."""

    def __init__(self, play: "Play") -> None:
        self._play, self._begun = play, False

    @property
    def trace(self) -> Any:
        return self._play.trace

    async def turn(self, message: Any = None) -> Any:
        prompted = not self._begun and self._play.task.data.prompt is not None
        if (message is None) != prompted:
            raise ValueError("a prompted task's opening reply is taken by a bare turn(), and nothing else is")
        self._begun = True
        if isinstance(message, str):
            message = [UserMessage(content=message)]
        before = len(self.trace.nodes)
        num_turns = self.trace.num_turns
        await self._play.segment(_typed(message or []))
        if self.trace.num_turns == num_turns:
            return Segment(messages=[], terminated=True)
        new = [node.message for node in self.trace.nodes[before:]]
        first = next(place for place, each in enumerate(new) if isinstance(each, AssistantMessage))
        return Segment(messages=[each for each in new[first:] if isinstance(each, (AssistantMessage, ToolMessage))])


class Play:
    """`asked`: the messages that the model was last asked with, beyond those it has seen; `heard`: their text, each time."""

    def __init__(self, task: Any, left: list[str], info: AgentInfo) -> None:
        self.task, self._left = task, left
        self.asked: list[Any] = []
        self.heard: list[str] = []
        self.tools: list[Tool] = []
        self._servers: dict[str, tuple[MCPServer, str]] = {}
        self._messages: list[Any] = []
        self.trace: Any = Trace(
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=info, state=state_cls(type(task))(),
        )  # fmt: skip
        rewrites = [(hook_boundary(hook, allow_trace=False), hook) for hook in discover_decorated(task, "intercept")]
        stops = [(hook_boundary(hook, allow_trace=True), hook) for hook in task.hooks("stop")]
        nobody: Any = None  # no model is called
        self._session = RolloutSession(
            ctx=nobody, trace=self.trace, gates_tools=True,
            limits=RolloutLimits(max_turns=info.config.max_turns),
            trace_stops=[hook for kind, hook in stops if kind is Trace],
            request_stops=[hook for kind, hook in stops if kind is Request],
            response_stops=[hook for kind, hook in stops if kind is Response],
            request_interceptors=[hook for kind, hook in rewrites if kind is Request],
        )  # fmt: skip

    async def start(self, stack: AsyncExitStack, shared: Sequence[Any]) -> None:
        """Tool servers, the task set's before the task's own; the prompt."""
        own = type(self.task).toolsets(self.task.config)
        for toolset in (*shared, *own):
            _share_state(toolset, self.trace)
            await stack.enter_async_context(toolset._exit_stack)
            await toolset.setup()
            if toolset in own:
                await toolset.setup_task(self.task.data)
            server, prefix = MCPServer(toolset.server_name or type(toolset).__name__), toolset.server_name
            toolset.register(server)
            for tool in await server.list_tools():
                name = f"{prefix}_{tool.name}" if prefix else tool.name
                if name in self._servers:
                    raise ValueError(f"there are two tools {name!r}")
                self._servers[name] = server, tool.name
                self.tools.append(Tool(name=name, description=tool.description or "", parameters=tool.input_schema))
        data = self.task.data
        if data.system_prompt:
            self._messages.append(SystemMessage(content=data.system_prompt))
        prompt = data.prompt
        self._messages += [UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])

    async def close(self, reason: str) -> None:
        """It ended, for the first reason that is given, and is scored."""
        self.trace.stop(reason)
        if not self.trace.ok:
            self.trace.ok = True
            await self.task.score(self.trace, None)

    async def segment(self, messages: list[Any]) -> None:
        """From what the user says to an answer that calls no tool, or the end."""
        try:
            if messages and self._session.request_interceptors:
                prepared, records = await self._session.prepare_users(Request(messages=messages))
                messages = prepared.messages
                self.trace.request_rewrites.extend(records)
            self._messages += messages
            while calls := await self._answer():
                for call in calls:
                    self._messages.append(await self._called(call))
        except Over:
            return

    async def _answer(self) -> list[ToolCall]:
        """The model's next turn, as `verifiers.v1.interception` takes it; the tools it calls."""
        session, trace = self._session, self.trace
        if session.stopped or await session.refused() is not None:
            raise Over
        request, records, stopped = await session.rewrite_request(
            Request(messages=self._messages, tools=self.tools or None)
        )
        trace.request_rewrites.extend(records)
        turn = graph.prepare_turn(trace, request.messages, request.tools)
        if stopped is not None:
            turn.commit_prompt()
            self._stop(stopped)
        self.heard.append(going_on(turn.tail))
        if not self._left:
            self.asked = turn.tail
            raise Asked
        message = assistant(self._left.pop(0), trace.num_turns, bool(self.tools))
        reason = "tool_calls" if message.tool_calls else "stop"
        response = Response(id=str(trace.num_turns), created=0, model="", message=message, finish_reason=reason)
        response, _, stopped = await session.rewrite_response(response)
        node = turn.commit(response)
        session.consume_prepared(turn.tail)
        stopped = stopped or await session.gate_tool_calls(node)
        if stopped is not None:
            self._stop(stopped)
        self._messages.append(response.message)
        return response.message.tool_calls or []

    def _stop(self, reason: str) -> None:
        self.trace.stop(reason)
        raise Over

    async def _called(self, call: ToolCall) -> ToolMessage:
        try:
            arguments: object = json.loads(call.arguments or "{}")
        except json.JSONDecodeError as error:
            return result(call, f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON")
        if self._session.request_interceptors or self._session.request_stops:
            decision = await self._session.decide_tool(call.id, call.name, arguments)
            if decision["action"] == "stop":
                self._stop(decision["reason"])
            if decision["action"] == "deny":
                return ToolMessage.model_validate(bound_tool_message(decision["message"]))
        if not isinstance(arguments, dict):
            kind = type(arguments).__name__
            return result(call, f"error: tool arguments must be a JSON object, got {kind}; resend as an object")
        if call.name not in self._servers:
            return result(call, f"error: unknown tool {call.name!r}")
        server, name = self._servers[call.name]
        try:
            reply: Any = await server.call_tool(name, arguments)
        except Exception as error:  # noqa: BLE001  # as an MCP server does: what a tool raises is its answer
            return result(call, str(error))
        return result(call, "\n".join(block.text if block.type == "text" else str(block) for block in reply.content))


def _typed(messages: Sequence[Any]) -> list[Any]:
    from verifiers.v1.dialects import parse_message  # pyright: ignore[reportMissingImports]

    return [parse_message(message) if isinstance(message, dict) else message for message in messages]


def _share_state(toolset: Any, trace: Any) -> None:
    """A tool sees the rollout's state and writes it back, as over verifiers' state channel, which is HTTP."""
    ours, theirs = TypeAdapter(type(trace.state)), toolset._state_adapter

    async def pull() -> Any:
        return theirs.validate_json(ours.dump_json(trace.state))

    async def push(before: bytes) -> None:
        after = theirs.dump_json(tool_server._call_state.get())
        if after != before:
            trace.state = ours.validate_json(after)

    toolset._pull_state, toolset._push_state = pull, push
