"""First events of streams that are errors, in the words of every engine and API, and the moment when that is known."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmfleet.engines import first_event
from warmfleet.engines.first_event import Event, error_of, is_open, is_plain, read, telling

ERROR = b'{"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","code":500}}'
CHUNK = b'{"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"role":"assistant"}}]}'
#: Beginning of a stream -> the status of the error that it is.
ERRORS = {
    b"data: " + ERROR + b"\n\n": 500,
    b"data:" + ERROR + b"\n\n": 500,
    b"data: " + ERROR + b"\r\n\r\n": 500,
    b"data: " + ERROR + b"\r\r": 500,
    b"\xef\xbb\xbfdata: " + ERROR + b"\n\n": 500,
    b": keep-alive\n\ndata: " + ERROR + b"\n\n": 500,
    b"\n\n:\n: two\n\nid: 1\nretry: 5\n\ndata: " + ERROR + b"\n\n": 500,
    b'event: ping\ndata: {"type":"ping"}\n\ndata: ' + ERROR + b"\n\n": 500,
    b"event: error\ndata: " + ERROR + b"\n\n": 500,
    b"data: " + ERROR + b"\nevent: error\n\ndata: " + CHUNK + b"\n\n": 500,
    b'data: {\ndata: "error": {"message": "x",\ndata: "code": 502}}\n\n': 502,
    b'data: { "error": {"message":"x","code":"503"}}\n\n': 503,
    b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"x"}}\n\n': 500,
    b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"x"}}\n\n': 503,
    b'event: error\ndata: {"type":"error","error":{"type":"timeout_error","message":"x"}}\n\n': 504,
    b'event: error\ndata: {"type":"error","error":{"type":"rate_limit_error","message":"x"}}\n\n': 429,
    b'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error","message":"x"}}\n\n': 400,
    b'event: error\ndata: {"type":"error","code":"server_error","message":"x","sequence_number":0}\n\n': 500,
    b'data: {"type":"response.failed","response":{"error":{"code":"server_error","message":"x"}}}\n\n': 500,
    b'data: {"type":"response.failed","response":{"error":{"code":"rate_limit_exceeded"}}}\n\n': 429,
    b'data: {"type":"response.failed"}\n\n': 500,
    b'data: {"object":"error","message":"x","code":500,"type":"InternalServerError"}\n\n': 500,
    b'data: {"object":"error","message":"x","code":400,"type":"BadRequestError"}\n\n': 400,
    b'data: {"error":{"message":"x","code":529}}\n\n': 503,
    b'data: {"error":{"message":"x","code":599}}\n\n': 500,
    b'data: {"error":{"message":"x","code":501}}\n\n': 501,
    b'data: {"error":{"message":"x","status":504}}\n\n': 504,
    b'data: {"error":"the engine is dead"}\n\n': 500,
    b'data: {"error":["x"]}\n\n': 500,
    b"event: error\ndata: no JSON at all\n\n": 500,
    b"event:error\n\n": 500,
}
GOOD = [
    b"data: " + CHUNK + b"\n\n",
    b"event: response.created\ndata: " + b'{"type":"response.created","response":{"error":null}}' + b"\n\n",
    b'event: message_start\ndata: {"type":"message_start"}\n\ndata: ' + ERROR + b"\n\n",
    b'data: {"choices":[{"delta":{"content":"an \\"error\\": {\\"code\\":500}"}}]}\n\n',
    b'data: {"error":null,"choices":[]}\n\n',
    b'data: {"error":{},"choices":[]}\n\n',
    b"data: [DONE]\n\n",
    b"data: the word error alone\n\n",
    b'data: {"type":"response.incomplete"}\n\n',
]


def judged(piece: bytes, *, ended: bool = False) -> int | None:
    event = read(piece, ended=ended)
    assert event is not None
    error = error_of(event)
    return None if error is None else error.status


@pytest.mark.parametrize("piece", ERRORS)
def test_an_error_is_an_error_however_it_is_written(piece: bytes) -> None:
    assert not is_plain(piece)
    assert not is_open(piece)
    assert judged(piece) == ERRORS[piece]


@pytest.mark.parametrize("piece", GOOD)
def test_other_events_are_no_errors(piece: bytes) -> None:
    assert is_plain(piece) or judged(piece) is None


@pytest.mark.parametrize("piece", [piece for piece in ERRORS if len(piece) < 250])
def test_half_an_error_is_waited_for(piece: bytes) -> None:
    """Until its end it is not known; the end of the stream ends it, too."""
    assert not any(is_plain(piece[:at]) for at in range(len(piece)))
    half = piece.rstrip(b"\r\n")
    if b"\n\ndata" not in half and b"\n\n" not in half:
        assert is_open(half)
        assert judged(half, ended=True) == ERRORS[piece]


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        (b": keep-alive\n\n", True),
        (b"event: ping\ndata: {}\n\n", True),
        (b"event: mess", True),
        (b"", True),
        (b"data: " + CHUNK[:60], True),
        (b"data: " + CHUNK + b"\n", True),
        (b"data: {" + b"x" * first_event.TELLING_BYTES, False),
        (b": padding" + b" " * 2_048, False),
        (b'data: {"error": {"message": "' + b"x" * 1_000, True),
        (b'data: {"error": {"message": "' + b"x" * first_event.MAX_BYTES, False),
        (b"p0\n" + b"x" * 4_000, False),
    ],
)
def test_nothing_else_is_waited_for_for_long(piece: bytes, expected: bool) -> None:
    assert is_open(piece) is expected


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_can_be_read(piece: bytes, ended: bool) -> None:
    event = read(piece, ended=ended)
    assert event is None or error_of(event) is None or error_of(event) is not None
    is_open(piece)


FIELDS = ["error", "type", "code", "message", "object", "response", "status"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(FIELDS), inner),
    )
)
def test_any_error_is_read(data: object) -> None:
    for name in (b"", b"error", b"response.failed"):
        error = error_of(Event(name, json.dumps(data).encode()))
        assert error is None or 400 <= error.status < 600


def test_a_stream_tells_nothing_before_its_first_token() -> None:
    """vLLM names the role of a chat, and then tells that it has no blocks for the prompt."""
    role = b"data: " + CHUNK.replace(b'"assistant"', b'"assistant","content":""') + b"\n\n"
    error, done = b"data: " + ERROR + b"\n\n", b"data: [DONE]\n\n"
    assert telling(role) is None
    assert telling(role + error[:-1]) is None
    found = telling(role + error + done)
    assert found is not None
    told = error_of(found)
    assert told is not None
    assert told.status == 500
    for choice in (
        b'{"text":"a"}',
        b'{"text":"","finish_reason":"stop"}',
        b'{"delta":{"content":"a"}}',
        b'{"delta":{"reasoning":"a"}}',
        b'{"delta":{"tool_calls":[{}]}}',
        b'{"delta":{},"token_ids":[7]}',
        b'{"delta":{},"logprobs":{"content":[]}}',
    ):
        event = b'data: {"choices":[' + choice + b"]}\n\n"
        assert telling(role + event + error) == Event(b"", event[6:-2])
    for other in (b'data: {"choices":[],"usage":{}}\n\n', done, b"data: x\n\n", b"data: 1\n\n"):
        assert telling(other) is not None
    assert telling(b'data: {"choices":[{"text":""}]}\n\n') is None
