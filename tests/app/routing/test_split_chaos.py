"""Split requests while engines hang, die and leave, links are slow, Redis is away, replicas are killed or stand still
until leases have ended, and clients hang up: no answer is wrong."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import aiohttp
import pytest
from tests.app.routing.test_split_requests import PATHS, TEXT, streamed_text, text_of
from tests.drills.toxic import Toxic
from tests.support.engines.simulated import identity
from tests.support.engines.transferring import CONSUMER, PRODUCER, transferring
from tests.support.fleet.split_requests import SplitFleet, split_fleet
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.replicas import Replica

from warmfleet.cli.local.ports import free_port
from warmfleet.errors import WarmfleetError
from warmfleet.routing import prefill_booking, prefills
from warmfleet_loadtest.simulator.step_costs import load_costs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.engines.transferring import Transferring

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.long(
        minutes=4,
        shows=(
            "with NIXL and with Mooncake, 400 requests by two replicas over three prefill and three decode engines "
            "that hang, die and have slow links, while Redis is away, a replica is killed or stands still until leases "
            "have ended, and clients hang up: every answer is right, and no engine sees parameters used twice, late "
            "or for another prompt"
        ),
    ),
]
REQUESTS, AT_ONCE, PROMPTS = 400, 8, 400
LEASE_S = 20  # the least that engines may have
SECOND_SHARE = 0.4  # of requests that go to the replica that is killed


class Second:
    """A replica in a process of its own. ready: requests may go there, for engines are known to it."""

    def __init__(self, redis_url: str, model: str) -> None:
        self.replica = Replica(redis_url, WARMFLEET_MODELS=model, WARMFLEET_APPROVED_TEMPLATES="*")
        self.ready = False

    async def wait(self) -> None:
        await poll(lambda: asyncio.to_thread(lambda: self.replica.proven > 0), 90, "the second replica has engines")
        self.ready = True

    async def strike(self, fleet: SplitFleet, rng: random.Random, ends: asyncio.Event) -> None:
        """Kill it and start it again; once let it stand still between the steps until their leases have ended."""
        number = 0
        while not ends.is_set():
            await self.wait()
            await asyncio.sleep(rng.uniform(1.0, 4.0))
            number += 1
            if number == 2:
                for engine in fleet.prefill[:2]:
                    await engine.order(hang="prefill")
                await asyncio.sleep(1.0)  # steps begin, and are answered when nothing hears
                self.replica.process.send_signal(signal.SIGSTOP)
                for engine in fleet.prefill[:2]:
                    await engine.order(resume=True)
                await asyncio.sleep(LEASE_S + 2)
                self.replica.process.send_signal(signal.SIGCONT)
            else:
                self.ready = False
                await asyncio.to_thread(self.replica.kill)
                self.replica.start()


@asynccontextmanager
async def second_replica(redis_url: str, model: str) -> AsyncIterator[Second]:
    second = Second(redis_url, model)
    try:
        await second.wait()
        yield second
    finally:
        second.replica.process.terminate()
        await asyncio.to_thread(second.replica.ended)


async def ask(fleet: SplitFleet, second: Second, right: Transferring, rng: random.Random) -> str:
    """Ask for one of a few prompts; return what became of it. Asserts that an answer is that of one engine."""
    path, stream = rng.choice([*PATHS]), rng.random() < 0.6
    body = PATHS[path](f"{rng.randrange(PROMPTS)} {TEXT}") | {"max_tokens": rng.choice((4, 30))}
    leaves_after_s = rng.uniform(0.0, 0.8) if rng.random() < 0.15 else 60.0
    deaths, at_second = second.replica.deaths, second.ready and rng.random() < SECOND_SHARE
    url = second.replica.url if at_second else fleet.router.url
    try:
        async with asyncio.timeout(leaves_after_s):
            async with fleet.router.client.post(
                url + path, json=body | {"model": fleet.model, "stream": stream}
            ) as got:
                status, headers, said = got.status, got.headers, await got.read()
    except TimeoutError:
        assert leaves_after_s < 60.0, "nobody answers"
        return "left"
    except aiohttp.ClientError:
        assert at_second
        assert second.replica.deaths > deaths
        return "killed"
    assert status == 200, said
    if b'"error"' in said and stream:
        return "cut"
    expected = (await right.http.post(path, json=body | {"model": "demo"})).json()
    assert (streamed_text(said) if stream else text_of(json.loads(said))) == text_of(expected)
    return "split" if "x-warmfleet-prefill-worker" in headers else "alone"


async def strike(fleet: SplitFleet, redis: Toxic, rng: random.Random, ends: asyncio.Event) -> None:
    """Order faults until the requests have ended; of each role one engine dies."""
    number = 0
    while not ends.is_set():
        number += 1
        with suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0.2, 0.8)):
                await ends.wait()
        if number % 15 == 1:
            with suppress(WarmfleetError):  # on a busy machine
                await fleet.busy("d0.0", "d1.0")
        if number == 8:
            fleet.decode[2].engine.die()
        if number == 14:
            fleet.prefill[2].engine.die()
        if number % 10 == 5:
            redis.hold()
        if number % 10 == 7:
            redis.heal()
        engine, hangs = rng.choice(fleet.prefill[:2]), rng.random() < 0.3
        if not hangs:
            await engine.order(bytes_per_s=rng.choice((1e8, 1e10)), handshake_s=rng.choice((0.0, 0.2)))
            continue
        await engine.order(hang=rng.choice(("prefill", "answered", "read")))
        await asyncio.sleep(rng.uniform(0.1, 1.0))
        await engine.order(resume=True)
    redis.heal()


@pytest.fixture
async def redis() -> AsyncIterator[tuple[str, Toxic]]:
    """The URL of a server, and a proxy before it."""
    port = free_port()
    with server(valkey_binary(), "--port", str(port)) as url:
        toxic = Toxic(port)
        await toxic.start()
        yield url, toxic
        await toxic.stop()


@pytest.mark.parametrize("connector", ["NixlConnector", "MooncakeConnector"])
async def test_no_answer_is_wrong(
    redis: tuple[str, Toxic], model: str, monkeypatch: pytest.MonkeyPatch, connector: str
) -> None:
    monkeypatch.setattr(prefills, "LEAST_S", 0.5)
    monkeypatch.setattr(prefill_booking, "MOVED_S", 1.0)
    rng, ends, places = random.Random(5), asyncio.Event(), asyncio.Semaphore(AT_ONCE)
    redis_url, proxy = redis
    async with (
        transferring(None, load_costs("fast"), 1_024, tokenizer=identity()) as right,
        split_fleet(
            *(redis_url, model, 3, 3),
            producer=replace(PRODUCER, connector=connector, lease_s=LEASE_S),
            consumer=replace(CONSUMER, connector=connector, lease_s=LEASE_S),
            router_redis_url=f"redis://127.0.0.1:{proxy.port}/0",
            max_engine_wait_s=0,
        ) as fleet,
        second_replica(redis_url, model) as second,
    ):

        async def one() -> str:
            async with places:
                return await ask(fleet, second, right, rng)

        striking = asyncio.gather(strike(fleet, proxy, rng, ends), second.strike(fleet, rng, ends))
        found = await asyncio.gather(*[one() for _ in range(REQUESTS)])
        ends.set()
        await striking
        counts = {word: found.count(word) for word in set(found)}
        print("\n", counts, "killed:", second.replica.deaths, await fleet.results())
        assert counts["split"] > REQUESTS / 10, counts
        assert counts["killed"] > 0, counts
        assert counts.get("cut", 0) <= AT_ONCE, counts
        await fleet.given_back(60)
