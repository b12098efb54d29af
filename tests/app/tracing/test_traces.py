"""Traces of real requests through a replica, as a collector reads them; and what happens while it cannot."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.scripted import (
    STREAM_HEAD,
    Engine,
    Seen,
    answer_well,
    chunk,
    engine,
    event,
    freezing,
    reply,
    reset,
)
from tests.support.engines.simulated import simulated
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica
from tests.support.trace_collector import CLIENT, ERROR, SERVER, Collector, collector, read

from warmfleet.errors import BadArgument
from warmfleet.logs.folding import Folding
from warmfleet.main import create_app
from warmfleet.metrics import Metrics
from warmfleet.pools.degraded import DegradedMode
from warmfleet.prompt.engine_paths import KNOWN
from warmfleet.settings import Settings
from warmfleet.timing import Timing
from warmfleet.tracing import exporter
from warmfleet.tracing.exporter import Tracing
from warmfleet.tracing.options import TracingOptions
from warmfleet.tracing.otlp import export_request, request_spans
from warmfleet.tracing.request_record import MAX_EVENTS
from warmfleet.tracing.spans import RequestSpan, TrySpan
from warmfleet.tracing.trace_context import TraceContext

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
FROM_CLIENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1,other=2", "X-Request-Id": "mine-1"}
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20
SAMPLED = TraceContext(TRACE, SPAN, sampled=True)
#: Spans are sent at once, and again at once.
SOON: dict[str, Any] = {"traces_interval_s": 0.01, "traces_retry_s": (0.01, 0.01)}


@asynccontextmanager
async def traced(
    monkeypatch: pytest.MonkeyPatch, redis_url: str, model: str, *answers: Any, share: str = "1", **settings: Any
) -> AsyncIterator[tuple[Replica, Collector, list[Engine]]]:
    """A replica that sends its traces to a collector, in front of an engine for each of ``answers``."""
    async with AsyncExitStack() as stack:
        found = await stack.enter_async_context(collector())
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", share)
        engines = [await stack.enter_async_context(engine(model, answer)) for answer in answers]
        urls = [upstream.url for upstream in engines]
        router = await stack.enter_async_context(replica(redis_url, model, *urls, **SOON, **settings))
        yield router, found, engines


#: Attributes of the request's span.
OF_REQUEST: dict[str, Any] = {
    "http.request.method": "POST",
    "url.path": "/v1/completions",
    "http.response.status_code": 200,
    "gen_ai.operation.name": "text_completion",
    "warmfleet.request_id": "mine-1",
    "warmfleet.stream": True,
    "warmfleet.tries": 1,
}


def of_try(answer: Mapping[str, str], upstream: Engine) -> dict[str, Any]:
    """Attributes of the span of a try at this engine that matched nothing. answer: the headers of the answer."""
    host, port = upstream.url.removeprefix("http://").split(":")
    return {
        "warmfleet.worker": answer["x-warmfleet-worker"],
        "warmfleet.prompt_tokens": int(answer["x-warmfleet-prompt-tokens"]),
        "warmfleet.matched_tokens": 0,
        "warmfleet.policy": "cost",
        "warmfleet.outcome": "finished",
        "http.response.status_code": 200,
        "server.address": host,
        "server.port": int(port),
    }


async def test_a_request_is_traced_from_its_client_to_its_engine(
    monkeypatch: pytest.MonkeyPatch, valkey_url: str, model: str
) -> None:
    async with traced(monkeypatch, valkey_url, model, answer_well) as (router, found, (upstream,)):
        body = {"model": model, "prompt": PROMPT, "stream": True}
        before_ns = time.time_ns()
        _, answer, _ = await router.post(body, **FROM_CLIENT)
        _, again, _ = await router.post(body)
        request, second = await found.requests(2)
        assert (request.trace_id, request.parent_id, request.state) == (TRACE, SPAN, FROM_CLIENT["tracestate"])
        assert (request.name, request.status, request.flags) == ("POST /v1/completions", 0, 0x301)
        assert before_ns - 5e6 < request.began_ns < request.ended_ns < time.time_ns() + 5e6
        (attempt,) = found.tries(request)
        state = FROM_CLIENT["tracestate"]
        assert (attempt.name, attempt.kind, attempt.trace_id, attempt.state) == ("try", CLIENT, TRACE, state)
        first, later = (seen.headers for seen in upstream.seen[-2:])
        assert first["traceparent"] == f"00-{TRACE}-{attempt.span_id}-01"
        assert first["tracestate"] == FROM_CLIENT["tracestate"]
        expected = OF_REQUEST | {"gen_ai.request.model": model}
        assert request.attributes | expected == request.attributes
        assert 0 < request.attributes["warmfleet.identify_seconds"] < request.attributes["warmfleet.first_byte_seconds"]
        expected = of_try(answer, upstream) | {"warmfleet.engine_request_id": first["x-request-id"]}
        assert attempt.attributes | expected == attempt.attributes
        assert attempt.attributes["warmfleet.why"]
        assert first["x-request-id"].startswith(attempt.attributes["warmfleet.reservation"])
        assert attempt.event_names == ["decided", "sent", "first_byte"]
        moments = (at for _, at, _ in attempt.events)
        times = [request.began_ns, attempt.began_ns, *moments, attempt.ended_ns, request.ended_ns]
        assert times == sorted(times)

        assert (second.parent_id, second.state, second.flags) == ("", "", 0x101)  # nobody began this trace before
        (hit,) = found.tries(second)
        assert hit.attributes["warmfleet.matched_tokens"] == int(again["x-warmfleet-matched-tokens"]) > 0
        assert later["traceparent"] == f"00-{second.trace_id}-{hit.span_id}-01"
        assert "tracestate" not in later
        assert request.resource["service.name"] == "warmfleet"
        assert len({span.span_id for span in found.spans}) == 4

        async def counted() -> bool:  # once the collector's answers are read
            return await router.metric('warmfleet_traces_total{result="exported"}') == 2

        await poll(counted, 10, "both are counted")


async def test_an_engine_learns_that_a_request_is_not_sampled(
    monkeypatch: pytest.MonkeyPatch, valkey_url: str, model: str
) -> None:
    async with traced(monkeypatch, valkey_url, model, answer_well, share="0") as (router, found, (upstream,)):
        body = {"model": model, "prompt": "hello"}
        await router.post(body, traceparent=f"00-{TRACE}-{SPAN}-00", tracestate="a=1")
        seen = upstream.seen[-1].headers
        assert seen["traceparent"].startswith(f"00-{TRACE}-")
        assert (seen["traceparent"][-3:], seen["tracestate"]) == ("-00", "a=1")
        await router.post(body, traceparent="00-ab", tracestate="a=1")
        seen = upstream.seen[-1].headers
        assert (len(seen["traceparent"]), seen["traceparent"][-3:]) == (55, "-00")
        assert "tracestate" not in seen  # which belongs to a traceparent
        await router.post(body, **FROM_CLIENT)  # the caller keeps this one
        (request,) = await found.requests()
        assert request.trace_id == TRACE


async def test_a_retry_is_a_second_try(monkeypatch: pytest.MonkeyPatch, valkey_url: str, model: str) -> None:
    asked: list[str] = []

    async def first_dies(upstream: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        asked.append(upstream.url)
        if len(asked) == 1:
            reset(writer)
        else:
            await answer_well(upstream, seen, writer)

    async with traced(monkeypatch, valkey_url, model, first_dies, first_dies) as (router, found, engines):
        status, answer, _ = await router.post({"model": model, "prompt": PROMPT}, **FROM_CLIENT)
        assert status == 200
        (request,) = await found.requests()
        dead, second = found.tries(request)
        assert (dead.status, dead.attributes["warmfleet.outcome"]) == (ERROR, "failed")
        assert dead.attributes["error.type"] == "upstream_gone"
        assert dead.message
        assert (second.status, second.attributes["warmfleet.worker"]) == (0, answer["x-warmfleet-worker"])
        assert (request.status, request.attributes["warmfleet.tries"]) == (0, 2)
        assert "error.type" not in request.attributes
        assert request.event_names == ["identified", "retry"]
        cause = {"warmfleet.worker": dead.attributes["warmfleet.worker"], "error.type": "upstream_gone"}
        assert request.events[1][2] == cause
        engines.sort(key=lambda upstream: asked.index(upstream.url))
        headers = [upstream.seen[-1].headers["traceparent"] for upstream in engines]
        assert headers == [f"00-{TRACE}-{attempt.span_id}-01" for attempt in (dead, second)]


async def test_a_request_that_waits_in_the_queue_says_how_long(
    monkeypatch: pytest.MonkeyPatch, valkey_url: str, model: str
) -> None:
    async with (
        simulated(valkey_url, model, speed="trace"),
        traced(monkeypatch, valkey_url, model, max_engine_wait_s=0.05) as (router, found, _),
    ):
        await router.routable(1)
        numbers = range(10, 310)  # a quarter of a second of the engine's time; it takes the second request meanwhile
        bodies = [{"prompt": [number + seed for number in numbers], "max_tokens": 1} for seed in range(4)]
        await asyncio.gather(*(router.post(body) for body in bodies))
        tries = [attempt for request in await found.requests(4) for attempt in found.tries(request)]
        waited = [attempt for attempt in tries if "queued" in attempt.event_names]
        assert waited
        for attempt in waited:
            assert attempt.event_names == ["queued", "decided", "sent", "first_byte"]
            assert 0 < attempt.attributes["warmfleet.queue_seconds"] <= attempt.attributes["warmfleet.decide_seconds"]
        others = [attempt for attempt in tries if attempt not in waited]
        assert not [attempt for attempt in others if "warmfleet.queue_seconds" in attempt.attributes]


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        ({"prompt": "hi"}, {"X-Warmfleet-Prefix-Len": "x"}, 400, "bad_request"),
        ({"prompt": "hi", "model": "no such"}, {}, 404, "model_not_found"),
    ],
)
async def test_a_refused_request_is_a_span_without_tries(
    monkeypatch: pytest.MonkeyPatch,
    valkey_url: str,
    model: str,
    body: dict[str, Any],
    headers: dict[str, str],
    status: int,
    code: str,
) -> None:
    async with traced(monkeypatch, valkey_url, model, answer_well) as (router, found, _):
        assert (await router.post({"model": model} | body, **headers))[0] == status
        (request,) = await found.requests()
        assert request.attributes["http.response.status_code"] == status
        assert (request.attributes["error.type"], request.attributes["warmfleet.tries"]) == (code, 0)
        assert request.status == 0  # the fault is the client's: of a server's span this is no error


async def test_engines_errors_and_hang_ups(monkeypatch: pytest.MonkeyPatch, valkey_url: str, model: str) -> None:
    async def by_prompt(upstream: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        word = seen.json["prompt"]
        if word == "refuse":
            reply(writer, b"{}", "400 Bad Request")
        elif word == "hang":
            await freezing(b"")(upstream, seen, writer)
        else:
            writer.write(STREAM_HEAD)
            chunk(writer, event(" one"))
            await writer.drain()
            reset(writer)

    async with traced(monkeypatch, valkey_url, model, by_prompt) as (router, found, (upstream,)):
        await router.post({"model": model, "prompt": "refuse"})
        (refused,) = await found.requests()
        (attempt,) = found.tries(refused)
        assert (refused.status, refused.attributes["http.response.status_code"]) == (0, 400)
        assert (attempt.status, attempt.attributes["error.type"]) == (ERROR, "400")
        await router.post({"model": model, "prompt": "break", "stream": True})
        broken = (await found.requests(2))[1]
        (attempt,) = found.tries(broken)
        assert (broken.status, broken.attributes["http.response.status_code"]) == (ERROR, 200)
        assert broken.attributes["error.type"] == attempt.attributes["error.type"]
        hangs = asyncio.create_task(router.post({"model": model, "prompt": "hang"}))
        await poll(lambda: len(upstream.seen) == 3, what="the engine has the request")
        hangs.cancel()
        gone = (await found.requests(3))[2]
        (attempt,) = found.tries(gone)
        assert (gone.status, gone.attributes["error.type"]) == (0, "client_hung_up")
        assert attempt.attributes["warmfleet.outcome"] == "cancelled"


async def test_without_redis_the_span_says_why(monkeypatch: pytest.MonkeyPatch, valkey_url: str, model: str) -> None:
    async with traced(monkeypatch, valkey_url, model, answer_well) as (router, found, _):
        monkeypatch.setattr(DegradedMode, "asks_redis", False)  # as for a second after two decisions that failed
        await router.post({"model": model, "prompt": "hello"})
        (request,) = await found.requests()
        (attempt,) = found.tries(request)
        assert attempt.attributes["warmfleet.fallback"] == "open"
        assert not {"warmfleet.policy", "warmfleet.why"} & attempt.attributes.keys()
        assert attempt.attributes["warmfleet.outcome"] == "finished"


async def test_off_by_default(replica_and_engine: tuple[Replica, Engine], model: str) -> None:
    router, upstream = replica_and_engine
    assert not [thread for thread in threading.enumerate() if thread.name == "tracing"]
    await router.post({"model": model, "prompt": "hi"}, **FROM_CLIENT)
    seen = upstream.seen[-1].headers
    assert {name: seen[name] for name in ("traceparent", "tracestate")} == {
        name: FROM_CLIENT[name] for name in ("traceparent", "tracestate")
    }


def test_a_wrong_variable_ends_the_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "https://collector")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(tmp_path / "none.pem"))
    with pytest.raises(BadArgument, match="OTEL_EXPORTER_OTLP_CERTIFICATE"):
        create_app(Settings(models=("m",)))


# ------------------------------------------------ the exporter by itself


def request_span(context: TraceContext = SAMPLED) -> RequestSpan:
    return RequestSpan(context, KNOWN["/v1/chat/completions"], "POST", "id-1", time.perf_counter())


def value(metrics: Metrics, result: str) -> float:
    return metrics.registry.get_sample_value("warmfleet_traces_total", {"result": result}) or 0.0


def failures(metrics: Metrics, count: int) -> bool:
    return value(metrics, "failed") == count


@asynccontextmanager
async def sending(
    found: Collector, metrics: Metrics, timing: Timing = Timing(**SOON), **options: Any
) -> AsyncIterator[Tracing]:
    made = Tracing(TracingOptions(found.url + "/v1/traces", **options), timing, metrics)
    made.open()
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)


async def test_a_collector_that_is_busy_gets_the_spans_later() -> None:
    async with collector() as found, sending(found, metrics := Metrics(), gzip=True, headers={"key": "k"}) as tracing:
        found.statuses = [503, 429]
        tracing.end(request_span())
        assert len(await found.requests()) == 1
        assert len(found.headers) == 3
        sent = found.headers[-1]
        values = (sent["content-type"], sent["content-encoding"], sent["key"])
        assert values == ("application/x-protobuf", "gzip", "k")
        await poll(lambda: value(metrics, "exported") == 1)
        assert value(metrics, "failed") == 0


async def test_what_a_collector_refuses_is_counted_and_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folding = Folding()
    monkeypatch.setattr(caplog.handler, "filters", [folding])
    async with collector() as found, sending(found, metrics := Metrics()) as tracing:
        found.statuses = [400, *[503] * 6]
        for count in (1, 2, 3):  # the first is refused for good, each other one three times
            tracing.end(request_span())
            await poll(partial(failures, metrics, count))
        assert len(found.headers) == 7
        tracing.end(request_span())
        await found.requests()
        warnings = [
            record.getMessage()
            for record in caplog.records
            if record.name == "warmfleet.tracing" and record.levelno == logging.WARNING
        ]
        assert [text.partition(" it answered ")[2] for text in warnings] == ["400 not now", "503 not now"]
        assert [record.getMessage().partition(", the last")[0] for record in folding.close()] == [
            "... 1 more like it in 1 s"
        ]


async def test_a_slow_collector_delays_nothing_and_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "MAX_WAITING", 5)
    async with collector() as found, sending(found, metrics := Metrics()) as tracing:
        found.open.clear()
        tracing.end(request_span())
        await poll(lambda: found.headers, what="the collector is asked")
        began = time.process_time()
        for _ in range(100):
            tracing.end(request_span())
        assert time.process_time() - began < 0.1
        assert value(metrics, "dropped") == 95
        found.open.set()
        assert len(await found.requests(6)) == 6


async def test_what_waits_at_the_end_is_sent() -> None:
    async with collector() as found:
        async with sending(found, Metrics(), Timing(traces_interval_s=60.0)) as tracing:
            tracing.end(request_span())
        assert len(found.spans) == 1


async def test_a_bug_in_a_span_ends_no_thread() -> None:
    async with collector() as found, sending(found, metrics := Metrics()) as tracing:
        tracing.end(request_span(TraceContext("no hex", "", sampled=True)))
        await poll(partial(failures, metrics, 1))
        tracing.end(request_span())
        assert len(await found.requests()) == 1
        await poll(lambda: value(metrics, "exported") == 1)


async def test_a_header_that_cannot_be_sent_is_told_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    for number, bad in enumerate(("secret\r\nx", "secret\u00e9"), 1):  # options from variables hold no such value
        async with collector() as found, sending(found, metrics := Metrics(), headers={"key": bad}) as tracing:
            tracing.end(request_span())
            await poll(partial(failures, metrics, 1))
            assert not found.headers
        assert caplog.text.count("traces are lost") == number
    assert "LocalProtocolError" in caplog.text
    assert "secret" not in caplog.text


def test_the_bytes_are_what_the_official_classes_read() -> None:
    span = request_span(TraceContext(TRACE, "", sampled=True, state=b"\xff=1"))
    span.event("retry", text="\u00e9" * 200, yes=True, no=False, number=-5, large=2**40, share=0.25, none=0)
    for _ in range(2 * MAX_EVENTS):
        span.event("more")
    lost = span.begin_try()  # a try that never ends
    assert isinstance(lost, TrySpan)
    span.end(200, complete=True)
    (request, attempt) = read(export_request({"service.name": "x" * 300}, "1", [request_spans(span)]))
    assert (request.kind, attempt.kind, attempt.span_id) == (SERVER, CLIENT, lost.span_id)
    assert attempt.ended_ns == request.ended_ns
    assert len(request.events) == MAX_EVENTS
    assert request.resource == {"service.name": "x" * 300}
    assert request.state == "\ufffd=1"
    name, at, attributes = request.events[0]
    assert (name, request.began_ns <= at <= request.ended_ns) == ("retry", True)
    assert attributes == {
        "text": "\u00e9" * 200, "yes": True, "no": False, "number": -5, "large": 2**40, "share": 0.25, "none": 0,
    }  # fmt: skip
    assert [type(value) for value in attributes.values()] == [str, bool, bool, int, int, float, int]


def test_every_attribute_is_documented() -> None:
    folder = Path(exporter.__file__).parent
    found = re.findall(r'"((?:warmfleet|http|url|server|gen_ai|error)\.[a-z_.]+)"', (folder / "spans.py").read_text())
    page = (folder.parents[1] / "docs/tracing.md").read_text()
    assert len(set(found)) > 25
    assert [name for name in sorted(set(found)) if f"| `{name}` |" not in page] == []
