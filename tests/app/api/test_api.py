"""The paths that a replica answers itself, errors as OpenAI's clients expect them, limits for slow and large bodies."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from tests.app.api import test_http_connection
from tests.support.engines.scripted import STREAM_HEAD, Engine, Seen, chunk, engine, event, reply
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LARGE = b'{"choices":"' + b"y" * 1_100_000 + b'"}'
BODY = {"prompt": "hello " * 100}


def error_of(body: bytes) -> Any:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_errors_name_the_field(replica_and_engine: tuple[Replica, Engine], model: str) -> None:
    router, upstream = replica_and_engine
    status, headers, body = await router.post({"model": "no/such"})
    assert (status, error_of(body)["param"]) == (400, "prompt")
    assert headers["x-request-id"]
    status, _, body = await router.post(BODY | {"model": "no/such"})
    assert (status, error_of(body)["code"], error_of(body)["param"]) == (404, "model_not_found", "model")
    status, _, body = await router.post(b'{"prompt": ', "/v1/chat/completions")
    assert (status, error_of(body)["type"]) == (400, "invalid_request_error")
    async with router.client.get(router.url + "/v1/completions") as answer:
        assert (answer.status, error_of(await answer.read())["code"]) == (405, "method_not_allowed")
        assert answer.headers["allow"] == "POST"
    async with router.client.get(router.url + "/explain") as answer:
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
    status, body = await router.get("/nothing")
    assert (status, error_of(body)["code"]) == (404, "not_found")
    assert not upstream.seen
    assert await router.load() == 0


async def test_no_worker_is_a_503_with_a_reason(valkey_url: str, model: str) -> None:
    async with replica(valkey_url, model) as router:

        async def told() -> bool:
            return b"no worker is routable yet" in (await router.get("/readyz"))[1]

        await poll(told)
        status, headers, body = await router.post(BODY | {"model": model})
        assert (status, error_of(body)["code"], headers["retry-after"]) == (503, "no_worker", "1")


async def test_the_paths_that_a_replica_answers_itself(replica_and_engine: tuple[Replica, Engine], model: str) -> None:
    router, upstream = replica_and_engine
    status, body = await router.get("/v1/models")
    assert (status, [entry["id"] for entry in json.loads(body)["data"]]) == (200, [model])
    assert (await router.get("/livez"))[0] == 200
    assert (await router.get("/readyz"))[0] == 200
    assert (await router.get("/favicon.ico"))[0] == 204
    status, page = await router.get("/metrics")
    assert status == 200
    assert b"warmfleet_requests_created" not in page
    _, body = await router.get("/workers")
    (shown,) = json.loads(body)["models"]
    assert (shown["model"], shown["fresh"], shown["identity"]) == (model, True, "text")
    assert (shown["workers"][0]["url"], shown["workers"][0]["routable"]) == (upstream.url, True)


async def test_waits_of_streams_are_counted_by_model(replica_and_engine: tuple[Replica, Engine], model: str) -> None:
    router, _ = replica_and_engine
    for stream in (True, True, False):
        assert (await router.post(BODY | {"model": model, "stream": stream}))[0] == 200
    (shown,) = json.loads((await router.get("/workers"))[1])["models"]
    told = shown["ttft"]
    assert told["requests"] == 2, "the first byte of a plain answer is its last"
    assert 0 < told["p50_s"] <= told["p90_s"] <= told["p99_s"] < 5
    assert (told["objective_s"], told["in_force_s"]) == (0, 0)
    for answer, count in ("stream", 2), ("plain", 1):
        name = f'warmfleet_first_byte_seconds_count{{answer="{answer}",model="{model}"}}'
        assert await router.metric(name) == count, answer
    assert 0 < await router.metric(f'warmfleet_ttft_seconds{{model="{model}",percentile="90"}}') < 5
    assert await router.metric(f'warmfleet_ttft_objective_seconds{{model="{model}"}}') == 0


async def test_explain_books_nothing(replica_and_engine: tuple[Replica, Engine], model: str) -> None:
    router, upstream = replica_and_engine
    await router.post(BODY | {"model": model})
    await router.unloaded()
    status, _, body = await router.post(BODY | {"model": model, "endpoint": "/v1/completions"}, "/explain")
    shown = json.loads(body)
    assert (status, shown["identity"], shown["policy"]) == (200, "text", "cost")
    (row,) = shown["candidates"]
    assert row["chosen"]
    assert shown["chosen"] == row["worker_id"]
    assert row["matched_tokens"] == 16 * row["matched_blocks"] > 0
    assert sum(row["terms"].values()) == pytest.approx(row["cost_s"], abs=1e-5)
    assert shown["moved"] == ""
    assert len(upstream.seen) == 1
    assert await router.load() == 0
    said = {
        "model": model,
        "endpoint": "/v1/messages",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "hi"}],
    }
    status, _, body = await router.post(said, "/explain")
    assert (status, json.loads(body)["identity"]) == (200, "text")
    status, _, body = await router.post(BODY | {"endpoint": "/v1/embeddings"}, "/explain")
    assert (status, error_of(body)["param"]) == (400, "endpoint")
    status, _, body = await router.post(BODY | {"model": model, "tenant": 5}, "/explain")
    assert (status, error_of(body)["param"], error_of(body)["code"]) == (400, "tenant", "bad_request")
    status, _, body = await router.post(b"[]", "/explain")
    assert status == 400


async def test_request_ids_are_cleaned(replica_and_engine: tuple[Replica, Engine], model: str) -> None:
    router, upstream = replica_and_engine
    given = 'a ~b\u00e9"' + "x" * 200
    _, headers, _ = await router.post(BODY | {"model": model}, **{"X-Request-Id": given})
    assert headers["x-request-id"] == ("ab" + "x" * 200)[:128]
    assert upstream.seen[-1].headers["x-request-id"].endswith("." + headers["x-request-id"])
    _, headers, _ = await router.post(BODY | {"model": model})
    assert len(headers["x-request-id"]) == 24


@pytest.mark.parametrize(("key", "expected"), [("", "Bearer client"), ("ours", "Bearer ours")])
async def test_authorization(valkey_url: str, model: str, key: str, expected: str) -> None:
    async with engine(model) as upstream, replica(valkey_url, model, upstream.url, worker_api_key=key) as router:
        headers = {
            "Authorization": "Bearer client",
            "Cookie": "no",
            "X-data-parallel-rank": "3",
            "traceparent": "00-ab",
        }
        await router.post(BODY | {"model": model}, **headers)
        seen = upstream.seen[-1].headers
        assert (seen["authorization"], seen["traceparent"]) == (expected, "00-ab")
        assert not {"cookie", "x-data-parallel-rank"} & set(seen)


@pytest.mark.parametrize("path", ["/v1/completions", "/explain"])
async def test_a_body_has_a_limit_and_a_deadline(valkey_url: str, model: str, path: str) -> None:
    async with replica(valkey_url, model, body_max_bytes=1_000, body_timeout_s=0.2) as router:
        status, headers, body = await router.post(b"x" * 1_001, path)
        assert (status, error_of(body)["code"]) == (413, "body_too_large")
        assert headers["connection"] == "close"  # the replica does not read the remaining bytes

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(20):
                yield b"x" * 100

        async with router.client.post(router.url + path, data=pieces()) as answer:
            assert answer.status == 413
        reader, writer = await connection(router)
        writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{{".encode())
        assert (await asyncio.wait_for(reader.readline(), 30)).split()[1] == b"400"
        writer.close()


async def test_a_client_that_hangs_up_on_explain_is_no_failure(
    valkey_url: str, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with replica(valkey_url, model) as router:
        _, writer = await connection(router)
        writer.write(b"POST /explain HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.transport.abort()
        await asyncio.sleep(0.1)
        assert (await router.get("/livez"))[0] == 200
    assert not [record for record in caplog.records if record.exc_info]


async def test_slow_headers_do_not_starve_the_rest(valkey_url: str, model: str) -> None:
    async with (
        engine(model) as upstream,
        replica(valkey_url, model, upstream.url, header_timeout_s=1.0, max_connections=300) as router,
    ):
        slow = [await connection(router) for _ in range(60)]
        for _, writer in slow:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-slow: ")
        assert (await router.post(BODY | {"model": model}))[0] == 200
        ends = await asyncio.gather(*(asyncio.wait_for(reader.read(), 30) for reader, _ in slow))
        assert ends == [b""] * 60
        reader, writer = await connection(router)  # the client sends no bytes
        assert await asyncio.wait_for(reader.read(), 30) == b""
        for _, other in [*slow, (reader, writer)]:
            other.close()


async def test_headers_and_connections_have_a_limit(valkey_url: str, model: str) -> None:
    async with replica(valkey_url, model, max_connections=3) as router:
        reader, writer = await connection(router)
        writer.write(b"GET /livez HTTP/1.1\r\nx: " + b"a" * 100_000)
        answered = await read_to_end(reader)
        assert answered.startswith(b"HTTP/1.1 431 ")
        assert error_of(answered.partition(b"\r\n\r\n")[2])["code"] == "headers_too_large"
        writer.close()
        await poll(lambda: not router.connections, what="it is gone")
        held = [await connection(router) for _ in range(4)]
        for _, other in held[1:]:
            other.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        for answer, _ in held[1:]:
            assert (await answer.readline()).split()[1] == b"200"
        assert await read_to_end(held[0][0]) == b"", "the one that waited longest gave way"
        for _, other in held:
            other.close()


async def test_a_client_in_the_middle_of_keep_alive_is_not_cut(replica_and_engine: tuple[Replica, Engine]) -> None:
    router, _ = replica_and_engine
    reader, writer = await connection(router)
    for _ in range(3):
        writer.write(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length"))
        await reader.readexactly(length)
    writer.close()


async def test_pieces_come_as_they_are_sent(valkey_url: str, model: str) -> None:
    """Chunks 5 ms apart arrive one by one, as directly from the engine. The best of three tries counts.

    Chunks that Nagle's algorithm and delayed ACKs gather would arrive 40 ms apart.
    """

    async def paced(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        for number in range(60):
            chunk(writer, event(str(number)))
            await writer.drain()
            await asyncio.sleep(0.005)
        chunk(writer, b"")

    async with engine(model, paced) as upstream, replica(valkey_url, model, upstream.url) as router:
        body = json.dumps(BODY | {"model": model, "stream": True}).encode()
        shares, delays = [], []
        for _ in range(3):
            routed, direct = await asyncio.gather(gaps(router.url, body), gaps(upstream.url, body))
            shares.append(routed[0] / direct[0])
            delays.append(routed[1] - direct[1])
        assert max(shares) >= 0.9
        assert min(delays) < 0.02


async def gaps(url: str, body: bytes) -> tuple[int, float]:
    """The number of reads with data, and the 95th percentile of the seconds between two reads."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    times, data = [], b""
    while not data.endswith(b"0\r\n\r\n"):
        data += (piece := await reader.read(65_536))
        assert piece
        times.append(time.perf_counter())
    writer.close()
    between = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    return len(times), between[int(len(between) * 0.95)]


async def test_ready_only_after_contact_and_not_while_draining(model: str) -> None:
    async with replica("unix:///nowhere/at/all", model) as router:
        status, body = await router.get("/readyz")
        assert (status, json.loads(body)["status"]) == (503, "no contact with Redis yet")
        assert (await router.get("/livez"))[0] == 200


async def test_a_large_plain_answer_is_streamed(valkey_url: str, model: str) -> None:
    async def large(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        reply(writer, LARGE)

    async with (
        engine(model, large) as upstream,
        replica(valkey_url, model, upstream.url) as router,
    ):
        status, _, body = await router.post(BODY | {"model": model})
        assert (status, body) == (200, LARGE)
        await router.unloaded()


async def connection(router: Replica) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = router.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def read_to_end(reader: asyncio.StreamReader) -> bytes:
    try:
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionResetError:
        return b""


#: Bodies that hide a second request from a parser that sees the end of the first request elsewhere.
HIDDEN = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b"


async def test_nothing_is_smuggled_to_an_engine(replica_and_engine: tuple[Replica, Engine], model: str) -> None:
    """Each bad request is followed by a good request to the engine on the same connection: the engine gets neither."""
    router, upstream = replica_and_engine
    body = json.dumps({"model": model, "prompt": "smuggled"}).encode()
    for name, request in test_http_connection.REFUSED.items():
        reader, writer = await connection(router)
        raw = request.removesuffix(test_http_connection.GET).replace(b" /p ", b" /v1/completions ")
        writer.write(raw + HIDDEN % (len(body), body))
        answered = await read_to_end(reader)
        assert answered.startswith(b"HTTP/1.1 400 "), name
        assert answered.count(b"HTTP/1.1 ") == 1, name
        writer.close()
    assert (await router.post(BODY | {"model": model}))[0] == 200
    assert [seen.json["prompt"] for seen in upstream.seen] == [BODY["prompt"]]


async def test_any_byte_of_a_header_reaches_the_engine_as_it_is(
    replica_and_engine: tuple[Replica, Engine], model: str
) -> None:
    router, upstream = replica_and_engine
    reader, writer = await connection(router)
    body = json.dumps(BODY | {"model": model}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += b"content-type: application/json; a=\xff\xe9\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
    assert (await read_to_end(reader)).startswith(b"HTTP/1.1 200 ")
    assert upstream.seen[0].headers["content-type"] == "application/json; a=\xff\xe9"
    writer.close()


async def test_a_client_that_never_reads_gives_its_booking_back(valkey_url: str, model: str) -> None:
    async def endless(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        while not writer.is_closing():
            chunk(writer, event("x" * 10_000))
            await writer.drain()

    async with (
        engine(model, endless) as upstream,
        replica(valkey_url, model, upstream.url, write_timeout_s=0.3) as router,
    ):
        _, writer = await connection(router)
        body = json.dumps(BODY | {"model": model, "stream": True}).encode()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await poll(router.load, what="its load is booked")
        await router.unloaded()
        await poll(lambda: upstream.connections["hung_up"], what="the engine is told")
        assert await router.metric('warmfleet_closed_connections_total{reason="slow_reader"}') == 1
        writer.close()
