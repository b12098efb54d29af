"""Requests whose prompts are not identified: which model they name, and how large they are taken to be."""

from __future__ import annotations

import json

import pytest

from warmfleet.errors import BadArgument, BadRequest
from warmfleet.prompt.dialects.unread_request import parse
from warmfleet.prompt.engine_paths import KNOWN, NEVER, OWN, EnginePaths
from warmfleet.prompt.request import MAX_BOOKED_TOKENS, decode_tokens, estimated_tokens

EMBED = KNOWN["/v1/embeddings"]
LINE, END = b"--a-line\r\n", b"--a-line--\r\n"


def field(name: str, value: bytes) -> bytes:
    return LINE + f'Content-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + value + b"\r\n"


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"input": "x" * 400}, 100),
        ({"input": ["x" * 40] * 10}, 100),
        ({"input": list(range(100))}, 100),
        ({"input": [[1] * 50, [2] * 50]}, 100),
        ({"text_1": "x" * 200, "text_2": ["x" * 200]}, 100),
        ({"messages": [{"content": [{"text": "x" * 400}, {"image_url": {"url": "data:image/png;base64,AA"}}]}]}, 100),
        ({}, 1),
        ({"input": [[[[[[[["x" * 400]]]]]]]]}, 1),
    ],
)
def test_the_size_of_a_prompt_is_estimated_from_its_texts(body: dict[str, object], tokens: int) -> None:
    request = parse(EMBED, json.dumps(body).encode())
    assert estimated_tokens(request) == tokens
    assert decode_tokens(request, tokens) == 0, "an embedding is no token that is decoded"


def test_a_generating_path_books_its_answer() -> None:
    request = parse(KNOWN["/v1/responses"], json.dumps({"input": "x" * 40, "n": 2, "max_tokens": 5}).encode())
    assert decode_tokens(request, 10) == 30
    assert decode_tokens(parse(KNOWN["/invocations"], b'{"max_tokens": "many", "n": -1}'), 10) == 266
    assert decode_tokens(parse(KNOWN["/v1/responses"], b'{"n": 256}'), MAX_BOOKED_TOKENS) == MAX_BOOKED_TOKENS


def test_the_fields_of_a_form() -> None:
    body = field("model", "wh/isper ü".encode()) + field("stream", b"true") + field("n", b"2") + END
    request = parse(KNOWN["/v1/audio/transcriptions"], body, (), b'multipart/form-data; boundary="a-line"')
    assert (request.model, request.stream, request.samples, request.from_json) == ("wh/isper ü", True, 2, False)


def test_a_path_that_takes_all_types_judges_none() -> None:
    images = EnginePaths(["/v1/images/*"]).find("/v1/images/edits")
    assert images is not None
    for body in (b"\x89PNG", b"{broken", b"[1]", b"text", b'{"model": "m"'):
        request = parse(images, body, (), b"image/png")
        assert (request.model, request.from_json) == ("", False)
    assert parse(images, b'{"model": "m"}').model == "m"
    for body in (b"\x89PNG", b"{broken", b"[1]"):
        with pytest.raises(BadRequest):
            parse(EMBED, body)


def test_patterns_cover_what_lies_below_them_and_nothing_that_steers_an_engine() -> None:
    paths = EnginePaths(["/v1/images/*", "/v1/moderations"])
    found = paths.find("/v1/images/generations")
    assert found is not None
    assert (found.name, found.methods) == ("other", ("GET", "POST"))
    assert paths.find("/v1/moderations") is not None
    assert [paths.find(path) for path in ("/v1/images", "/v1/images/", "/v1/images/../a", "/v1/moderationsx")] == [
        None
    ] * 4
    every = EnginePaths(["/*"])
    assert every.find("/anything/at-all") is not None
    assert not [path for path in (*NEVER, *OWN, "/v1/responses/resp_1", "/v1/models/a") if every.find(path)]


@pytest.mark.parametrize("pattern", ["v1/images", "/v1/*/images", "/v1//a", "/v1/../a", "*", "/v1/a b", "/v1/images/"])
def test_a_pattern_that_is_no_path_ends_the_start(pattern: str) -> None:
    with pytest.raises(BadArgument, match="WARMFLEET_PASSED_PATHS"):
        EnginePaths([pattern])
