"""Errors of the router have the format of the endpoint's API, before an answer and in its middle."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from tests.app.api.test_answers import fleet
from tests.support.engines.scripted import STREAM_HEAD, Answer, Engine, Seen, chunk, engine, freezing
from tests.support.replicas.replica import Replica, replica

from warmfleet import errors
from warmfleet.errors import WarmfleetError
from warmfleet.routing.error_events import ErrorEvents
from warmfleet.routing.router import Router

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from warmfleet.prompt.engine_paths import Form

#: All error types of Anthropic's API reference.
TYPES = {
    *("invalid_request_error", "authentication_error", "permission_error", "not_found_error", "request_too_large"),
    *("rate_limit_error", "api_error", "overloaded_error", "timeout_error", "billing_error"),
}
MESSAGES, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def post(path: str, body: bytes = b"", *fields: str, method: str = "POST", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    lines = [f"{method} {path} HTTP/1.1", "host: x", "x-request-id: my-id", f"content-length: {size}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body


Fault = tuple["Callable[[str, str], bytes]", int, str]
#: A request for a path and a model -> the status and Anthropic's type of its answer.
FAULTS: dict[str, Fault] = {
    "no JSON": (lambda path, _: post(path, b"{"), 400, "invalid_request_error"),
    "an unknown model": (
        lambda path, _: post(path, json.dumps(ASKED | {"model": "nope"}).encode()),
        404,
        "not_found_error",
    ),
    "a refused field": (
        lambda path, model: post(path, json.dumps(ASKED | {"model": model, "kv_transfer_params": {}}).encode()),
        400,
        "invalid_request_error",
    ),
    "another method": (lambda path, _: post(path, method="DELETE"), 405, "invalid_request_error"),
    "a query that is no text": (lambda path, _: post(path + "?a=\xff", b"{}"), 400, "invalid_request_error"),
    "a hint that is none": (
        lambda path, model: post(path, json.dumps(ASKED | {"model": model}).encode(), "x-warmfleet-prefix-len: x"),
        400,
        "invalid_request_error",
    ),
    # ------ errors while the request is being read
    "too large": (lambda path, _: post(path, length=99_999_999), 413, "request_too_large"),
    "too large in chunks": (
        lambda path, _: (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
            + b"2800000\r\n"
            + b"x" * 1_100_000
        ),
        413,
        "request_too_large",
    ),
    "two hosts": (lambda path, _: post(path, b"{}", "host: y"), 400, "invalid_request_error"),
    "too many headers": (lambda path, _: post(path, b"{}", *["a: b"] * 200), 431, "invalid_request_error"),
    "a head without an end": (
        lambda path, _: f"POST {path} HTTP/1.1\r\na: ".encode() + b"x" * 70_000,
        431,
        "invalid_request_error",
    ),
    "a head that is none": (
        lambda path, _: f"POST {path} HTTP/1.1\r\n: x\r\n\r\n".encode(),
        400,
        "invalid_request_error",
    ),
    "a body that never comes": (lambda path, _: post(path, b"{", length=100), 400, "invalid_request_error"),
    "the target of a proxy": (lambda path, _: post("http://x" + path, b"{"), 400, "invalid_request_error"),
}


async def answered(router: Replica, raw: bytes) -> tuple[int, dict[str, str], Any]:
    """The status, headers and JSON of the answer to these bytes."""
    parts = urlsplit(router.url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(raw)
    async with asyncio.timeout(10):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *lines = head.rstrip().split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in lines)}
        said = await reader.readexactly(int(fields["content-length"]))
    writer.close()
    return int(line.split()[1]), fields, json.loads(said)


def is_anthropics(said: Any, kind: str) -> bool:
    return (said.get("type"), said["error"].keys(), said["error"]["type"]) == ("error", {"type", "message"}, kind)


@pytest.mark.parametrize("path", [MESSAGES, COUNT, MESSAGES + "?beta=true"])
async def test_a_request_that_is_refused(valkey_url: str, model: str, path: str) -> None:
    async with (
        engine(model) as upstream,
        replica(valkey_url, model, upstream.url, body_timeout_s=0.2, body_max_bytes=1_000_000) as router,
    ):
        for case, (make, status, kind) in FAULTS.items():
            if "?" in path and "query" in case:
                continue
            found, headers, said = await answered(router, make(path, model))
            assert (case, found, said.get("type"), said["error"]["type"]) == (case, status, "error", kind)
            assert is_anthropics(said, kind)
            assert said["request_id"] == headers["x-request-id"], case
            found, _, said = await answered(router, make(CHAT, model))
            assert (case, found, said.keys()) == (case, status, {"error"}), "all other endpoints speak OpenAI's API"
            assert said["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", [MESSAGES + "/batches", MESSAGES + "/", MESSAGES + "/%41"])
async def test_paths_below_that_are_not_served(valkey_url: str, model: str, path: str) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url) as router:
        status, _, said = await answered(router, post(path, b"{}"))
        kind = "invalid_request_error" if "%" in path else "not_found_error"
        assert (status, is_anthropics(said, kind)) == (400 if "%" in path else 404, True)
        _, _, said = await answered(router, post("/v1/messagesx", b"{}"))
        assert said.keys() == {"error"}


async def test_a_key_that_is_needed(valkey_url: str, model: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(json.dumps({"sha256": hashlib.sha256(b"key").hexdigest(), "name": "a"}) + "\n")
    async with (
        engine(model) as upstream,
        replica(valkey_url, model, upstream.url, client_keys_file=str(keys)) as router,
    ):
        status, headers, said = await answered(router, post(MESSAGES, b"{}"))
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert is_anthropics(said, "authentication_error")


async def no_answer(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
    writer.close()


@pytest.mark.parametrize(
    ("answer", "status", "kind", "settings"),
    [
        (no_answer, 502, "api_error", {}),
        (freezing(b""), 504, "timeout_error", {"request_max_s": 0.3, "limit_interval_s": 0.05}),
    ],
)
async def test_engines_that_fail(
    valkey_url: str, model: str, answer: Answer, status: int, kind: str, settings: dict[str, Any]
) -> None:
    async with fleet(valkey_url, model, answer, **settings) as (router, _):
        body = json.dumps(ASKED | {"model": model}).encode()
        found, headers, said = await answered(router, post(MESSAGES, body))
        assert (found, is_anthropics(said, kind), headers["retry-after"]) == (status, True, "1")


async def test_a_fleet_without_engines_and_a_bug_of_ours(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replica(valkey_url, model) as router:
        body = json.dumps(ASKED | {"model": model}).encode()
        found, _, said = await answered(router, post(MESSAGES, body))
        assert (found, is_anthropics(said, "overloaded_error")) == (503, True)

        async def breaks(*_: object) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(Router, "serve", breaks)
        found, _, said = await answered(router, post(MESSAGES, body))
        assert (found, is_anthropics(said, "api_error")) == (500, True)


def every_error() -> list[type[WarmfleetError]]:
    found: list[type[WarmfleetError]] = [WarmfleetError]
    for kind in found:
        found += kind.__subclasses__()
    return [kind for kind in found if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", every_error())
def test_every_error_has_a_type_of_anthropics_api(kind: type[WarmfleetError]) -> None:
    error = kind.__new__(kind)
    error.message = "x"
    said = error.as_anthropic("my-id")
    assert said["error"]["type"] in TYPES
    assert said == {"type": "error", "error": {"type": said["error"]["type"], "message": "x"}, "request_id": "my-id"}
    assert (said["error"]["type"] in ("api_error", "overloaded_error", "timeout_error")) is (kind.status >= 500)


# ---------------------------------------------------------------- in the middle of a stream

WHOLE = {
    CHAT: b'data: {"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n',
    "/v1/completions": b'data: {"choices":[{"index":0,"text":"hi"}]}\n\n',
    MESSAGES: b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n',
    "/v1/responses": b'event: response.created\ndata: {"type":"response.created","sequence_number":0}\n\n'
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","sequence_number": 41,"delta":'
    b'"a \\"sequence_number\\": 77"}\n\n',
    "/inference/v1/generate": b'data: {"choices":[]}\n\n',
}
#: Bytes of the engine between its last whole event and its death.
CUTS = [
    b"",
    b"da",
    b"data:",
    b'data: {"half',
    b"event: content_blo",
    b"event: x\ndata: {",
    b"data: {}\n",
    b": comm",
    b"\n",
]


def events(stream: bytes) -> list[tuple[str, str]]:
    """The name and data of each event, parsed as the specification of event streams demands."""
    found, name, data = [], "", list[str]()
    for line in stream.decode().split("\n"):
        field, _, value = line.partition(":")
        if field == "event":
            name = value.removeprefix(" ")
        elif field == "data":
            data.append(value.removeprefix(" "))
        elif not line:
            if data:
                found.append((name, "\n".join(data)))
            name, data = "", []
    return found


def judge(path: str, name: str, said: Any) -> None:
    """Assert that ``event`` reports a cut stream in the format of the path's API."""
    if path == MESSAGES:
        assert (name, is_anthropics(said, "api_error")) == ("error", True)
    elif path == "/v1/responses":
        assert (name, said["type"], said["sequence_number"]) == ("error", "error", 42)
        assert (said["code"], said["param"]) == ("upstream_gone", None)
        assert said["message"] == said["error"]["message"]
    else:
        assert (name, said.keys(), said["error"]["code"]) == ("", {"error"}, "upstream_gone")


@pytest.mark.parametrize("path", WHOLE)
@pytest.mark.parametrize("cut", CUTS)
async def test_a_stream_that_is_cut(valkey_url: str, model: str, path: str, cut: bytes) -> None:
    async def dying(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for piece in (WHOLE[path][:-20], WHOLE[path][-20:] + cut):
            chunk(writer, piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.close()

    async with engine(model, dying) as upstream, replica(valkey_url, model, upstream.url) as router:
        body = {"prompt": "hi", "input": "hi"} | ASKED | {"model": model, "stream": True}
        status, _, said = await router.post(body, path)
        assert status == 200
        assert said.startswith(WHOLE[path] + cut)
        name, data = events(said)[-1]
        judge(path, name, json.loads(data))
        assert said.endswith(b"\n\n")


@pytest.mark.parametrize("form", ["messages", "responses", "chat"])
def test_a_stream_that_ends_because_the_replica_does(form: Form) -> None:
    told = ErrorEvents(form)
    (name, data) = events(told.event(errors.Stopping()))[0]
    assert name == ("" if form == "chat" else "error")
    said = json.loads(data)
    if form == "messages":
        assert said["error"]["type"] == "overloaded_error"
    else:
        assert said["error"]["code"] == "stopping"
    assert said.get("sequence_number") == (0 if form == "responses" else None)


@pytest.mark.parametrize("at", range(90))
def test_the_number_of_the_last_event_is_known_however_it_comes(at: int) -> None:
    stream = b'data: {"sequence_number":7}\n\ndata: {"item_id":"x","sequence_number": 1234,"type":"response.x"}\n\n'
    told = ErrorEvents("responses")
    for piece in (stream[:at], stream[at : at + 3], stream[at + 3 :]):
        told.see(piece)
    assert json.loads(events(told.event(errors.UpstreamGone("x")))[0][1])["sequence_number"] == 1235
