"""Mistakes of clients: each is one small change of a good request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.requests.random_requests import Maker, RandomRequest

Body = dict[str, Any]
NO_CALL = {"refusal": None, "annotations": None, "audio": None, "function_call": None}  # as the OpenAI client dumps it


def any_message(maker: Maker, request: RandomRequest, role: str = "") -> Body | None:
    found = [message for message in request.body["messages"] if role in ("", message["role"])]
    return maker.random.choice(found) if found else None


def dumped_answers(maker: Maker, request: RandomRequest) -> None:
    """Answers as the OpenAI client dumps them, with all their nulls."""
    for message in request.body["messages"]:
        if message["role"] == "assistant":
            message |= NO_CALL
            if maker.chance(0.3):
                message |= {"tool_calls": message.get("tool_calls") or []}
            if maker.chance(0.3):
                message["content"] = None


def function_call(maker: Maker, request: RandomRequest) -> None:
    if message := any_message(maker, request, "assistant"):
        message["function_call"] = {"name": "search", "arguments": "{}"}
        message["reasoning"] = maker.text(4)


def null_content(maker: Maker, request: RandomRequest) -> None:
    if message := any_message(maker, request, "assistant"):
        message["content"] = None
        message["reasoning"] = maker.text(4)


def no_content(maker: Maker, request: RandomRequest) -> None:
    if message := any_message(maker, request):
        del message["content"]


def empty_parts(maker: Maker, request: RandomRequest) -> None:
    if message := any_message(maker, request):
        message["content"] = maker.random.choice(([], [{"type": "text", "text": ""}], "", [""]))


def string_parts(maker: Maker, request: RandomRequest) -> None:
    if message := any_message(maker, request):
        message["content"] = [maker.text(3), {"type": "text", "text": maker.text(3)}]


def part_extras(maker: Maker, request: RandomRequest) -> None:
    if message := any_message(maker, request):
        part = {"type": "text", "text": maker.text(5), "cache_control": {"type": "ephemeral"}, "prefix": True}
        message["content"] = [part, {"type": "text", "text": "b", "uuid": "u1"}][: maker.random.choice((1, 2))]


def other_part_types(maker: Maker, request: RandomRequest) -> None:
    if message := any_message(maker, request):
        kinds = (("refusal", "refusal"), ("thinking", "thinking"), ("input_text", "text"), ("output_text", "text"))
        kind, name = maker.random.choice(kinds)
        message["content"] = [{"type": kind, name: maker.text(4)}, {"type": "text", "text": "after"}]


def null_text(maker: Maker, request: RandomRequest) -> None:
    if message := any_message(maker, request):
        message["content"] = [{"type": "text", "text": None}, {"type": "text", "text": "b"}]


def image(maker: Maker, request: RandomRequest) -> None:
    if message := any_message(maker, request, "user"):
        message["content"] = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}]


def names(maker: Maker, request: RandomRequest) -> None:
    for message in request.body["messages"]:
        message["name"] = maker.random.choice(("alice", "é", ""))


def unknown_keys(maker: Maker, request: RandomRequest) -> None:
    for message in request.body["messages"]:
        message |= {"id": "m1", "metadata": {"a": 1}, "task": "t", "tools": None}
    request.body |= {"unknown": True, "metadata": {"x": 1}}


def other_roles(maker: Maker, request: RandomRequest) -> None:
    if message := any_message(maker, request):
        message["role"] = maker.random.choice(("developer", "developer", "developer", "ipython", "Critic", "function"))
        message.pop("tool_calls", None)


def late_system(maker: Maker, request: RandomRequest) -> None:
    messages = request.body["messages"]
    for role in maker.random.choice((("system",), ("developer", "system"), ("developer",))):
        messages.insert(maker.random.randrange(len(messages)), {"role": role, "content": maker.content(request)})


def billing_header(maker: Maker, request: RandomRequest) -> None:
    header = "x-anthropic-billing-header: cc_version=1; cch=00000;"
    texts = [header, f"{header}\nBe brief.", f"\n{header}"]
    parts = [{"type": "text", "text": text} for text in texts]
    role = maker.random.choice(("system", "system", "developer", "user"))
    request.body["messages"].insert(0, {"role": role, "content": maker.random.choice((parts, *texts))})


def null_kwargs(maker: Maker, request: RandomRequest) -> None:
    kwargs = {"enable_thinking": maker.random.choice((None, "auto", 0, "")), "documents": None, "bos_token": "<s>"}
    kwargs |= {"custom": None, "unknown": "auto"}
    request.body["chat_template_kwargs"] = kwargs


def reserved_kwargs(maker: Maker, request: RandomRequest) -> None:
    name = maker.random.choice(("tools", "messages", "tokenize", "padding", "return_dict", "conversation", "documents"))
    value = {"tools": [{"name": "raw"}], "documents": [{"title": "t", "text": "x"}], "messages": []}.get(name, True)
    request.body["chat_template_kwargs"] = {name: value}


def template_in_kwargs(maker: Maker, request: RandomRequest) -> None:
    request.body["chat_template_kwargs"] = {"chat_template": "{{ messages[0].content }}"}


def null_fields(maker: Maker, request: RandomRequest) -> None:
    for name in ("tools", "documents", "chat_template_kwargs", "reasoning_effort", "tool_choice", "stop", "max_tokens"):
        request.body.setdefault(name, None)


def tool_extras(maker: Maker, request: RandomRequest) -> None:
    for tool in request.body.get("tools") or []:
        tool |= {"cache_control": {"type": "ephemeral"}, "defer_loading": maker.random.choice((None, True, False))}
        tool["function"] |= {"returns": {"type": "string"}, "description": None, "strict": None}


def huge_numbers(maker: Maker, request: RandomRequest) -> None:
    numbers = [2**64, -(2**63) - 1, 10**30, 1.5, 12345678901234567890123]
    parameters = {"type": "object", "minimum": maker.random.choice(numbers)}
    request.body["tools"] = [{"type": "function", "function": {"name": "big", "parameters": parameters}}]


def tool_name(maker: Maker, request: RandomRequest) -> None:
    if message := any_message(maker, request, "tool"):
        message["name"] = "search"


def empty_tool_calls(maker: Maker, request: RandomRequest) -> None:
    if message := any_message(maker, request, "assistant"):
        message["tool_calls"] = maker.random.choice(([], None))


def odd_tool_calls(maker: Maker, request: RandomRequest) -> None:
    if message := any_message(maker, request, "assistant"):
        call = maker.call()
        drop = maker.random.choice(("id", "type", "function", "arguments", "nothing"))
        call.pop(drop, None)
        if drop == "arguments":
            call["function"]["arguments"] = {"already": "parsed"}
        message["tool_calls"] = [call]


def many_calls(maker: Maker, request: RandomRequest) -> None:
    if message := any_message(maker, request, "assistant"):
        message["tool_calls"] = [maker.call() for _ in range(4)]
        message["content"] = None


def null_tool_content(maker: Maker, request: RandomRequest) -> None:
    if message := any_message(maker, request, "tool"):
        message["content"] = maker.random.choice((None, "", [], {"a": 1}))


def only_assistant(maker: Maker, request: RandomRequest) -> None:
    request.body["messages"] = [{"role": "assistant", "content": maker.text(6)}]


def developer_tools(maker: Maker, request: RandomRequest) -> None:
    tool = {"type": "function", "extra": 1, "function": {"strict": True, "other": [], "parameters": {}, "name": "d"}}
    request.body["messages"].insert(0, {"role": "developer", "content": maker.text(4), "tools": [tool]})


ODDITIES = (
    *(dumped_answers, function_call, null_content, no_content, empty_parts, string_parts, part_extras),
    *(other_part_types, null_text, names, unknown_keys, other_roles, late_system, billing_header, null_kwargs),
    *(reserved_kwargs, template_in_kwargs, null_fields, tool_extras, huge_numbers, tool_name, empty_tool_calls),
    *(odd_tool_calls, many_calls, null_tool_content, only_assistant, developer_tools, image),
)
