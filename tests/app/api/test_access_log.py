"""The access log tells each request and nothing of its content; without it nothing of it is on a request's way."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, cast

import pytest
from starlette.applications import Starlette
from tests.app.engine import engine
from tests.app.replica import replica
from tests.conftest import poll

from warmfleet.api.application import ServiceApplication
from warmfleet.api.http_request import HttpRequest
from warmfleet.api.listening.access_log import LoggedApplication
from warmfleet.main import create_app
from warmfleet.routing.client_answer import ClientAnswer
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tests.app.engine import Engine, Seen

PROMPT = "a secret of the client " * 20


def test_while_it_is_off_nothing_of_it_is_there() -> None:
    doors = create_app(Settings(models=("m",)))
    for door in (doors.clients, doors.operators):
        assert not isinstance(door.connections.application, LoggedApplication)
        assert door.connections.answers is ClientAnswer


async def test_each_request_is_a_line(valkey_url: str, model: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmfleet.access")
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url, access_log=True) as router:
        caplog.clear()
        body = {"model": model, "prompt": PROMPT}
        _, headers, _ = await router.post(body, "/v1/completions?key=secret", **{"X-Request-Id": "mine"})
        _, unnamed, _ = await router.post(body)
        await router.post(body | {"stream": True, "stream_options": {"include_usage": True}})
        await router.get("/no/such/path")
        async with router.client.post(router.url + "/v1/completions", data=b"{") as refused:
            assert refused.status == 400
        await poll(lambda: len(fields(caplog)) >= 5, 30, "five lines")
    lines = fields(caplog)
    paths = [(one["method"], one["path"], one["status"], one["complete"]) for one in lines]
    assert paths == [
        ("POST", "/v1/completions", 200, True),
        ("POST", "/v1/completions", 200, True),
        ("POST", "/v1/completions", 200, True),
        ("GET", "/no/such/path", 404, True),
        ("POST", "/v1/completions", 400, True),
    ]
    ids = [vars(record)["request_id"] for record in caplog.records if record.name == "warmfleet.access"]
    assert ids[:2] == ["mine", unnamed["x-request-id"]]
    assert upstream.seen[1].headers["x-request-id"].endswith("." + ids[1])
    assert lines[0]["worker"] == headers["x-warmfleet-worker"]
    assert all(0 <= one["first_ms"] <= one["ms"] for one in lines)
    assert "secret" not in caplog.text + str(lines)


async def test_a_request_that_is_cancelled_at_once_leaves_no_coroutine_behind() -> None:
    made: list[Coroutine[Any, Any, None]] = []

    class Inner(ServiceApplication):
        def serve(self, request: HttpRequest, answer: ClientAnswer, *, engines: bool) -> Coroutine[Any, Any, None]:
            made.append(super().serve(request, answer, engines=engines))
            return made[-1]

    request = HttpRequest(b"GET", b"/", "1.1", [], keeps_open=True)
    answer = cast("ClientAnswer", None)  # nobody looks at it
    task = asyncio.create_task(LoggedApplication(Inner(Starlette())).serve(request, answer, engines=False))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made == [], "it would never be awaited"


async def never(_engine: Engine, _seen: Seen, _writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


async def test_a_client_that_hangs_up_is_told(valkey_url: str, model: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmfleet.access")
    async with engine(model, never) as upstream, replica(valkey_url, model, upstream.url, access_log=True) as router:
        caplog.clear()
        asking = asyncio.create_task(router.post({"model": model, "prompt": PROMPT}))
        await poll(lambda: upstream.seen, 30, "the engine has it")
        asking.cancel()
        await poll(lambda: fields(caplog), 30, "a line")
    (line,) = fields(caplog)
    assert (line["status"], line["complete"], line["first_ms"]) == (499, False, None)


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record)["fields"] for record in caplog.records if record.name == "warmfleet.access"]
