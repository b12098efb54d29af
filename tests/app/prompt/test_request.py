"""Bodies become requests; for a wrong body the error names the field."""

from __future__ import annotations

import json
import time
from typing import Any

import orjson
import pytest

from warmfleet.errors import BadRequest, TooLarge
from warmfleet.prompt.request import (
    MAX_SAMPLES,
    MAX_VALUES,
    Endpoint,
    decode_tokens,
    estimated_tokens,
    in_utf8,
    parse,
    too_long,
)

USER = {"role": "user", "content": "hello there"}

WRONG: list[tuple[str, Endpoint, Any, str | None]] = [
    ("not json", "chat", b"{", None),
    ("not an object", "chat", b"[]", None),
    ("no messages", "chat", {}, "messages"),
    ("message without role", "chat", {"messages": [USER, {"content": "x"}]}, "messages[1].role"),
    ("no prompt", "completions", {"model": "m"}, "prompt"),
    ("too many prompts", "completions", {"prompt": ["a"] * 257}, "prompt"),
    ("model is a number", "chat", {"model": 1, "messages": [USER]}, "model"),
    ("bytes of no text", "chat", b'{"odd": "\xff", "messages": []}', None),
    ("prompt is a number", "completions", {"prompt": 5}, "prompt"),
    ("stream is a word", "chat", {"stream": "maybe", "messages": [USER]}, "stream"),
    ("stream is 2", "chat", {"stream": 2, "messages": [USER]}, "stream"),
    ("n is a word", "chat", {"n": "two", "messages": [USER]}, "n"),
    ("max_tokens is half a token", "chat", {"max_tokens": 0.5, "messages": [USER]}, "max_tokens"),
    ("own template", "chat", {"chat_template": "x", "messages": [USER]}, "chat_template"),
    ("own transfer", "chat", {"kv_transfer_params": {}, "messages": [USER]}, "kv_transfer_params"),
    ("kwargs is a list", "chat", {"chat_template_kwargs": [], "messages": [USER]}, "chat_template_kwargs"),
]


@pytest.mark.parametrize("step", ["do_remote_prefill", "do_remote_decode"])
def test_a_client_takes_no_step_of_a_split_request(step: str) -> None:
    """Some parameters end the engine, whatever the operator allows."""
    allowed = ("kv_transfer_params",)
    for wrong in ({step: True}, {step: True, "remote_port": 1}, {step: 1}):
        for body in (
            {"kv_transfer_params": wrong},
            {"vllm_xargs": {"kv_transfer_params": wrong}},
            {"sampling_params": {"extra_args": {"kv_transfer_params": wrong}}},
        ):
            with pytest.raises(BadRequest) as caught:
                parse("completions", json.dumps({"prompt": "x"} | body).encode(), allowed)
            assert (caught.value.param, step in caught.value.message) == ("kv_transfer_params", True)
    for fine in ({step: False}, {}, {"prompt_token_ids": [1]}):
        parse("completions", json.dumps({"prompt": "x", "kv_transfer_params": fine}).encode(), allowed)


@pytest.mark.parametrize(("endpoint", "body", "param"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_wrong_bodies_name_the_field(endpoint: Endpoint, body: Any, param: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(endpoint, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert caught.value.param == param
    assert caught.value.as_dict()["error"]["type"] == "invalid_request_error"


#: Read otherwise than by the router, or refused by the engine in its own words; the router passes them on, by load.
LEFT_TO_THE_ENGINE: list[tuple[str, Endpoint, Any, str]] = [
    ("no messages", "chat", {"messages": []}, "content"),
    ("mixed prompt", "completions", {"prompt": ["a", 1]}, "content"),
    ("negative id", "completions", {"prompt": [-1]}, "content"),
    ("boolean id", "completions", {"prompt": [1, True]}, "content"),
    ("id of 33 bits", "completions", {"prompt": [2**32]}, "content"),
    ("id of 65 bits", "completions", {"prompt": [2**64]}, "content"),
    ("id as a float", "completions", {"prompt": [1, 5.0]}, "content"),
    ("no prompt in the list", "completions", {"prompt": []}, "content"),
    ("half a surrogate pair", "completions", b'{"prompt": "\\ud800", "model": "m"}', "unicode"),
    ("half a pair in bytes", "chat", b'{"messages": [{"role": "user", "content": "\xed\xb0\x80"}]}', "unicode"),
    ("NaN", "chat", b'{"temperature": NaN, "messages": [{"role": "user"}]}', "unicode"),
]


@pytest.mark.parametrize(
    ("endpoint", "body", "reason"), [row[1:] for row in LEFT_TO_THE_ENGINE], ids=[row[0] for row in LEFT_TO_THE_ENGINE]
)
def test_prompts_that_only_an_engine_reads_are_routed_by_load(endpoint: Endpoint, body: Any, reason: str) -> None:
    request = parse(endpoint, body if isinstance(body, bytes) else json.dumps(body).encode())
    assert request.unforeseen == reason
    assert estimated_tokens(request) >= 1
    orjson.dumps([request.model, request.salt, request.messages, request.prompts])  # no text that cannot be written


def test_limits_that_an_engine_refuses_are_not_booked() -> None:
    request = parse("chat", json.dumps({"messages": [USER], "n": 0, "max_tokens": -1}).encode())
    assert (request.samples, request.max_tokens) == (1, None)
    request = parse("chat", json.dumps({"messages": [USER], "n": 10**9, "max_tokens": 10**400}).encode())
    assert (request.samples, request.max_tokens) == (MAX_SAMPLES, 10**400)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
def test_other_encodings_become_utf_8(encoding: str) -> None:
    text = json.dumps({"prompt": "Grüße, 世界", "model": "m"}, ensure_ascii=False)
    body = in_utf8(text.encode(encoding))
    assert body == text.encode()
    assert parse("completions", body).prompts == ["Grüße, 世界"]


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"a": "\xff"}', b"\xff\xfbmp3 frame", b"\x00\x01\x02\x03" * 9, b"--line\r\n"]
)
def test_bytes_of_another_kind_stay_as_they_are(body: bytes) -> None:
    assert in_utf8(body) is body


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


def test_an_allowed_template_is_routed_by_load() -> None:
    body = json.dumps({"messages": [USER], "chat_template": "{{ messages }}"}).encode()
    assert parse("chat", body, ("chat_template",)).unforeseen == "chat_template"


def test_template_arguments_as_vllm_merges_them() -> None:
    body = {"messages": [USER], "reasoning_effort": "low", "chat_template_kwargs": {"style": "x", "documents": 1}}
    merged = {"style": "x", "documents": 1, "reasoning_effort": "low", "enable_thinking": True}
    defaults = {"add_generation_prompt": True, "continue_final_message": False}
    assert parse("chat", json.dumps(body).encode()).arguments == merged | defaults
    request = parse("chat", json.dumps(body | {"reasoning_effort": "auto", "add_special_tokens": True}).encode())
    assert "reasoning_effort" not in request.arguments
    assert request.add_special_tokens


def test_null_and_auto_leave_the_choice_to_the_server() -> None:
    body = {"messages": [USER], "chat_template_kwargs": {"enable_thinking": None, "style": "auto", "x": 0}}
    arguments = parse("chat", json.dumps(body).encode()).arguments
    assert set(arguments) == {"x", "add_generation_prompt", "continue_final_message"}


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


def test_echoed_logprobs_and_echo_in_a_chat_skip_the_cache() -> None:
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
    assert decode_tokens(request, 100) == 3 * 105
    request.max_tokens = None
    assert decode_tokens(request, 100) == 3 * 356


def test_a_body_that_would_hold_up_others_is_refused_unread() -> None:
    """32 MB of ids would hold up the event loop; 32 MB of text would not."""
    ids = b'{"prompt":[' + b"7," * 16_000_000 + b"7]}"
    began = time.process_time()
    with pytest.raises(TooLarge):
        parse("completions", ids)
    refused = time.process_time()
    orjson.loads(ids)
    assert refused - began < (time.process_time() - refused) / 3
    largest = parse("completions", json.dumps({"prompt": [7] * (MAX_VALUES - 9)}).encode())
    assert len(largest.prompts[0]) == MAX_VALUES - 9
    assert parse("completions", json.dumps({"prompt": "word " * 6_000_000}).encode()).size_bytes > 30_000_000


@pytest.mark.parametrize("piece", [b"[[[[1]]]],", b'{"a":{"a":{"a":1}}},', b"[{}],"])
def test_lists_and_objects_within_each_other_count_as_values(piece: bytes) -> None:
    body = b'{"prompt": "a", "more": [%b1]}' % (piece * (MAX_VALUES // 2))
    with pytest.raises(TooLarge):
        parse("completions", body)


def test_halves_of_pairs_cost_no_more_than_the_parsing_itself() -> None:
    body = b'{"prompt": "\\ud800", "more": [%b1]}' % (b"[[[]]]," * 250_000)
    began = time.process_time()
    json.loads(body)
    parsed = time.process_time()
    assert parse("completions", body).unforeseen == "unicode"
    assert time.process_time() - parsed < 2.2 * (parsed - began)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (r"\ud83d\ude00", "\U0001f600"),
        (r"\ud83d", "?"),
        (r"\ud83d\ud83d\ude00\ude00", "?\U0001f600?"),
        (r"\\ud83d", r"\ud83d"),
        (r"\\\ud83d\\", "\\?\\"),
        (r"\ud83d\\ude00", r"?\ude00"),
        (r"\uDBFFx\uDFFF", "?x?"),
        (r"\ud7ff\ue000", "\ud7ff\ue000"),
    ],
)
def test_halves_of_pairs_become_question_marks(text: str, read: str) -> None:
    assert parse("completions", b'{"top_p": NaN, "prompt": "%b"}' % text.encode()).prompts == [read]


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
