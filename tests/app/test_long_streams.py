"""Streams that last ten lease times stay booked until they end, and their load is given back once. By default a lease
time passes as soon as all reservations are renewed. The long run takes five minutes of real time:
``python -m pytest -m long tests/app/test_long_streams.py``.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from typing import Any, cast

import aiohttp
import pytest
from tests.support.engines.scripted import STREAM_HEAD, Engine, Seen, chunk, engine, event
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica

from warmfleet.fleet import Lease, Spans, Stage

STREAMS = 12  # a third ends with its client, a third with the engine's connection
PROMPT = "a prompt with blocks of its own " * 20
LEASE_MS = Spans().lease_ms
LEASES = 10.2  # duration of the streams in lease times


class Watch:
    """A log of the booked load, summed over the workers: each different state, in order."""

    def __init__(self, router: Replica) -> None:
        self._router, self.seen = router, [(0, 0, 0)]

    async def look(self) -> None:
        rows = [worker.load for worker in await self._router.fleet.workers.read()]
        prefill, decode = sum(row.prefill_tokens for row in rows), sum(row.decode_tokens for row in rows)
        now = (prefill, decode, sum(row.in_flight for row in rows))
        self.seen += [now] if now != self.seen[-1] else []

    async def run(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(0.005)  # short, so that a state that lasts only a moment is seen

    async def all_begun(self) -> bool:
        prefill, _, in_flight = self.seen[-1]
        return (prefill, in_flight) == (0, STREAMS)


def lasting(until: asyncio.Event) -> Any:
    """An answer that goes on until ``until`` is set, and ends as the prompt says."""

    async def answer(_: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        number = 0
        while number < 3 or not until.is_set():
            chunk(writer, event(f" {(number := number + 1)}"))
            await writer.drain()
            with suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), 1)
        if "cut" in seen.json["prompt"]:
            writer.transport.abort()
            return
        chunk(writer, b"data: [DONE]\n\n")
        chunk(writer, b"")

    return answer


async def ask(router: Replica, model: str, prompt: str) -> aiohttp.ClientResponse:
    body = {"model": model, "prompt": prompt, "stream": True}
    return await router.client.post(f"{router.url}/v1/completions", json=body, timeout=aiohttp.ClientTimeout())


async def read(answer: aiohttp.ClientResponse, way: str) -> None:
    """Read the answer to its end, unless the client is one that hangs up before."""
    if way == "left":
        answer.close()
        return
    assert (b"[DONE]" in await answer.content.read()) == (way == "whole"), way


async def renewals(routers: list[Replica], result: str = "renewed") -> list[float]:
    return [await router.metric(f'warmfleet_renewed_reservations_total{{result="{result}"}}') for router in routers]


async def pass_by(routers: list[Replica]) -> None:
    """Let nine tenths of a lease's time pass for all leases whenever every replica has renewed its own."""
    fleet, passed = routers[0].fleet, 0.0
    while passed < LEASES:
        before = await renewals(routers)
        for name, expiry in cast("Any", await fleet.redis.zrange(fleet.keys.leases, 0, -1, withscores=True)):
            await fleet.redis.zadd(fleet.keys.leases, {name: expiry - 0.9 * LEASE_MS}, xx=True)
        passed += 0.9

        async def renewed(before: list[float] = before) -> bool:
            pairs = zip(await renewals(routers), before, strict=True)
            return all(now >= then + STREAMS for now, then in pairs)  # more than a round in progress

        await poll(renewed, 10, "they are renewed")


async def wait(_: list[Replica]) -> None:
    await asyncio.sleep(LEASES * LEASE_MS / 1000)


LONG = pytest.mark.long(
    minutes=6,
    shows="streams of ten lease times stay booked in real time, and their load is given back once",
)


@pytest.mark.parametrize(
    ("passing", "interval_s"),
    [
        pytest.param(pass_by, 0.02, id="passing by"),
        pytest.param(wait, 10.0, id="real time", marks=[LONG, pytest.mark.timeout(900)]),
    ],
)
async def test_a_stream_is_booked_as_long_as_it_runs(
    valkey_url: str, model: str, passing: Any, interval_s: float
) -> None:
    over = asyncio.Event()
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine(model, lasting(over))) for _ in range(2)]
        urls = [upstream.url for upstream in engines]
        routers = [
            await stack.enter_async_context(replica(valkey_url, model, *urls, renew_interval_s=interval_s))
            for _ in range(2)
        ]
        ways = [("whole", "left", "cut")[number % 3] for number in range(STREAMS)]
        prompts = [f"{way} {number} {PROMPT}" for number, way in enumerate(ways)]
        watch = Watch(routers[0])
        watching = asyncio.create_task(watch.run())
        answers = await asyncio.gather(*(ask(routers[n % 2], model, prompt) for n, prompt in enumerate(prompts)))
        await poll(watch.all_begun, 10, "all are booked and have begun")
        full = watch.seen[-1]
        await passing(routers)
        assert watch.seen[-1] is full, "nothing moves while they run"
        over.set()
        await asyncio.gather(*(read(answer, way) for answer, way in zip(answers, ways, strict=True)))
        for router in routers:
            await router.unloaded()
        watching.cancel()
        await watch.look()
        flights = [in_flight for _, _, in_flight in watch.seen[watch.seen.index(full) :]]
        assert flights == sorted(flights, reverse=True), "each is given back once"
        assert watch.seen[-1] == (0, 0, 0)
        assert sum(await renewals(routers)) >= 10 * STREAMS
        for result in ("rebuilt", "refused"):
            assert await renewals(routers, result) == [0, 0], "no lease was gone when it was renewed"
        await poll(lambda: _gone(routers[0]), 5, "what lingered has gone")


async def _gone(router: Replica) -> bool:
    """Whether all leases are gone, except tombstones of requests that ended during their renewal."""
    left = await cast("Any", router.fleet.redis.hgetall(router.fleet.keys.lease))
    return all(Lease.unpack(lease).stage == Stage.TOMBSTONE for lease in left.values())
