"""A worker that fails requests which others serve is passed over until it is well, and no client notices."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from tests.support.engines.scripted import (
    STREAM_HEAD,
    Answer,
    Engine,
    Seen,
    answer_well,
    chunk,
    engine,
    event,
    reply,
    reset,
)
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica

from warmfleet.fleet import Flag, workers
from warmfleet.pools.outliers import Outliers
from warmfleet.pools.pool import Pool
from warmfleet.routing.recovery import retries

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BODY = {"prompt": "a prompt that is long enough to have blocks of its own " * 20}


def failing(way: str) -> Answer:
    async def answer(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        if way == "empty stream":
            writer.write(STREAM_HEAD)
            chunk(writer, b"")
        elif way == "error stream":
            writer.write(STREAM_HEAD)
            chunk(writer, b'data: {"error": {"message": "EngineCore encountered an issue.", "code": 500}}\n\n')
            chunk(writer, b"data: [DONE]\n\n")
            chunk(writer, b"")
        elif way == "empty":
            reply(writer, b"")
        elif way == "no JSON":
            reply(writer, b"<html>It works!</html>")
        elif way == "garbage":
            writer.write(b"\x00\xff what is this\r\n\r\n")
            writer.close()
        else:
            reply(writer, b'{"error": {"message": "trouble"}}', f"{way} Trouble")

    return answer


@asynccontextmanager
async def fleet_of(valkey_url: str, model: str, *answers: Answer) -> AsyncIterator[tuple[Replica, list[Engine]]]:
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine(model, answer)) for answer in answers]
        urls = [upstream.url for upstream in engines]
        router = await stack.enter_async_context(replica(valkey_url, model, *urls, policy="round_robin"))
        yield router, engines
        await router.unloaded()


async def flags_of(router: Replica, one: Engine) -> int:
    return next(worker.load.flags for worker in await router.fleet.workers.read() if worker.url == one.url)


async def ejected(router: Replica, one: Engine) -> bool:
    return bool(await flags_of(router, one) & Flag.EJECTED)


@pytest.mark.parametrize(
    "way", ["500", "502", "503", "504", "429", "empty", "empty stream", "error stream", "no JSON", "garbage"]
)
async def test_a_worker_that_fails_what_others_serve_is_ejected(
    valkey_url: str, model: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pool, "avoid", lambda *_: None)  # or the worker gets one request in three seconds
    body = {"model": model, "stream": way.endswith("stream"), **BODY}
    async with fleet_of(valkey_url, model, failing(way), answer_well, answer_well) as (router, engines):
        for _ in range(14):
            status, _, _ = await router.post(body)
            assert status == 200
        await poll(lambda: ejected(router, engines[0]), 30, "all replicas pass it over")
        before = len(engines[0].seen)
        for _ in range(9):
            assert (await router.post(body))[0] == 200
        assert len(engines[0].seen) == before
        assert await router.metric('warmfleet_ejections_total{result="ejected"}') == 1


async def test_a_request_that_every_worker_fails_ejects_nobody(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    blamed: list[object] = []
    monkeypatch.setattr(Outliers, "failed", lambda _self, decision: blamed.append(decision))
    async with fleet_of(valkey_url, model, *[failing("500")] * 3) as (router, engines):
        for _ in range(8):
            status, _, answer = await router.post({"model": model, **BODY})
            assert (status, json.loads(answer)["error"]["message"]) == (500, "trouble"), "the client gets the answer"
        assert sum(len(upstream.seen) for upstream in engines) == 16, "each was tried at two workers"
        assert not blamed


async def test_clients_mistakes_eject_nobody(valkey_url: str, model: str) -> None:
    async with fleet_of(valkey_url, model, failing("400"), answer_well, answer_well) as (router, engines):
        found = [(await router.post({"model": model, **BODY}))[0] for _ in range(15)]
        assert found.count(400) == 5
        assert await router.metric('warmfleet_retries_total{where="another"}') == 0
        assert not await ejected(router, engines[0])


async def test_an_error_in_a_stream_that_is_the_clients_reaches_the_client(valkey_url: str, model: str) -> None:
    async def refuses(_: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        chunk(writer, b'data: {"error": {"message": "no", "code": 400}}\n\n')
        chunk(writer, b"")

    async with fleet_of(valkey_url, model, refuses, refuses) as (router, engines):
        _, _, said = await router.post({"model": model, "stream": True, **BODY})
        assert said == b'data: {"error": {"message": "no", "code": 400}}\n\n'
        assert sum(len(upstream.seen) for upstream in engines) == 1


async def test_one_that_recovers_comes_back_by_one_request(
    valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "EJECTED_S", (0.2, 300.0))
    async with fleet_of(valkey_url, model, failing("500"), answer_well, answer_well) as (router, engines):

        async def on_trial() -> bool:
            return bool(await flags_of(router, engines[0]) & Flag.TRIAL)

        async def fail_again() -> bool:
            assert (await router.post({"model": model, **BODY}))[0] == 200
            return await router.metric('warmfleet_ejections_total{result="ejected"}') == 2

        async def readmitted() -> bool:
            assert (await router.post({"model": model, **BODY}))[0] == 200
            return await router.metric('warmfleet_ejections_total{result="readmitted"}') == 1

        await poll(fail_again, 20, "its trial is one request, which fails: no client notices")
        engines[0].answer = answer_well
        await poll(on_trial, 10, "its time is over")
        await poll(readmitted, 10, "one request that it serves ends the trial")
        assert not await flags_of(router, engines[0]) & (Flag.EJECTED | Flag.TRIAL)


async def test_a_worker_that_cuts_its_streams_is_ejected(valkey_url: str, model: str) -> None:
    async def cuts(_: Engine, _seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        chunk(writer, event(" one"))
        await writer.drain()
        await asyncio.sleep(0.02)
        reset(writer)

    async with fleet_of(valkey_url, model, cuts, answer_well, answer_well) as (router, engines):

        async def noticed() -> bool:
            await router.post({"model": model, "stream": True, **BODY})
            return await ejected(router, engines[0])

        await poll(noticed, 10, "after three of its streams")


async def test_further_tries_have_a_budget(valkey_url: str, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "BUDGET_MOST", 3.0)
    async with fleet_of(valkey_url, model, *[failing("503")] * 4) as (router, engines):
        for _ in range(20):
            status, _, answer = await router.post({"model": model, **BODY})
            assert (status, json.loads(answer)["error"]["message"]) == (503, "trouble")
        assert sum(len(upstream.seen) for upstream in engines) <= 20 + 3 + 0.2 * 20 + 1
