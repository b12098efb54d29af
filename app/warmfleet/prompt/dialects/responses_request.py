"""Turns the body of OpenAI's /v1/responses into the chat that vLLM makes of it (``construct_input_messages``). Pure.

A body that the router cannot turn as the engine does raises NotReproducible with a short reason.
"""

from __future__ import annotations

from typing import Any

from warmfleet.prompt.messages import NotReproducible, checked_list

Json = dict[str, Any]

#: Fields of the body that mean the same in a chat.
SAME = (
    *("model", "stream", "cache_salt", "chat_template_kwargs", "priority", "prompt_cache_key", "request_id"),
    "mm_processor_kwargs",
    "media_io_kwargs",
)
#: Field of the body → reason. With such a field the prompt is not wholly in the body.
ELSEWHERE = {"previous_response_id": "previous_response", "previous_input_messages": "previous_response"}
# Tuples, because a client's value may be a list or an object, for which ``in`` raises with a set.
TEXTS = ("input_text", "output_text", "text")
UNFINISHED = ("in_progress", "incomplete")
ROLES = ("user", "system", "developer")


def as_chat(body: Json) -> Json:
    """Return the chat's body. Raises NotReproducible."""
    for name, reason in ELSEWHERE.items():
        if body.get(name) is not None:
            raise NotReproducible(reason)
    if body.get("truncation", "disabled") != "disabled":
        raise NotReproducible("truncation")
    chat = {name: body[name] for name in SAME if body.get(name) is not None}
    chat["add_special_tokens"] = True  # vLLM does so on this path, but not for /v1/chat/completions
    if body.get("max_output_tokens") is not None:
        chat["max_tokens"] = body["max_output_tokens"]
    messages: list[Json] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": _text(body["instructions"])})
    items = body.get("input")
    if isinstance(items, str):
        messages.append({"role": "user", "content": items})
    else:
        for item in checked_list(items):
            _add(messages, item)
        last = items[-1] if items else {}
        if last.get("type", "message") in ("message", "reasoning") and last.get("status") in UNFINISHED:
            chat |= {"add_generation_prompt": False, "continue_final_message": True}
    chat["messages"] = messages
    if body.get("tools"):
        chat["tools"] = [_tool(tool) for tool in checked_list(body["tools"])]
        chat["tool_choice"] = body.get("tool_choice", "auto")
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = _text(reasoning["effort"])
    return chat


def with_names_first(messages: list[Json]) -> list[Json]:
    """Put the name of a called function before its arguments, as engines do for the template on this path."""
    for message in messages:
        for call in message.get("tool_calls") or ():
            call["function"] = {"name": call["function"]["name"]} | call["function"]
    return messages


def _add(chat: list[Json], item: Any) -> None:
    """Append the message that the engine makes of an item, or add the item to the assistant's message that is last."""
    if not isinstance(item, dict):
        raise NotReproducible("content")
    kind, role = item.get("type", "message"), item.get("role")
    last = chat[-1] if chat and chat[-1]["role"] == "assistant" else None
    if kind == "function_call":
        call = _call(item)
        if last is None:
            chat.append({"role": "assistant", "tool_calls": [call]})
        else:
            last.setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        _add_to_assistant(chat, last, "reasoning", _reasoning(item))
    elif kind == "function_call_output":
        chat.append(
            {"role": "tool", "content": _content(item.get("output")), "tool_call_id": _text(item.get("call_id"))}
        )
    elif kind == "message" and role == "assistant":
        _add_to_assistant(chat, last, "content", _answer(item.get("content")))
    elif kind == "message" and role in ROLES:
        chat.append({"role": role, "content": _content(item.get("content"))})
    else:
        raise NotReproducible("content")


def _add_to_assistant(chat: list[Json], last: Json | None, name: str, text: str) -> None:
    if last is not None and last.get(name) is None:
        last[name] = text
    else:
        chat.append({"role": "assistant", name: text})


def _answer(content: Any) -> str:
    """Return the text of an earlier answer: that of its first part, as the engine does."""
    if isinstance(content, str):
        return content
    parts = checked_list(content)
    if not parts or not isinstance(parts[0], dict) or parts[0].get("type") != "output_text":
        raise NotReproducible("content")
    return _text(parts[0].get("text"))


def _reasoning(item: Json) -> str:
    if item.get("encrypted_content"):
        raise NotReproducible("content")
    texts = item.get("content") or item.get("summary")
    if not texts:
        return ""
    first = checked_list(texts)[0]
    return _text(first.get("text") if isinstance(first, dict) else None)


def _content(content: Any) -> Any:
    return content if isinstance(content, str) else [_part(part) for part in checked_list(content)]


def _part(part: Any) -> Json:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_image":
        return {"type": "input_image", "image_url": part.get("image_url")}
    if kind not in TEXTS:
        raise NotReproducible("content")
    return {"type": kind, "text": _text(part.get("text"))}


def _call(item: Json) -> Json:
    if item.get("namespace"):
        raise NotReproducible("tool_calls")
    function = {"name": _text(item.get("name")), "arguments": _text(item.get("arguments"))}
    return {"id": _text(item.get("call_id")), "type": "function", "function": function}


def _tool(tool: Any) -> Json:
    """Turn a tool into a function. Engines show tools of other types to the model not at all, or in their own way."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise NotReproducible("tools")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise NotReproducible("content")
    return value
