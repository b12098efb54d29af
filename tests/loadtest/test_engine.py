"""Engines as processes and as members of a fleet, on a real store."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, cast

import httpx
import pytest
from tests.support.engines.simulated import config, demo_identity, running
from tests.support.polling import poll

from warmfleet.fleet import Fleet
from warmfleet.fleet.client import connect
from warmfleet_loadtest.engine import Engine, main
from warmfleet_loadtest.replay import Target, replay
from warmfleet_loadtest.simulator.api import Served
from warmfleet_loadtest.simulator.fleet_membership import Membership
from warmfleet_loadtest.simulator.step_costs import StepCosts
from warmfleet_loadtest.traces.trace import generate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warmfleet.fleet.workers import WorkerView


@pytest.fixture
def command(valkey_url: str, model: str) -> list[str]:
    argv = [sys.executable, "-m", "warmfleet_loadtest.engine", "--port", "0", "--model", "demo"]
    return [*argv, "--redis", valkey_url, "--fleet", model, "--worker-id", "e", "--step-time", "fast"]


@pytest.fixture
def process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [*command, "--count", "2"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as started:
        yield started
        started.kill()


async def the_worker(fleet: Fleet) -> WorkerView | None:
    await fleet.upkeep.step()
    found = await fleet.workers.read()
    return found[0] if found and found[0].server is not None else None


async def test_the_fleets_index_equals_the_engines_table(valkey_url: str, model: str) -> None:
    """Evictions, duplicates and a reset keep them equal. The load is reported, both foreign and ours."""
    engine = Engine(config(StepCosts(0.0005, 1e-6), blocks=80), demo_identity(), Served(("demo",)))
    store = connect(valkey_url, timeout_s=5)
    fleet = Fleet(store, model)
    pool = engine.core.scheduler.pool
    async with running(ready=engine) as up:
        engine.join(Membership(valkey_url, model, ("demo",), "s1", up.url), demo_identity().artifacts())
        worker = await poll(lambda: the_worker(fleet), 20)
        arrivals = [arrival for arrival in generate(150, 7).arrivals if len(arrival.prompt) < 900]
        trace = generate(1)
        await replay(type(trace)("t", tuple(arrivals)), Target((up.url,), "demo", speed=20.0))
        assert pool.evicted > 200

        async def equal() -> bool:
            await fleet.upkeep.step()
            held = await store.smembers(f"{fleet.keys.prefix}s:{worker.load.slot}")  # type: ignore[attr-defined]
            return held == set(pool.held())

        await poll(equal, 10, "the index never equalled the table")
        assert len(pool.held()) > 10
        async with httpx.AsyncClient() as http:
            assert (await http.post(f"{up.url}/sim/reset")).status_code == 200
        old = worker.load.slot  # type: ignore[attr-defined]
        worker = await poll(lambda: _moved(fleet, old), 10, "a reset retires the slot")
        await poll(equal, 10)
    assert len(pool.held()) == 0
    await store.aclose()


async def _moved(fleet: Fleet, old: int) -> WorkerView | None:
    worker = await the_worker(fleet)
    return worker if worker is not None and worker.load.slot != old else None


async def test_prefills_of_reservations_are_reported(valkey_url: str, model: str) -> None:
    engine = Engine(config(), demo_identity(), Served(("demo",)))
    reports: list[tuple[str, int, int]] = []
    reservation = "wf-" + "a" * 22
    async with running(ready=engine) as up, httpx.AsyncClient(base_url=up.url) as http:
        engine.join(Membership(valkey_url, model, ("demo",), "s1", up.url), {})
        assert engine.halves is not None
        engine.halves.worker.progress = lambda *report: reports.append(report)  # type: ignore[method-assign]
        body = {"prompt": list(range(40)), "max_tokens": 2, "n": 2}
        for request_id in (f"{reservation}.x", "somebody-else", f"{reservation}.y"):
            await http.post("/v1/completions", json=body, headers={"X-Request-Id": request_id})
    assert reports == [(reservation, 0, 40), (reservation, 32, 40)]


async def test_ends_of_requests_are_reported(valkey_url: str, model: str) -> None:
    engine = Engine(config(StepCosts(0.02, 0.0)), demo_identity(), Served(("demo",)))
    reports: list[tuple[str, int, object]] = []
    ids = {"X-Request-Id": "wf-" + "a" * 22 + ".x"}
    async with running(ready=engine) as up, httpx.AsyncClient(base_url=up.url) as http:
        engine.join(Membership(valkey_url, model, ("demo",), "s1", up.url), {})
        assert engine.halves is not None
        assert engine.halves.worker.reservations is not None
        engine.halves.worker.reservations.end = reports.extend
        body = {"prompt": list(range(40)), "max_tokens": 3, "ignore_eos": True, "stream": True}
        await http.post("/v1/completions", json=body, headers=ids)
        assert [(tokens, reason) for _, tokens, reason in reports] == [(3, "length")]
        async with http.stream("POST", "/v1/completions", json=body | {"max_tokens": 500}, headers=ids) as answer:
            await anext(answer.aiter_bytes())
            assert engine.core.requests() == [reports[0][0]]

        async def aborted() -> bool:
            return len(reports) == 2

        await poll(aborted)
    assert reports[1][2] == "abort"
    assert 0 < reports[1][1] < 500
    assert engine.core.requests() == []


async def test_foreign_load_is_what_no_router_sent() -> None:
    engine = Engine(config(StepCosts(0.05, 0.0)), demo_identity(), Served(("demo",)))
    async with running(ready=engine) as up, httpx.AsyncClient(base_url=up.url) as http:
        body = {"prompt": list(range(40)), "max_tokens": 500, "ignore_eos": True, "stream": True}
        ours = {"X-Request-Id": "wf-" + "a" * 22 + ".x"}
        async with (
            http.stream("POST", "/v1/completions", json=body) as foreign,
            http.stream("POST", "/v1/completions", json=body, headers=ours) as own,
        ):
            chunks = [answer.aiter_bytes() for answer in (foreign, own)]  # ending an iterator closes its connection
            for stream in chunks:
                await anext(stream)
            load = engine.core.load()
            engine.core.moved()
            both = engine.core.load().foreign_decode_tokens
    assert both > 1.5 * load.foreign_decode_tokens, "the fleet's own are foreign in the pool that it moves to"
    assert (load.running, load.waiting, load.foreign_prefill_tokens) == (2, 0, 0)
    assert 40 < load.foreign_decode_tokens < 60


async def test_a_process_of_two_joins_serves_and_leaves(
    process: subprocess.Popen[str], valkey_url: str, model: str
) -> None:
    assert process.stdout is not None
    lines = [await asyncio.to_thread(process.stdout.readline) for _ in range(2)]
    urls = [found[0] for line in lines if (found := re.search(r"http://\S+", line))]
    assert len(urls) == 2, lines
    store = connect(valkey_url, timeout_s=5)
    fleet = Fleet(store, model)

    async def both() -> bool:
        await fleet.upkeep.step()
        return {view.url for view in await fleet.workers.read() if view.server is not None} == set(urls)

    await poll(both, 30)
    async with httpx.AsyncClient() as http:
        for url in urls:
            assert (await http.post(f"{url}/v1/completions", json={"prompt": "a"})).status_code == 200
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, 10) == 0
    for server_id in ("e-0", "e-1"):
        streams = (fleet.keys.server(server_id), fleet.keys.events(f"{server_id}.0"))
        for stream in streams:
            ((_id, fields),) = cast("list[tuple[bytes, dict[bytes, bytes]]]", await store.xrevrange(stream, count=1))
            assert fields[b"o"] == b"leave"
    await store.aclose()


@pytest.mark.parametrize("wrong", [["--step-time", "nonsense"], ["--blocks", "1"], ["--tokenizer", "/nowhere"]])
def test_what_cannot_start_says_why(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--port", "0", *wrong]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "curl" in capsys.readouterr().out


async def test_eight_engines_are_cheap() -> None:
    """20 requests a second over eight engines need well under one core, with the client."""
    settings = config(StepCosts(0.002, 7.95e-4, decode_request_s=1e-4), blocks=1_953)
    engines = [Engine(settings, demo_identity(), Served(("demo",))) for _ in range(8)]
    for engine in engines:
        await engine.start("127.0.0.1", 0)
    urls = tuple(f"http://127.0.0.1:{engine.port}" for engine in engines)
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    replies, _client = await replay(generate(60, 1), Target(urls, "demo", speed=20 / 3))
    after, wall = resource.getrusage(resource.RUSAGE_SELF), time.monotonic() - began
    for engine in engines:
        await engine.stop()
    assert all(reply.error is None for reply in replies)
    assert (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / wall < 0.8
