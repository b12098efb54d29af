"""Turns the body of Anthropic's /v1/messages into the chat that vLLM makes of it (``AnthropicServingMessages``). Pure.

A body that the router cannot turn as the engine does raises NotReproducible with a short reason.
"""

from __future__ import annotations

from typing import Any

from warmfleet.prompt.messages import BILLING_HEADER, NotReproducible, checked_list

Json = dict[str, Any]

#: Fields of the body that mean the same in a chat.
SAME = ("model", "stream", "max_tokens", "cache_salt", "chat_template_kwargs", "priority")
CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "required"}


def as_chat(body: Json) -> Json:
    """Return the chat's body. Raises NotReproducible."""
    chat = {name: body[name] for name in SAME if body.get(name) is not None}
    messages = checked_list(body.get("messages"))
    system = _system_text(body.get("system"))
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for message in messages:
        _add(chat["messages"], message)
    if body.get("tools") is not None:
        chat["tools"] = [_tool(tool) for tool in checked_list(body["tools"])]
    choice = body.get("tool_choice")
    if choice is not None:
        chat["tool_choice"] = CHOICES.get(_word(choice, "type"))
    config = body.get("output_config")
    if isinstance(config, dict) and config.get("effort") is not None and not thinking_off(body):
        chat["reasoning_effort"] = _word(config, "effort")
    return chat


def thinking_off(body: Json) -> bool:
    """Return whether the client switched thinking off. How engines pass this on differs by template."""
    thinking = body.get("thinking")
    return isinstance(thinking, dict) and thinking.get("type") == "disabled"


def with_system_first(messages: list[Json]) -> list[Json]:
    """Join all system text at the front, as an engine does whose template takes it only there."""
    text = "".join([message["content"] for message in messages if message["role"] == "system"])
    return [{"role": "system", "content": text}, *(message for message in messages if message["role"] != "system")]


def _system_text(system: Any) -> str:
    """Return the text of the field ``system`` as engines read it: without blocks that begin with BILLING_HEADER."""
    if system is None or isinstance(system, str):
        return system or ""
    texts = [_text(block) for block in checked_list(system) if _word(block, "type") == "text"]
    return "".join([text for text in texts if not text.startswith(BILLING_HEADER)])


def _inline_system_text(content: Any) -> str:
    if isinstance(content, str):
        return "" if content.startswith(BILLING_HEADER) else content
    if any(_word(block, "type") in ("tool_addition", "tool_removal") for block in checked_list(content)):
        raise NotReproducible("tools")
    return _system_text(content)


def _add(chat: list[Json], message: Any) -> None:
    """Append the messages that the engine makes of one: its tool results first, then the message itself."""
    role, content = _word(message, "role"), message.get("content")
    if role == "system":
        text = _inline_system_text(content)
        if text:
            chat.append({"role": "system", "content": text})
        return
    if role not in ("user", "assistant"):
        raise NotReproducible("content")
    made: Json = {"role": role}
    if isinstance(content, str):
        made["content"] = content
    else:
        _add_blocks(chat, made, checked_list(content))
    if role == "assistant" or "content" in made:
        chat.append(made)


def _add_blocks(chat: list[Json], made: Json, blocks: list[Any]) -> None:
    parts: list[Json] = []
    calls: list[Json] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = _word(block, "type")
        if kind == "text":
            if text := _text(block):
                parts.append({"type": "text", "text": text})
        elif kind == "image":
            parts += _images([block])
        elif kind == "thinking":
            thoughts += [_word(block, "thinking")] if block.get("thinking") is not None else []
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "tool_result" and made["role"] == "user":
            chat += _result(block)
        elif kind not in ("redacted_thinking", "tool_reference"):
            raise NotReproducible("content")
    if thoughts:
        made["reasoning"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    if parts:
        single = len(parts) == 1 and parts[0]["type"] == "text"
        made["content"] = parts[0]["text"] if single else parts


def _call(block: Json) -> Json:
    arguments = block.get("input")
    if arguments is not None and not isinstance(arguments, dict):
        raise NotReproducible("tool_calls")
    if not block.get("id"):
        raise NotReproducible("tool_calls")  # the engine makes an id from the time
    name = "" if block.get("name") is None else _word(block, "name")
    return {"id": _word(block, "id"), "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def _result(block: Json) -> list[Json]:
    """Return the message of a tool's result, and another one if the result has images."""
    content = block.get("content")
    call = "" if block.get("tool_use_id") is None else _word(block, "tool_use_id")
    if content is None or isinstance(content, str):
        return [{"role": "tool", "tool_call_id": call, "content": content or ""}]
    items = [item for item in checked_list(content) if isinstance(item, dict)]
    if any(item.get("type") == "tool_reference" for item in items):
        raise NotReproducible("content")
    text = "\n".join([_text(item) for item in items if item.get("type") == "text"])
    made: list[Json] = [{"role": "tool", "tool_call_id": call, "content": text}]
    images = _images([item for item in items if item.get("type") == "image"])
    return [*made, {"role": "user", "content": images}] if images else made


def _images(blocks: list[Json]) -> list[Json]:
    """Make the parts that the engine makes of images."""
    sources = [block["source"] for block in blocks if block.get("source")]
    return [{"type": "image_url", "image_url": {"url": _url(source)}} for source in sources]


def _url(source: Any) -> str:
    if not isinstance(source, dict):
        raise NotReproducible("content")
    if source.get("type") == "url":
        return str(source.get("url", ""))
    return f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"


def _tool(tool: Any) -> Json:
    schema = tool.get("input_schema") if isinstance(tool, dict) else None
    if not isinstance(schema, dict):
        raise NotReproducible("tools")
    function = {name: tool.get(name) for name in ("name", "description", "strict", "defer_loading")}
    parameters = schema if "type" in schema else schema | {"type": "object"}
    return {"type": "function", "function": function | {"parameters": parameters}}


def _word(value: Any, name: str) -> str:
    word = value.get(name) if isinstance(value, dict) else None
    if not isinstance(word, str):
        raise NotReproducible("content")
    return word


def _text(block: Json) -> str:
    return "" if block.get("text") is None else _word(block, "text")
