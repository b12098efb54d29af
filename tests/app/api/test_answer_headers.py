"""A replica's answers have the headers that HTTP, proxies and clients need, and none of the engine's own connection."""

from __future__ import annotations

import asyncio
import time
from email.utils import parsedate_to_datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from tests.support.engines.scripted import Engine, Seen, chunk, engine
from tests.support.replicas.replica import Replica, replica

from warmfleet.routing import client_answer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.engines.scripted import Answer

CHAT = b'{"messages":[{"role":"user","content":"hi"}]}'
OBJECT, EVENTS, SPEECH = b'{"choices":[]}', b'data: {"choices":[]}\n\n', b"speech"
#: Headers of engines that reach the client.
PASSED = {
    "www-authenticate": 'Bearer realm="engine"',
    "retry-after": "7",
    "allow": "GET",
    "cache-control": "no-cache",
    "vary": "Accept-Encoding",
    "x-accel-buffering": "no",
    "content-language": "de",
    "content-disposition": 'attachment; filename="speech.wav"',
    "etag": '"1"',
    "last-modified": "Fri, 27 Nov 2026 16:00:00 GMT",
    "expires": "Fri, 27 Nov 2026 17:00:00 GMT",
    "metadata": '{"data":[]}',
}
#: Headers of engines that do not reach the client: they concern the router's connection, or reveal the software.
KEPT = {
    "keep-alive": "timeout=5",
    "trailer": "x",
    "te": "trailers",
    "upgrade": "h2c",
    "proxy-authenticate": "Basic",
    "proxy-connection": "close",
    "server": "uvicorn",
    "set-cookie": "a=b",
    "location": "http://10.0.0.7:8000/",
    "x-request-id": "of-the-engine",
    "date": "Thu, 01 Jan 1970 00:00:00 GMT",
}


def saying(body: bytes, kind: str, *, chunked: bool, status: str = "200 OK", **more: str) -> Answer:
    async def answer(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        fields = {"content-type": kind} | {name.replace("_", "-"): value for name, value in more.items()}
        fields |= {"transfer-encoding": "chunked"} if chunked else {"content-length": str(len(body))}
        lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        writer.write("\r\n".join(lines).encode())
        if not chunked:
            writer.write(body)
            return
        chunk(writer, body)
        await writer.drain()
        await asyncio.sleep(0.05)  # the first piece is then not the whole answer
        chunk(writer, b"")

    return answer


async def heads(router: Replica, *requests: bytes) -> list[dict[str, list[str]]]:
    """The headers of the answers to these requests, each sent on its own connection, with all values of each header."""
    parts, found = urlsplit(router.url), []
    for request in requests:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(request)
        lines = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode().split("\r\n")
        fields: dict[str, list[str]] = {"": [lines[0]]}
        for name, _, value in (line.partition(": ") for line in lines[1:-2]):
            fields.setdefault(name.lower(), []).append(value)
        found.append(fields)
        writer.close()
    return found


def post(path: str, body: bytes = CHAT, *fields: str, version: str = "1.1") -> bytes:
    head = [f"POST {path} HTTP/{version}", "host: x", f"content-length: {len(body)}", *fields, "", ""]
    return "\r\n".join(head).encode() + body


def get(path: str, *fields: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *fields, "", ""]).encode()


async def test_every_answer_has_one_date(valkey_url: str, model: str) -> None:
    """Answers of engines, answers of the router itself, errors, and refusals of bytes that are no request."""
    async with (
        engine(model, saying(OBJECT, "application/json", chunked=False, date=KEPT["date"])) as upstream,
        replica(valkey_url, model, upstream.url, cors_origins=("https://a.example",)) as router,
    ):
        before = int(time.time())
        answers = await heads(
            router,
            post("/v1/chat/completions"),
            post("/v1/chat/completions", version="1.0"),
            get("/v1/models"),
            get("/livez", method="HEAD"),
            get("/metrics"),
            get("/favicon.ico"),
            get("/nowhere"),
            get("/v1/chat/completions"),
            post("/v1/chat/completions", b"{"),
            get("/", "host: y"),
            b"no HTTP at all\r\n\r\n",
            get("/v1/models", "origin: https://a.example", "access-control-request-method: GET", method="OPTIONS"),
        )
        after = time.time()
    assert {answer[""][0].split()[1] for answer in answers} >= {"200", "204", "400", "404", "405"}
    for answer in answers:
        (date,) = answer["date"]
        assert date.endswith(" GMT")
        assert before <= parsedate_to_datetime(date).timestamp() <= after


def test_the_date_is_made_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    client_answer._date_line.cache_clear()

    def today(second: float, *, usegmt: bool) -> str:
        assert usegmt
        made.append(second)
        return "today"

    monkeypatch.setattr(client_answer, "formatdate", today)
    for now in (5.0, 5.9, 6.1, 6.2):
        monkeypatch.setattr(client_answer, "time", SimpleNamespace(time=lambda now=now: now))
        assert client_answer.first_lines(200) == b"HTTP/1.1 200 OK\r\ndate: today\r\n"
    client_answer._date_line.cache_clear()
    assert made == [5, 6]


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", "audio/pcm"])
@pytest.mark.parametrize("chunked", [False, True])
async def test_headers_of_engines(valkey_url: str, model: str, kind: str, chunked: bool) -> None:
    body = {"application/json": OBJECT, "text/event-stream": EVENTS}.get(kind, SPEECH)
    answer = saying(body, kind + "; charset=utf-8", chunked=chunked, **PASSED, **KEPT)
    async with (
        engine(model, answer) as upstream,
        replica(valkey_url, model, upstream.url, passed_paths=("/v1/audio/*",)) as router,
    ):
        path = "/v1/audio/speech" if kind == "audio/pcm" else "/v1/chat/completions"
        (found,) = await heads(router, post(path))
    assert {name: found[name] for name in PASSED} == {name: [value] for name, value in PASSED.items()}
    assert found["content-type"] == [kind + "; charset=utf-8"]
    assert not found.keys() & (KEPT.keys() - {"date", "x-request-id"})
    assert found["date"] != [KEPT["date"]]
    assert len(found["date"]) == len(found["x-request-id"]) == 1
    assert found["x-request-id"] != [KEPT["x-request-id"]]
    assert len(found.get("content-length", []) + found.get("transfer-encoding", [])) == 1


@pytest.mark.parametrize("named", ["cache-control", "X-Accel-Buffering, close", "vary,cache-control"])
async def test_a_header_that_the_connection_names_belongs_to_it(valkey_url: str, model: str, named: str) -> None:
    answer = saying(OBJECT, "application/json", chunked=False, connection=named, **PASSED)
    async with engine(model, answer) as upstream, replica(valkey_url, model, upstream.url) as router:
        (found,) = await heads(router, post("/v1/chat/completions"))
    gone = {name.strip().lower() for name in named.split(",")}
    assert not found.keys() & gone
    assert found.keys() >= PASSED.keys() - gone


@pytest.mark.parametrize(
    ("kind", "chunked", "said", "expected"),
    [
        ("text/event-stream", True, None, ["no"]),
        ("text/event-stream", True, "yes", ["yes"]),
        ("audio/pcm", True, None, ["no"]),
        ("application/x-ndjson", True, None, ["no"]),
        ("audio/wav", False, None, []),
        ("application/json", True, None, []),
    ],
)
async def test_proxies_are_told_not_to_hold_a_stream_back(
    valkey_url: str, model: str, kind: str, chunked: bool, said: str | None, expected: list[str]
) -> None:
    body = {"application/json": OBJECT, "text/event-stream": EVENTS}.get(kind, SPEECH)
    answer = saying(body, kind, chunked=chunked, **({} if said is None else {"x-accel-buffering": said}))
    async with engine(model, answer) as upstream, replica(valkey_url, model, upstream.url) as router:
        (found,) = await heads(router, post("/v1/chat/completions"))
    assert found.get("x-accel-buffering", []) == expected


@pytest.mark.parametrize(
    ("status", "name"), [("401 Unauthorized", "www-authenticate"), ("405 Method Not Allowed", "allow")]
)
async def test_a_refusal_of_an_engine_says_what_it_wants(valkey_url: str, model: str, status: str, name: str) -> None:
    answer = saying(b'{"error":{}}', "application/json", chunked=False, status=status, **{name: PASSED[name]})
    async with engine(model, answer) as upstream, replica(valkey_url, model, upstream.url) as router:
        (found,) = await heads(router, post("/v1/chat/completions"))
    assert (found[""][0].split()[1], found[name]) == (status[:3], [PASSED[name]])


async def test_refusals_of_the_router_say_what_it_wants(valkey_url: str, model: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text('{"name": "a", "sha256": "%s"}\n' % ("0" * 64))
    async with engine(model) as upstream:  # both replicas share the engine: a second engine would join beside it
        async with replica(valkey_url, model, upstream.url) as router:
            chat, models, unknown = await heads(
                router, get("/v1/chat/completions"), post("/v1/models"), post("/v1/chat/completions", b'{"model":"x"}')
            )
            assert (chat["allow"], sorted(models["allow"][0].split(", "))) == (["POST"], ["GET", "HEAD"])
            assert "allow" not in unknown
        async with replica(valkey_url, model, upstream.url, client_keys_file=str(keys)) as router:
            for refused in await heads(router, post("/v1/chat/completions"), get("/v1/models"), get("/v1/models/x")):
                assert (refused[""][0].split()[1], refused["www-authenticate"]) == ("401", ["Bearer"])


@pytest.mark.parametrize("status", ["204 No Content", "304 Not Modified"])
async def test_an_answer_without_a_body_tells_no_length(valkey_url: str, model: str, status: str) -> None:
    async def bare(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\n\r\n".encode())

    async with engine(model, bare) as upstream, replica(valkey_url, model, upstream.url) as router:
        (found,) = await heads(router, post("/v1/chat/completions"))
    assert found[""][0].split()[1] == status[:3]
    assert not found.keys() & {"content-length", "transfer-encoding"}
