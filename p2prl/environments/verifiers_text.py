"""How a conversation of `verifiers` is written for a model, and how its tool calls are read.

In: typed messages, tools; a model's text. Out: the texts that a prompt and a turn are made of; an assistant's message.

Tools are told in the prompt, called as <tool_call>{"name": ..., "arguments": {...}}</tool_call>, and answer as
<tool_response>...</tool_response>: the way of Hermes and Qwen, of which any model can read and write the text.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.v1.harnesses.utils.compaction import bound_tool_message  # pyright: ignore[reportMissingImports]
from verifiers.v1.types import (  # pyright: ignore[reportMissingImports]
    AssistantMessage,
    SystemMessage,
    Tool,
    ToolCall,
    ToolMessage,
    content_text,
)

MAX_DEPTH = 100  # of a call's JSON; what is deeper is read by some Pythons and not by others
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_TOOLS = """You may call tools. Their signatures:
<tools>
{}
</tools>

To call one, write its name and arguments as JSON:
<tool_call>
{{"name": "NAME", "arguments": {{}}}}
</tool_call>"""


def opening(messages: Sequence[Any], tools: Sequence[Tool]) -> str:
    """The prompt, as one text of the user's: the system's words, the tools, the user's."""
    system = [_spoken(message) for message in messages if isinstance(message, SystemMessage)]
    others = [_spoken(message) for message in messages if not isinstance(message, SystemMessage)]
    return "\n\n".join(part for part in (*system, _told(tools), *others) if part)


def going_on(messages: Sequence[Any]) -> str:
    """What is said between two turns."""
    return "\n".join(map(_spoken, messages))


def _spoken(message: Any) -> str:
    text = content_text(message.content)
    return f"<tool_response>\n{text}\n</tool_response>" if isinstance(message, ToolMessage) else text


def _told(tools: Sequence[Tool]) -> str:
    if not tools:
        return ""
    lines = (
        {"name": tool.name, "description": tool.description, "parameters": tool.parameters} for tool in tools
    )  # fmt: skip
    return _TOOLS.format("\n".join(json.dumps(line, sort_keys=True) for line in lines))


def assistant(text: str, turn: int, has_tools: bool) -> AssistantMessage:
    """What can't be read as a call is no call, but text."""
    calls: list[ToolCall] = []
    for found in _CALL.finditer(text) if has_tools else ():
        try:
            call = json.loads(found[1])
        except (ValueError, RecursionError):
            continue
        if isinstance(call, Mapping) and _is_name(call.get("name")) and _is_flat(call):
            arguments = json.dumps(call.get("arguments", {}))
            calls.append(ToolCall(id=f"call-{turn}-{len(calls)}", name=call["name"], arguments=arguments))
    return AssistantMessage(content=_CALL.sub("", text).strip() if calls else text, tool_calls=calls or None)


def _is_name(name: object) -> bool:
    """A text without lone surrogates, which JSON can spell and UTF-8 can't."""
    return isinstance(name, str) and not any("\ud800" <= character <= "\udfff" for character in name)


def _is_flat(call: object) -> bool:
    """Level by level, so that depth costs no stack."""
    level = [call]
    for _ in range(MAX_DEPTH):
        level = [
            part
            for whole in level
            for part in (whole.values() if isinstance(whole, dict) else whole if isinstance(whole, list) else ())
        ]
        if not level:
            return True
    return False


def result(call: ToolCall, text: str) -> ToolMessage:
    text = text.encode("utf-8", "replace").decode()  # an argument that it repeats may hold a lone surrogate
    message = {"role": "tool", "tool_call_id": call.id, "content": text, "name": call.name}
    return ToolMessage.model_validate(bound_tool_message(message))
