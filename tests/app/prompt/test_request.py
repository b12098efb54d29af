"""Bodies become requests; for a wrong body the error names the field."""

from __future__ import annotations

import json
import time
from typing import Any

import orjson
import pytest

from warmfleet.errors import BadRequest, TooLarge
from warmfleet.prompt.request import MAX_VALUES, Endpoint, decode_tokens, estimated_tokens, parse, too_long

USER = {"role": "user", "content": "hello there"}

WRONG: list[tuple[str, Endpoint, Any, str | None]] = [
    ("not json", "chat", b"{", None),
    ("lone surrogate", "completions", b'{"prompt": "\\ud800"}', None),
    ("not an object", "chat", b"[]", None),
    ("no messages", "chat", {}, "messages"),
    ("empty messages", "chat", {"messages": []}, "messages"),
    ("message without role", "chat", {"messages": [USER, {"content": "x"}]}, "messages[1].role"),
    ("no prompt", "completions", {"model": "m"}, "prompt"),
    ("mixed prompt", "completions", {"prompt": ["a", 1]}, "prompt"),
    ("negative id", "completions", {"prompt": [-1]}, "prompt"),
    ("boolean id", "completions", {"prompt": [1, True]}, "prompt"),
    ("id of 33 bits", "completions", {"prompt": [2**32]}, "prompt"),
    ("id of 65 bits", "completions", {"prompt": [2**64]}, "prompt"),
    ("half an id", "completions", {"prompt": [1, 0.5]}, "prompt"),
    ("too many prompts", "completions", {"prompt": ["a"] * 257}, "prompt"),
    ("model is a number", "chat", {"model": 1, "messages": [USER]}, "model"),
    ("stream is a word", "chat", {"stream": "yes", "messages": [USER]}, "stream"),
    ("n is 0", "chat", {"n": 0, "messages": [USER]}, "n"),
    ("max_tokens is negative", "chat", {"max_tokens": -1, "messages": [USER]}, "max_tokens"),
    ("own template", "chat", {"chat_template": "x", "messages": [USER]}, "chat_template"),
    ("own transfer", "chat", {"kv_transfer_params": {}, "messages": [USER]}, "kv_transfer_params"),
    ("kwargs is a list", "chat", {"chat_template_kwargs": [], "messages": [USER]}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("endpoint", "body", "param"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_bodies_name_the_field(endpoint: Endpoint, body: Any, param: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(endpoint, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert caught.value.param == param
    assert caught.value.as_dict()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a"], ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    request = parse("completions", json.dumps({"prompt": prompt}).encode())
    assert request.prompts == expected
    assert (request.add_special_tokens, request.unforeseen) == (True, "")


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("prompt_logprobs", 1, "prompt_logprobs"),
        ("truncate_prompt_tokens", 10, "truncation"),
        ("prompt_embeds", "AAAA", "embeds"),
        ("suffix", "x", "suffix"),
    ],
)
def test_fields_that_make_a_prompt_unforeseeable(field: str, value: Any, reason: str) -> None:
    assert parse("completions", json.dumps({"prompt": "x", field: value}).encode()).unforeseen == reason


def test_echoed_logprobs_skip_the_cache() -> None:
    assert parse("completions", b'{"prompt": "x", "echo": true}').unforeseen == ""
    assert parse("completions", b'{"prompt": "x", "echo": true, "logprobs": 0}').unforeseen == "prompt_logprobs"


def test_an_allowed_template_is_routed_by_load() -> None:
    body = json.dumps({"messages": [USER], "chat_template": "{{ messages }}"}).encode()
    assert parse("chat", body, ("chat_template",)).unforeseen == "chat_template"


def test_template_arguments_as_vllm_merges_them() -> None:
    body = {"messages": [USER], "reasoning_effort": "low", "chat_template_kwargs": {"style": "x", "documents": 1}}
    assert parse("chat", json.dumps(body).encode()).arguments == {
        "style": "x",
        "documents": 1,
        "add_generation_prompt": True,
        "continue_final_message": False,
        "reasoning_effort": "low",
        "enable_thinking": True,
    }
    request = parse("chat", json.dumps(body | {"reasoning_effort": "auto", "add_special_tokens": True}).encode())
    assert "reasoning_effort" not in request.arguments
    assert request.add_special_tokens


def test_null_and_auto_leave_the_choice_to_the_server() -> None:
    body = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": None, "style": "auto", "x": 0}}
    assert set(parse("chat", json.dumps(body).encode()).arguments) == {
        "x",
        "add_generation_prompt",
        "continue_final_message",
    }


def test_a_template_among_the_template_arguments() -> None:
    body = json.dumps({"messages": [USER], "chat_template_kwargs": {"chat_template": "{{ messages }}"}}).encode()
    with pytest.raises(BadRequest, match="chat_template"):
        parse("chat", body)
    assert parse("chat", body, ("chat_template",)).unforeseen == "chat_template"
    body = json.dumps({"messages": [USER], "chat_template_kwargs": {"tokenize": True}}).encode()
    assert parse("chat", body).unforeseen == "chat_template"


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**40, 2**64 - 1, 1.5, 1e300])
def test_numbers_that_reach_the_prompt_are_not_rounded(number: float) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"minimum": number}}}]
    read = parse("chat", json.dumps({"messages": [USER], "tools": tools}).encode()).tools
    assert repr(read) == repr(tools)
    part = {"type": "text", "text": "t", "n": [number]}
    for message in ({"role": "developer", "content": "x", "tools": tools}, {"role": "user", "content": [part]}):
        request = parse("chat", json.dumps({"messages": [USER, message]}, indent=1).encode())
        assert repr(request.messages) == repr([USER, message])


def test_numbers_in_a_very_large_body_are_not_known() -> None:
    part = {"type": "text", "text": "t" * 1_000_000, "n": 2**70}
    body = json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()
    assert parse("chat", body).unforeseen == "numbers"
    assert parse("chat", body.replace(str(2**70).encode(), b"7")).unforeseen == ""


def test_echo_in_a_chat_skips_the_cache() -> None:
    assert parse("chat", json.dumps({"messages": [USER], "echo": True}).encode()).unforeseen == "prompt_logprobs"
    assert parse("completions", b'{"prompt": "a", "echo": true}').unforeseen == ""
    assert parse("completions", b'{"prompt": "a", "echo": true, "logprobs": 0}').unforeseen == "prompt_logprobs"


def test_a_salt_has_a_bound() -> None:
    assert parse("completions", json.dumps({"prompt": "a", "cache_salt": "s" * 1_024}).encode()).salt == "s" * 1_024
    with pytest.raises(BadRequest, match="cache_salt"):
        parse("completions", json.dumps({"prompt": "a", "cache_salt": "s" * 1_025}).encode())


def test_bookings() -> None:
    request = parse("chat", json.dumps({"messages": [USER], "n": 3, "max_tokens": 5}).encode())
    assert (request.samples, estimated_tokens(request)) == (3, 2)
    assert decode_tokens(request, 100, 256) == 3 * 105
    request.max_tokens = None
    assert decode_tokens(request, 100, 256) == 3 * 356


def test_a_body_that_would_hold_up_others_is_refused_unread() -> None:
    """32 MB of ids would hold up the event loop; 32 MB of text would not."""
    ids = b'{"prompt":[' + b"7," * 16_000_000 + b"7]}"
    began = time.process_time()
    with pytest.raises(TooLarge):
        parse("completions", ids)
    refused = time.process_time()
    orjson.loads(ids)
    assert refused - began < (time.process_time() - refused) / 3
    assert (
        len(parse("completions", json.dumps({"prompt": [7] * (MAX_VALUES - 9)}).encode()).prompts[0]) == MAX_VALUES - 9
    )
    assert parse("completions", json.dumps({"prompt": "word " * 6_000_000}).encode()).size_bytes > 30_000_000


@pytest.mark.parametrize(
    ("endpoint", "body", "expected"),
    [
        ("completions", {"prompt": [7] * 1_000}, False),
        ("completions", {"prompt": [[7], [7] * 1_001]}, True),
        ("completions", {"prompt": ["x" * 16_000] * 20}, False),
        ("completions", {"prompt": ["a", "x" * 16_001]}, True),
        ("chat", {"messages": [USER | {"content": "x" * 15_000}]}, False),
        ("chat", {"messages": [USER | {"content": "x" * 9_000}] * 2}, True),
        (
            "chat",
            {"messages": [USER | {"content": [{"type": "image_url", "image_url": {"url": "A" * 99_000}}]}]},
            False,
        ),
        ("chat", {"messages": [USER], "tools": [{"function": {"name": "x" * 20_000}}]}, True),
        ("chat", {"messages": [USER], "user": "x" * 20_000}, False),
    ],
)
def test_prompts_that_are_too_long_for_every_engine(endpoint: Endpoint, body: Any, expected: bool) -> None:
    """The estimate does not read the whole prompt, and images do not count."""
    assert too_long(parse(endpoint, json.dumps(body).encode()), 1_000) == expected
