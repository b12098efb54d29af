"""A replica passes on legal answers of engines piece by piece, and treats broken ones and first errors as failures."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from tests.support.engines.scripted import STREAM_HEAD, Answer, Engine, Seen, chunk, engine, reset
from tests.support.replicas.replica import Replica, replica

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SPEECH, PASSED = "/v1/audio/speech", ("/v1/audio/*", "/v1/images/*")
CHAT, ASKED = "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "input": "hi", "max_tokens": 3}
FIRST, REST = b"first" * 40, b"rest" * 40
LARGE = 2**21
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
ERROR = '{"error":{"message":"EngineCore encountered an issue.","type":"InternalServerError","param":null,"code":500}}'


def head(kind: str, *more: str, chunked: bool = True) -> bytes:
    lines = ["HTTP/1.1 200 OK", *([f"content-type: {kind}"] if kind else []), *more]
    return "\r\n".join([*lines, *(["transfer-encoding: chunked"] if chunked else []), "", ""]).encode()


def sized(kind: str, size: int = len(FIRST + REST)) -> bytes:
    return head(kind, f"content-length: {size}", chunked=False)


@asynccontextmanager
async def fleet(
    valkey_url: str, model: str, answer: Answer, **settings: Any
) -> AsyncIterator[tuple[Replica, list[Engine]]]:
    """A replica with two engines that answer alike."""
    async with (
        engine(model, answer) as one,
        engine(model, answer) as other,
        replica(valkey_url, model, one.url, other.url, passed_paths=PASSED, **settings) as router,
    ):
        await router.routable(2)
        yield router, [one, other]


async def asked(
    router: Replica, path: str, body: bytes, version: str = "1.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A raw connection on which a client has sent its request, so that the test reads the bytes as they arrive."""
    parts = urlsplit(router.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


# ---------------------------------------------------------------- piece by piece

STREAMS = {
    "speech": (SPEECH, head("audio/pcm")),
    "speech in a container": (SPEECH, head("audio/mpeg")),
    "bytes": (SPEECH, head("application/octet-stream")),
    "lines of JSON": ("/v1/images/x", head("application/x-ndjson")),
    "text": (SPEECH, head("text/plain; charset=utf-8")),
    "no type at all": (SPEECH, head("")),
    "parts": ("/v1/images/x", head("multipart/x-mixed-replace; boundary=x")),
    "JSON in pieces of a path that nobody knows": ("/v1/images/x", head("application/json")),
    "JSON of whatever /invocations serves": ("/invocations", head("application/json")),
    "embeddings as bytes": ("/v1/embeddings", head("application/octet-stream")),
    "a transcript in pieces": ("/v1/audio/transcriptions", head("text/plain")),
    "speech of a known length": (SPEECH, sized("audio/wav")),
    "much JSON of a known length": (CHAT, sized("application/json", LARGE)),
    "until the engine hangs up": (SPEECH, head("audio/pcm", chunked=False)),
    "events that are none": (SPEECH, STREAM_HEAD),
    "a comment, and events much later": (CHAT, STREAM_HEAD),
}
BEGINS = {
    "much JSON of a known length": b'{"choices":[' + FIRST,
    "a comment, and events much later": b": the prompt is long\n\n",
    "events that are none": FIRST * 20,
}


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("case", STREAMS)
async def test_an_answer_is_passed_on_as_it_comes(valkey_url: str, model: str, case: str, version: str) -> None:
    """The engine sends its second piece only after the client has read the first one."""
    path, begin = STREAMS[case]
    first = BEGINS.get(case, FIRST)
    chunked, has_it = b"chunked" in begin, asyncio.Event()
    rest = b" " * (LARGE - len(first) - 1) + b"}" if str(LARGE).encode() in begin else REST

    async def drip(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        def say(piece: bytes) -> None:
            chunk(writer, piece) if chunked else writer.write(piece)

        writer.write(begin)
        say(first)
        await has_it.wait()
        say(rest)
        if chunked:
            chunk(writer, b"")
        elif b"content-length" not in begin:
            writer.close()

    async with fleet(valkey_url, model, drip) as (router, _):
        reader, writer = await asked(router, path, json.dumps(ASKED | {"model": model}).encode(), version)
        async with asyncio.timeout(5):
            got = await reader.readuntil(first)
            has_it.set()
            while rest not in got and (piece := await reader.read(2**16)):
                got += piece
        assert got.startswith(b"HTTP/1.1 200 OK\r\n")
        assert (b"content-length: " in got) is (b"content-length" in begin)
        assert rest in got
        writer.close()


async def test_a_stream_that_dies_before_its_first_byte_is_tried_elsewhere(valkey_url: str, model: str) -> None:
    """Streams of any type; after the first byte the closed connection shows the client that the answer is cut off."""
    dies_at = {"byte": 0, "tries": 0}

    async def dying(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        dies_at["tries"] += 1
        writer.write(head("audio/pcm"))
        if dies_at["tries"] == 1:
            if dies_at["byte"]:
                chunk(writer, FIRST)
            await writer.drain()
            await asyncio.sleep(0.05)
            reset(writer)
            return
        chunk(writer, FIRST + REST)
        chunk(writer, b"")

    async with fleet(valkey_url, model, dying) as (router, engines):
        body = json.dumps({"model": model}).encode()
        status, _, said = await router.post(body, SPEECH)
        assert (status, said, sum(len(upstream.seen) for upstream in engines)) == (200, FIRST + REST, 2)
        dies_at.update(byte=1, tries=0)
        reader, writer = await asked(router, SPEECH, body)
        got = await reader.read()
        assert FIRST in got
        assert not got.endswith(b"0\r\n\r\n")
        writer.close()


# ---------------------------------------------------------------- legal and broken answers

LEGAL: dict[str, tuple[str, bytes, str]] = {
    "a transcript of silence": ("/v1/audio/transcriptions", b"", "text/plain; charset=utf-8"),
    "a translation of silence": ("/v1/audio/translations", b"", "text/plain"),
    "a transcript that is a JSON text": ("/v1/audio/transcriptions", b'"hello"', "application/json"),
    "subtitles of silence": ("/v1/audio/transcriptions", b"", "application/x-subrip"),
    "an empty JSON text": ("/v1/audio/translations", b'""', "application/json"),
    "speech without samples": (SPEECH, b"", "audio/pcm"),
    "null": ("/invocations", b"null", "application/json"),
    "a number": ("/invocations", b" 1.5", "application/json"),
    "an empty list": ("/invocations", b"[]", "application/json"),
    "a truth": ("/v1/images/x", b"true", "application/json"),
    "nothing": ("/v1/images/x", b"", "application/json"),
    "nothing of no type": ("/invocations", b"", ""),
    "no events": (SPEECH, b"", "text/event-stream"),
    "embeddings of nothing": ("/v1/embeddings", b"null", "application/json"),
    "no scores": ("/score", b"[]", "application/json"),
}
OUT_OF_ORDER: dict[str, tuple[str, bytes, str]] = {
    "an empty chat": (CHAT, b"", "application/json"),
    "an empty chat of no type": (CHAT, b"", "text/plain"),
    "a chat that is null": (CHAT, b"null", "application/json"),
    "a completion that is a text": ("/v1/completions", b'"x"', "application/json"),
    "a message that is a list": ("/v1/messages", b"[1]", "application/json"),
    "a response that is a page": ("/v1/responses", b"<html>", "application/json"),
    "tokens that are a number": ("/inference/v1/generate", b"1", "application/json"),
    "half a chat": (CHAT, b'{"choices":[{"index":0,"mess', "application/json"),
    "no events of a chat": (CHAT, b"", "text/event-stream"),
}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("case", LEGAL | OUT_OF_ORDER)
async def test_only_an_answer_that_cannot_be_right_is_asked_for_again(
    valkey_url: str, model: str, case: str, chunked: bool
) -> None:
    path, said, kind = (LEGAL | OUT_OF_ORDER)[case]

    async def answer(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        if not chunked:
            writer.write(sized(kind, len(said)) + said)
            return
        writer.write(head(kind))
        if said:
            chunk(writer, said)
        chunk(writer, b"")

    async with fleet(valkey_url, model, answer) as (router, engines):
        body = json.dumps({"prompt": "hi"} | ASKED | {"model": model}).encode()
        if "audio" in path:
            body = json.dumps({"model": model}).encode()
        status, headers, got = await router.post(body, path)
        tries = sum(len(upstream.seen) for upstream in engines)
        if case in LEGAL:
            assert (status, got, tries) == (200, said, 1)
            assert headers.get("content-type", "") == kind
        else:
            assert (status, tries) == (502, 2)


# ---------------------------------------------------------------- the first event

FAILURES = {
    "chat": (CHAT, f"data: {ERROR}\n\ndata: [DONE]\n\n"),
    "messages, as vLLM writes it": (
        "/v1/messages",
        'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"1 validation error"}}\n\n',
    ),
    "responses": ("/v1/responses", f"event: error\ndata: {ERROR}\n\n"),
    "responses, failed": ("/v1/responses", 'data: {"type":"response.failed","response":{"error":{"code":"x"}}}\n\n'),
    "no space": (CHAT, f"data:{ERROR}\n\n"),
    "spaces": (CHAT, 'data: { "error" : {"code":500}}\n\n'),
    "a comment first": (CHAT, f": keep-alive\n\ndata: {ERROR}\n\n"),
    "a ping first": ("/v1/messages", f'event: ping\ndata: {{"type":"ping"}}\n\nevent: error\ndata: {ERROR}\n\n'),
    "CRLF": (CHAT, f"data: {ERROR}\r\n\r\n"),
    "CR": (CHAT, f"data: {ERROR}\r\r"),
    "a byte-order mark": (CHAT, f"\ufeffdata: {ERROR}\n\n"),
    "several lines of data": (CHAT, 'data: {"error":\ndata: {"code": 500}}\n\n'),
    "an id first": ("/v1/completions", f"id: 1\nretry: 1\ndata: {ERROR}\n\n"),
    "SGLang": (CHAT, 'data: {"object":"error","message":"x","code":500,"type":"InternalServerError"}\n\n'),
    "a code that is a text": (CHAT, 'data: {"error":{"message":"x","code":"500"}}\n\n'),
    "no code": ("/inference/v1/generate", 'data: {"error":{"message":"x","type":"server_error"}}\n\n'),
    "an audio stream": (SPEECH, f"data: {ERROR}\n\n"),
    "without its end": (CHAT, f"data: {ERROR}\n"),
}
CLIENTS_OWN = {
    "chat": (CHAT, 'data: {"error":{"message":"x","type":"BadRequestError","code":400}}\n\ndata: [DONE]\n\n'),
    "chat, by its type": (CHAT, 'data: {"error":{"message":"x","type":"invalid_request_error"}}\n\n'),
    "messages": ("/v1/messages", 'event: error\ndata: {"type":"error","error":{"type":"not_found_error"}}\n\n'),
    "SGLang": (CHAT, 'data: {"object":"error","message":"x","code":404}\n\n'),
    "not implemented": (CHAT, 'data: {"error":{"message":"x","code":501}}\n\n'),
    "after a token": (CHAT, f"{TOKEN.decode()}data: {ERROR}\n\n"),
    "a text about an error": (CHAT, 'data: {"choices":[{"delta":{"content":"\\"error\\": 500"}}]}\n\n'),
    "responses, after it was created": (
        "/v1/responses",
        f'event: response.created\ndata: {{"type":"response.created"}}\n\nevent: error\ndata: {ERROR}\n\n',
    ),
}


def saying(pieces: list[bytes]) -> Answer:
    async def say(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for piece in pieces:
            chunk(writer, piece)
            await writer.drain()
            await asyncio.sleep(0.005)
        chunk(writer, b"")

    return say


@pytest.mark.parametrize("size", [10_000, 7])
@pytest.mark.parametrize("case", FAILURES)
async def test_a_stream_that_begins_with_an_error_is_tried_elsewhere(
    valkey_url: str, model: str, case: str, size: int
) -> None:
    """size: bytes in each piece of the stream."""
    path, said = FAILURES[case]
    data = said.encode()
    fails, tried = saying([data[at : at + size] for at in range(0, len(data), size)]), list[Seen]()

    async def once(engine: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        tried.append(seen)
        await (fails if len(tried) == 1 else saying([TOKEN]))(engine, seen, writer)

    async with fleet(valkey_url, model, once) as (router, _):
        body = {"prompt": "hi"} | ASKED | {"model": model, "stream": True}
        status, _, got = await router.post(body, path)
        assert (status, got, len(tried)) == (200, TOKEN, 2)


@pytest.mark.parametrize("case", CLIENTS_OWN)
async def test_an_error_of_the_client_and_a_later_one_reach_it(valkey_url: str, model: str, case: str) -> None:
    path, said = CLIENTS_OWN[case]
    async with fleet(valkey_url, model, saying([said.encode()])) as (router, engines):
        status, _, got = await router.post(ASKED | {"model": model, "stream": True}, path)
        assert (status, got.decode(), sum(len(upstream.seen) for upstream in engines)) == (200, said, 1)


async def test_a_busy_engine_says_so_in_its_stream(valkey_url: str, model: str) -> None:
    """The stream has not begun, so up to three other engines are tried, and no worker is blamed."""
    busy = b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"x"}}\n\n'
    async with fleet(valkey_url, model, saying([busy])) as (router, engines):
        status, _, got = await router.post(ASKED | {"model": model, "stream": True}, "/v1/messages")
        assert (status, json.loads(got)["error"]["type"]) == (502, "api_error")
        assert [len(upstream.seen) for upstream in engines] == [1, 1]
