"""Bodies of /v1/messages, /v1/responses and /inference/v1/generate become the chats and completions that vLLM makes of
them, or go by load with a reason.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.requests.dialects import dialect_requests

from warmfleet.errors import BadRequest
from warmfleet.prompt.chat_template import ChatTemplate
from warmfleet.prompt.dialects.bodies import parse
from warmfleet.prompt.engine_paths import KNOWN
from warmfleet.prompt.messages import NotReproducible
from warmfleet.prompt.prefix_trie import Trie
from warmfleet.prompt.prompt_identity import Identity
from warmfleet.prompt.request import estimated_tokens

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from warmfleet.prompt.request import Request
    from warmfleet.prompt.tokenizer import Encoder

MESSAGES, RESPONSES, GENERATE = KNOWN["/v1/messages"], KNOWN["/v1/responses"], KNOWN["/inference/v1/generate"]
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "f", "parameters": {}, "strict": True}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{{ reasoning_effort }},{{ enable_thinking }}"
)


def messages(**body: Any) -> Request:
    return parse(MESSAGES, json.dumps({"model": "m", "max_tokens": 5, "messages": [USER]} | body).encode())


def responses(**body: Any) -> Request:
    return parse(RESPONSES, json.dumps({"model": "m", "input": "hi"} | body).encode())


def generate(**body: Any) -> Request:
    return parse(GENERATE, json.dumps({"model": "m", "token_ids": [5, 6, 7], "sampling_params": {}} | body).encode())


def test_a_prompt_of_token_ids_is_a_completions() -> None:
    sampling = {"max_tokens": 9, "n": 2, "prompt_logprobs": None, "skip_reading_prefix_cache": False}
    request = generate(sampling_params=sampling, cache_salt="s", stream=True, priority=3, request_id="r", features=None)
    assert (request.endpoint, request.prompts, request.unforeseen) == ("completions", [[5, 6, 7]], "")
    assert (request.max_tokens, request.samples, request.salt, request.stream) == (9, 2, "s", True)
    assert (request.priority, request.request_id, request.model) == (3, "r", "m")
    assert generate().max_tokens is None


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"features": {"mm_hashes": {"image": ["a"]}}}, "parts"),
        ({"content_parts": [{"type": "image_url"}]}, "parts"),
        ({"sampling_params": {"prompt_logprobs": 0}}, "prompt_logprobs"),
        ({"sampling_params": {"skip_reading_prefix_cache": True}}, "prompt_logprobs"),
        ({"sampling_params": 5}, "content"),
        ({"sampling_params": {"max_tokens": "many"}}, "content"),
        ({"token_ids": "a text"}, "content"),
        ({"token_ids": [5, "a"]}, "content"),
        ({"token_ids": [[5], [6]]}, "content"),
        ({"token_ids": []}, "content"),
        ({"token_ids": None}, "content"),
    ],
)
def test_ids_whose_use_is_not_known_go_by_load(body: dict[str, Any], reason: str) -> None:
    request = generate(**body)
    assert request.unforeseen == reason
    assert estimated_tokens(request) >= 1


def test_a_message_with_tools_becomes_a_chat() -> None:
    request = messages(
        system=[{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be brief."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "one moment"},
                    {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"q": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "7"}]},
                    {"type": "text", "text": "and now?"},
                ],
            },
        ],
        tools=[{"name": "f", "input_schema": {"properties": {}}}],
        tool_choice={"type": "any"},
        output_config={"effort": "low"},
        cache_salt="s",
    )
    call = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": {"q": 1}}}
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "reasoning": "t", "tool_calls": [call], "content": "one moment"},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "7"},
        {"role": "user", "content": "and now?"},
    ]
    assert request.tools[0]["function"]["parameters"] == {"properties": {}, "type": "object"}
    assert (request.tool_choice, request.arguments["reasoning_effort"]) == ("required", "low")
    assert (request.salt, request.max_tokens, request.unforeseen, request.dialect) == ("s", 5, "", "messages")


def test_a_response_with_tools_becomes_a_chat() -> None:
    request = responses(
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "one moment"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"q": 1}'},
            {"type": "function_call_output", "call_id": "c", "output": "7"},
        ],
        tools=[TOOL],
        reasoning={"effort": "low"},
        max_output_tokens=9,
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"q": 1}'}}
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "reasoning": "t", "content": "one moment", "tool_calls": [call]},
        {"role": "tool", "content": "7", "tool_call_id": "c"},
    ]
    assert request.tools == [{"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}]
    assert (request.max_tokens, request.arguments["reasoning_effort"], request.dialect) == (9, "low", "responses")
    assert request.add_special_tokens, "vLLM adds them here, unlike to a chat"
    assert not request.arguments["continue_final_message"]
    half = [USER, {"type": "message", "role": "assistant", "status": "incomplete", "content": "half a sen"}]
    assert responses(input=half).arguments["continue_final_message"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "content"),
        ({"messages": [{"role": "system", "content": [{"type": "tool_removal", "tool": {}}]}]}, "tools"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]}, "tool_calls"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"messages": []}, "content"),
        ({"messages": "hi"}, "content"),
        ({"max_tokens": "many"}, "content"),
    ],
)
def test_messages_that_cannot_be_turned_go_by_load(body: dict[str, Any], reason: str) -> None:
    assert messages(**body).unforeseen == reason


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response"),
        ({"truncation": "auto"}, "truncation"),
        ({"truncation": None}, "truncation"),
        ({"tools": [{"type": "custom", "name": "f"}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "content"),
        ({"input": [{"type": "function_call", "namespace": "n", "call_id": "c"}]}, "tool_calls"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "content"),
        ({"input": [{"role": ["user"], "content": "x"}]}, "content"),
        ({"input": [{"role": "user", "content": [{"type": {"a": 1}, "text": "x"}]}]}, "content"),
        ({"input": []}, "content"),
        ({"input": None}, "content"),
    ],
)
def test_responses_that_cannot_be_turned_go_by_load(body: dict[str, Any], reason: str) -> None:
    request = responses(**body)
    assert request.unforeseen == reason
    assert estimated_tokens(request) >= 1


def test_fields_by_which_an_engine_makes_another_prompt_are_refused_here_too() -> None:
    for field in ({"kv_transfer_params": {"a": 1}}, {"chat_template_kwargs": {"chat_template": "x"}}):
        for make in (messages, responses, generate):
            with pytest.raises(BadRequest, match="not accepted"):
                make(**field)


FIELDS = [
    "role",
    "content",
    "token_ids",
    "sampling_params",
    "type",
    "text",
    "input",
    "tools",
    "system",
    "messages",
    "name",
    "id",
    "output",
    "status",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "text", "user", "assistant", "system"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner | st.sampled_from(["text", "tool_use", "tool_result", "message", "function_call", "reasoning"]),
            max_size=5,
        )
    ),
    max_leaves=30,
)


@given(body=st.dictionaries(st.sampled_from([*FIELDS, "instructions", "reasoning"]), JSON))
def test_no_body_is_too_odd(body: dict[str, Any]) -> None:
    for path in (MESSAGES, RESPONSES, GENERATE):
        assert parse(path, json.dumps(body).encode()).endpoint in ("chat", "completions", "unread")


@given(seed=st.integers(0, 10**6))
def test_requests_of_real_clients_are_turned(seed: int) -> None:
    for ask in dialect_requests(seed, 10):
        request = parse(KNOWN[f"/v1/{ask.endpoint}"], ask.raw)
        assert request.unforeseen in ("", "content"), "an empty chat has no content"
        assert request.dialect == ask.endpoint or not request.messages


def identity(encoder: Encoder, executor: Executor, **facts: Any) -> Identity:
    return Identity(encoder, ChatTemplate(TEMPLATE), facts, executor, Trie(10**6))


def test_system_messages_amid_a_conversation_go_where_the_engines_template_takes_them(
    encoder: Encoder, executor: Executor
) -> None:
    inline = messages(system="a", messages=[USER, {"role": "system", "content": "b"}, USER])
    with pytest.raises(NotReproducible, match="inline_system"):
        identity(encoder, executor).render(inline)
    assert identity(encoder, executor, merges_inline_system=True).render(inline) == "[system:ab][user:hi][user:hi],"
    plain = identity(encoder, executor, merges_inline_system=False).render(inline)
    assert plain == "[system:a][user:hi][system:b][user:hi],"
    assert identity(encoder, executor).render(messages(system="a")) == "[system:a][user:hi],"


def test_thinking_is_switched_off_as_the_engine_tells_its_template(encoder: Encoder, executor: Executor) -> None:
    off = messages(thinking={"type": "disabled"}, output_config={"effort": "high"})
    with pytest.raises(NotReproducible, match="thinking"):
        identity(encoder, executor).render(off)
    assert identity(encoder, executor, disabled_thinking_effort="none").render(off) == "[user:hi]none,False"
    assert identity(encoder, executor, disabled_thinking_effort="low").render(off) == "[user:hi]low,True"
    kept = messages(thinking={"type": "disabled"}, chat_template_kwargs={"enable_thinking": True})
    assert identity(encoder, executor, disabled_thinking_effort="none").render(kept) == "[user:hi]none,True"
