"""Turns the messages of a chat request into those that vLLM hands to the chat template (its `chat_utils`). Pure.

A message that the router cannot turn as the engine does raises NotReproducible with a short reason. The reason becomes
the label of a counter, and the request is routed by load alone.
"""

from __future__ import annotations

import json
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Format = Literal["string", "openai"]
Message = dict[str, Any]

TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal", "thinking": "thinking"}
#: Fields of a part that vLLM reads itself. A template that loops over parts sees only the other fields of a text part.
KNOWN_PART_FIELDS = frozenset(
    {
        *("type", "text", "refusal", "thinking", "closed", "name", "uuid", "data", "file", "prompt_cache_breakpoint"),
        *("image_url", "image_pil", "image_embeds", "input_audio", "audio_url", "audio_embeds"),
        *("video_url", "video_embeds"),
    }
)
#: Roles whose messages ``conversation`` must not copy unchanged, even if they have only a text.
_OTHER_FIELDS = frozenset({"system", "developer"})
_ROLE = itemgetter("role")
BILLING_HEADER = "x-anthropic-billing-header"  # begins a first line of system text that differs in each request


class NotReproducible(Exception):  # noqa: N818  not an error: the engine serves such a request
    """The router cannot make the token ids that the engine will make. ``reason``: a word for the metric."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def checked_list(value: Any, reason: str = "content") -> list[Any]:
    """Return ``value`` if it is a list, else raise NotReproducible with ``reason``."""
    if not isinstance(value, list):
        raise NotReproducible(reason)
    return value


def conversation(messages: Iterable[Message], content_format: Format) -> list[Message]:
    """Return the messages as the template gets them. Raises NotReproducible if a part is not text."""
    if content_format != "string":
        return [_message(message, content_format) for message in messages]
    return [
        {"role": message["role"], "content": message["content"]}
        if len(message) == 2 and type(message.get("content")) is str and message["role"] not in _OTHER_FIELDS
        else _message(message, content_format)
        for message in messages
    ]


def _message(message: Message, content_format: Format) -> Message:
    role, content = message["role"], message.get("content")
    result: Message = {"role": role, "content": _content(content, role, content_format)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls:
            result["tool_calls"] = [_tool_call(call) for call in checked_list(calls, "tool_calls")]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            result["reasoning"] = result["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        result["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            result[name] = message[name]
    if role == "developer":
        result["tools"] = _developer_tools(message.get("tools"))
    return result


def _content(content: Any, role: str, content_format: Format) -> Any:
    if isinstance(content, str) and role != "system" and content_format == "string":
        return content
    parts = [] if content is None else [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise NotReproducible("content")
    if role == "system":
        parts = [kept for part in parts if (kept := _without_billing_header(part)) is not None]
    texts = [(text, part) for part in parts if (text := _text(part)) is not None]
    if content_format == "openai" and role != "tool":
        return [{"type": "text", "text": text} | _extras(part) for text, part in texts]
    return "\n".join(text for text, _ in texts if text or content_format == "openai")


def _extras(part: Any) -> Message:
    if isinstance(part, str):
        return {}
    return {name: value for name, value in part.items() if name not in KNOWN_PART_FIELDS}


def _text(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    if not is_text(part):
        raise NotReproducible("parts")
    text: str | None = part.get(TEXT_PARTS[part["type"]])
    return text


def is_text(part: Any) -> bool:
    """Return whether the part is text, or a text part without any."""
    if isinstance(part, str):
        return True
    if not isinstance(part, dict) or not isinstance(part.get("type"), str) or part["type"] not in TEXT_PARTS:
        return False
    text = part.get(TEXT_PARTS[part["type"]])
    return text is None or isinstance(text, str)


def _without_billing_header(part: Any) -> Any:
    """Return a part without its billing header; None if nothing is left. As in vLLM, only "text" parts can have one."""
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
    if not isinstance(text, str) or not text.startswith(BILLING_HEADER):
        return part
    kept = text.partition("\n")[2]
    return None if not kept else kept if isinstance(part, str) else part | {"text": kept}


def _tool_call(call: Any) -> Message:
    """Return a tool call with its keys in the engine's order, and its arguments as an object."""
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise NotReproducible("tool_calls")
    function = call["function"]
    arguments: Any = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except (ValueError, RecursionError):
            arguments = {}
    if not isinstance(arguments, dict):
        arguments = {}
    reordered = {"arguments": arguments} | {name: value for name, value in function.items() if name != "arguments"}
    first = {"id": call.get("id"), "function": reordered, "type": call.get("type")}
    return first | {name: value for name, value in call.items() if name not in first}


def _developer_tools(tools: Any) -> list[Message] | None:
    """Return the tools of a developer message, unchanged but for the order of their keys."""
    if tools is None:
        return None
    made = []
    for tool in checked_list(tools, "developer_tools"):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise NotReproducible("developer_tools")
        first = [name for name in ("name", "description", "parameters", "strict") if name in function]
        ordered = {name: function[name] for name in first} | function
        made.append({"function": ordered, "type": "function"} | tool | {"function": ordered})
    return made


def tool_schemas(tools: Any) -> list[Message] | None:
    """Return tools as the engine dumps them: known fields in its order, null for missing description or parameters."""
    return [_tool_schema(tool) for tool in checked_list(tools, "tools")] if tools else None


def _tool_schema(tool: Any) -> Message:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or "name" not in function:
        raise NotReproducible("tools")
    deferred = tool.get("defer_loading")
    schema = {name: function.get(name) for name in ("name", "description", "parameters")}
    functions_own = function.get("defer_loading")
    flags = {"strict": function.get("strict"), "defer_loading": deferred if functions_own is None else functions_own}
    if not all(value is None or isinstance(value, bool) for value in (*flags.values(), deferred)):
        raise NotReproducible("tools")  # the engine reads "yes" or 1 as true
    schema |= {name: value for name, value in flags.items() if value is not None}
    made: Message = {"type": tool.get("type", "function"), "function": schema}
    return made if deferred is None else made | {"defer_loading": deferred}


def developer_to_system(messages: list[Message]) -> list[Message]:
    """Turn ``developer`` messages into ``system`` ones, for a template without the role ``developer``.

    All system text goes to the front.
    """
    if "developer" not in map(_ROLE, messages):
        return messages
    messages = [_as_system(message) if message["role"] == "developer" else message for message in messages]
    systems = [index for index, message in enumerate(messages) if message["role"] == "system"]
    if systems == [0]:
        return messages
    texts = [_joined(messages[index]["content"]) for index in systems]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in messages if message["role"] != "system")]


def _as_system(message: Message) -> Message:
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _joined(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
