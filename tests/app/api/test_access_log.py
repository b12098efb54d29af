"""The access log has a line for each request without its content; while the log is off, requests pay nothing for it."""

from __future__ import annotations

import asyncio
import io
import json
import re
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from tests.support.engines.scripted import STREAM_HEAD, chunk, engine, event
from tests.support.polling import poll
from tests.support.replicas.replica import replica

from warmfleet.api.application import ServiceApplication
from warmfleet.logs.output import LogOutput
from warmfleet.main import create_app
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.engines.scripted import Answer, Engine, Seen
    from tests.support.replicas.replica import Replica

PROMPT = "a secret of the client " * 20
#: The fields of a request that went to an engine, in the order of the table in app/docs/operate.md.
FIELDS = (
    *("method", "path", "status", "complete", "ms", "error", "model", "stream", "identity", "identify_ms", "queue_ms"),
    *("decide_ms", "engine_ms", "first_ms", "tries", "chunks", "gap_ms", "worker", "policy", "why", "predicted_ms"),
    *("prompt_tokens", "matched_tokens", "cached_tokens", "tokens"),
)


@asynccontextmanager
async def logged(
    redis_url: str, model: str, *answers: Answer, form: str = "json", **settings: Any
) -> AsyncIterator[tuple[Replica, Engine, io.StringIO]]:
    """A replica with an access log in front of an engine, and the file of the log."""
    stream = io.StringIO()
    with LogOutput("info", form, stream=stream) as log:
        async with (
            engine(model, *answers) as upstream,
            replica(redis_url, model, upstream.url, log=log, access_log=True, **settings) as router,
        ):
            yield router, upstream, stream


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    """The lines about requests of clients, without the test's own requests for metrics."""
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    return [entry for entry in found if entry["logger"] == "warmfleet.access" and entry["path"] != "/metrics"]


async def told(stream: io.StringIO, count: int) -> list[dict[str, Any]]:
    await poll(lambda: len(lines(stream)) >= count, 30, f"{count} lines")
    return lines(stream)


def test_while_it_is_off_nothing_of_it_is_there() -> None:
    doors = create_app(Settings(models=("m",)))
    for door in (doors.clients, doors.operators):
        application = door.connections.application
        assert isinstance(application, ServiceApplication)
        assert application._access_log is None


async def test_each_request_is_a_line(valkey_url: str, model: str) -> None:
    async with logged(valkey_url, model) as (router, upstream, stream):
        body = {"model": model, "prompt": PROMPT}
        _, headers, _ = await router.post(body, "/v1/completions?key=secret", **{"X-Request-Id": "mine"})
        _, unnamed, _ = await router.post(body)
        await router.post(body | {"stream": True, "stream_options": {"include_usage": True}})
        await router.get("/no/such/path?key=secret")
        async with router.client.post(router.url + "/v1/completions", data=b"{") as refused:
            assert refused.status == 400
        found = await told(stream, 5)
    assert [(entry["method"], entry["path"], entry["status"], entry["complete"]) for entry in found] == [
        ("POST", "/v1/completions", 200, True),
        ("POST", "/v1/completions", 200, True),
        ("POST", "/v1/completions", 200, True),
        ("GET", "/no/such/path", 404, True),
        ("POST", "/v1/completions", 400, True),
    ]
    ids = [entry["request_id"] for entry in found]
    assert ids[:2] == ["mine", unnamed["x-request-id"]]
    assert upstream.seen[1].headers["x-request-id"].endswith("." + ids[1])
    assert found[0]["worker"] == headers["x-warmfleet-worker"]
    assert all(0 <= entry["first_ms"] <= entry["ms"] for entry in found[:3])
    assert found[4]["error"] == "bad_request"
    assert all(entry["ms"] >= 0 for entry in found)
    assert "secret" not in stream.getvalue()


async def test_a_line_tells_where_the_time_went(valkey_url: str, model: str) -> None:
    async def slowly(_engine: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.1)
        writer.write(STREAM_HEAD)
        chunk(writer, event(" secret"))
        await writer.drain()
        await asyncio.sleep(0.2)
        chunk(writer, event(" text"))
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
        chunk(writer, b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await writer.drain()
        await asyncio.sleep(0.01)
        chunk(writer, b"data: [DONE]\n\n")
        chunk(writer, b"")

    async with logged(valkey_url, model, slowly) as (router, _, stream):
        await router.post({"model": model, "prompt": PROMPT, "stream": True})
        (found,) = await told(stream, 1)
    assert tuple(found)[-len(FIELDS) :] == FIELDS
    assert (found["tokens"], found["cached_tokens"], found["chunks"], found["tries"]) == (2, 4, 4, 1)
    assert 90 < found["engine_ms"] <= found["first_ms"] < found["ms"]
    assert 190 < found["gap_ms"] < found["ms"] - found["first_ms"] + 1
    assert found["queue_ms"] == 0
    assert 0 < found["decide_ms"] < found["first_ms"]
    assert found["prompt_tokens"] > 0
    assert "secret" not in stream.getvalue()


async def test_text_has_the_same_facts(valkey_url: str, model: str) -> None:
    async with logged(valkey_url, model, form="text") as (router, _, stream):
        await router.post({"model": model, "prompt": PROMPT}, **{"X-Request-Id": "mine\u00e9; x" + "y" * 500})
        await poll(lambda: "/v1/completions" in stream.getvalue(), 30, "a line")
    (line,) = [text for text in stream.getvalue().splitlines() if "/v1/completions" in text]
    told = (
        r"[-\d]+ [\d:,]+ INFO warmfleet.access POST /v1/completions 200 in [\d.]+ ms by \S+: queue [\d.]+ ms, decide "
        r"[\d.]+ ms, engine [\d.]+ ms \(predicted (None|[\d.]+)\), first byte [\d.]+ ms, cached None of \d+ "
        r"expected of \d+, None tokens in 1 chunks, longest gap [\d.]+ ms \[request mine;xy+\]"
    )
    assert re.fullmatch(told, line)
    assert len(line) < 500, "an id of a client is capped"


async def never(_engine: Engine, _seen: Seen, _writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def test_a_client_that_hangs_up_is_told(valkey_url: str, model: str) -> None:
    async with logged(valkey_url, model, never) as (router, upstream, stream):
        asking = asyncio.create_task(router.post({"model": model, "prompt": PROMPT}))
        await poll(lambda: upstream.seen, 30, "the engine has it")
        asking.cancel()
        (line,) = await told(stream, 1)
    assert (line["status"], line["complete"], line["first_ms"]) == (499, False, None)
    assert line["error"] == "client_hung_up"


async def test_refusals_before_any_path_are_lines_and_their_answers_have_the_id(valkey_url: str, model: str) -> None:
    async with logged(valkey_url, model, cors_origins=("http://page",)) as (router, _, stream):
        ask = {"Origin": "http://page", "Access-Control-Request-Method": "POST"}
        async with router.client.options(router.url + "/v1/completions", headers=ask) as answer:
            assert answer.status == 204
        async with router.client.get(router.url + "/no/such/path") as answer:
            assert answer.status == 404
        async with router.client.get(router.url + "//v1/models") as answer:
            assert answer.status == 400
            named = answer.headers["x-request-id"]
        found = await told(stream, 3)
    assert [entry["status"] for entry in found] == [204, 404, 400]
    assert found[2]["request_id"] == named
    assert all(entry["request_id"] for entry in found)


async def test_a_request_that_is_cancelled_at_once_leaves_no_coroutine_behind() -> None:
    from warmfleet.api.http_request import HttpRequest
    from warmfleet.routing.client_answer import ClientAnswer

    request = HttpRequest(b"GET", b"/", "1.1", [], keeps_open=True)
    task = asyncio.create_task(
        ServiceApplication(Starlette()).serve(request, ClientAnswer.__new__(ClientAnswer), engines=False)
    )
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
