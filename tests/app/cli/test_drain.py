"""``warmfleet drain`` against real replicas: no new request, also while Redis is away; streams finish; it is undone."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.scripted import STREAM_HEAD, Engine, Seen, answer_well, chunk, engine, event
from tests.support.engines.simulated import simulated
from tests.support.polling import poll
from tests.support.redis.gate import gate
from tests.support.replicas.replica import Replica, replica

from warmfleet.__main__ import main
from warmfleet.background.stock.checks import worker_id
from warmfleet.cli import drain
from warmfleet.cli.pools import served
from warmfleet.fleet import WorkerState, connect
from warmfleet.fleet.pool_registry import PoolEntry, PoolRegistry
from warmfleet.protocol.wire import model_tag

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import redis.asyncio as aioredis

PROMPT = "a prompt that is long enough to have blocks of its own " * 20
HELD = "a stream that goes on until the test lets it end"


@dataclass
class Fleet:
    """A replica, the engines behind it, and the event that ends their held streams."""

    router: Replica
    engines: list[Engine]
    model: str
    redis_url: str
    finish: asyncio.Event = field(default_factory=asyncio.Event)

    async def command(self, *words: str) -> int:
        return await asyncio.to_thread(main, ["drain", *words, "--model", self.model, "--redis", self.redis_url])

    async def ask(self, **more: Any) -> int:
        return (await self.router.post({"prompt": PROMPT, "max_tokens": 1} | more))[0]

    async def used(self, requests: int = 12) -> set[str]:
        """Send so many requests, which must all be answered; the URLs of the engines that got them."""
        for upstream in self.engines:
            upstream.seen.clear()
        assert [await self.ask(prompt=f"{n} {PROMPT}") for n in range(requests)] == [200] * requests
        return {upstream.url for upstream in self.engines if upstream.seen}

    async def shown(self, worker: str) -> dict[str, Any]:
        """The row of ``/workers`` about this worker."""
        (model,) = json.loads((await self.router.get("/workers"))[1])["models"]
        return next(row for row in model["workers"] if row["worker_id"] == worker)

    async def noticed(self, count: int) -> None:
        """Return when the replica itself has read that so many workers are drained."""

        async def read() -> bool:
            return await self.router.metric('warmfleet_workers{state="draining"}') == count

        await poll(read, 10, f"{count} draining workers")


@asynccontextmanager
async def fleet_of(
    redis_url: str, model: str, count: int, *, look_url: str = "", **settings: Any
) -> AsyncIterator[Fleet]:
    finish = asyncio.Event()

    async def answer(upstream: Engine, seen: Seen, writer: asyncio.StreamWriter) -> None:
        if HELD not in seen.json["prompt"]:
            await answer_well(upstream, seen, writer)
            return
        writer.write(STREAM_HEAD)
        chunk(writer, event("begun"))
        await writer.drain()
        await finish.wait()
        for data in (event("ended"), b"data: [DONE]\n\n", b""):
            chunk(writer, data)

    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine(model, answer)) for _ in range(count)]
        urls = [upstream.url for upstream in engines]
        chosen = {"policy": "round_robin"} | settings
        router = await stack.enter_async_context(replica(redis_url, model, *urls, look_url=look_url, **chosen))
        yield Fleet(router, engines, model, look_url or redis_url, finish)


@pytest.fixture(autouse=True)
def short_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "POLL_S", 0.05)
    monkeypatch.setattr(drain, "QUIET_S", 0.3)


async def test_nothing_new_the_stream_finishes_and_it_is_undone(
    valkey_url: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with fleet_of(valkey_url, model, 2) as fleet:
        body = {"prompt": HELD, "max_tokens": 2, "stream": True}
        stream = asyncio.create_task(fleet.router.post(body))
        busy = await poll(
            lambda: next((upstream for upstream in fleet.engines if upstream.seen), None), 10, "it streams"
        )
        assert isinstance(busy, Engine)
        name = worker_id(busy.url)
        waiting = asyncio.create_task(fleet.command(name, "--wait"))

        async def drained() -> bool:
            return bool((await fleet.shown(name))["state"] == "draining")

        await poll(drained, 10, "it is drained")
        idle = {upstream.url for upstream in fleet.engines} - {busy.url}
        assert await fleet.used() == idle, "nothing new, from the very next request on"
        shown = await fleet.shown(name)
        assert (shown["state"], shown["draining"], shown["routable"]) == ("draining", True, False)
        assert shown["load"]["in_flight"] == 1
        await asyncio.sleep(0.6)
        assert not waiting.done(), "a request is left"
        assert not stream.done()
        fleet.finish.set()
        status, _, text = await stream
        assert status == 200
        assert text.rstrip().endswith(b"[DONE]")
        assert b"ended" in text
        assert await asyncio.wait_for(waiting, 20) == 0
        printed = capsys.readouterr().out.splitlines()
        assert printed[0] == f"{name} gets no new requests; 1 requests in flight"
        assert printed[-1] == f"{name}: nothing runs there any more"
        assert await fleet.command(name, "--undo") == 0
        assert await fleet.used() == {busy.url} | idle


async def test_nothing_new_while_redis_is_away(valkey_url: str, model: str) -> None:
    async with gate(valkey_url) as door:
        url = f"redis://127.0.0.1:{door.port}/0"
        settings = {"decide_timeout_s": 0.3, "redis_retry_s": 0.5, "health_interval_s": 60.0}
        async with fleet_of(url, model, 3, look_url=valkey_url, **settings) as fleet:
            name = worker_id(fleet.engines[0].url)
            assert await fleet.command(name) == 0
            await fleet.noticed(1)
            await door.shut()
            assert fleet.engines[0].url not in await fleet.used(24)
            await door.open()


async def test_when_all_are_drained_nobody_is_asked_from_memory(valkey_url: str, model: str) -> None:
    """A replica remembers the last workers that it could route to: not those that the operator took away."""
    async with gate(valkey_url) as door:
        url = f"redis://127.0.0.1:{door.port}/0"
        settings = {"view_interval_s": 0.5, "decide_timeout_s": 0.3, "redis_retry_s": 0.2, "health_interval_s": 60.0}
        async with fleet_of(url, model, 1, look_url=valkey_url, **settings) as fleet:
            assert await fleet.ask() == 200
            fleet.engines[0].seen.clear()
            assert await fleet.command(worker_id(fleet.engines[0].url)) == 0
            assert await fleet.ask() == 503, "before the replica's next reading"
            await fleet.noticed(1)
            assert await fleet.ask() == 503
            await door.shut()
            assert await fleet.ask() == 503, "and without Redis"
            await door.open()
            assert fleet.engines[0].seen == []


async def test_a_worker_with_the_plugin_is_left_alone(valkey_url: str, model: str) -> None:
    async with (
        replica(valkey_url, model, probe_interval_s=0.1, blocks_timeout_s=2.0) as router,
        simulated(valkey_url, model),
    ):
        await router.proven()
        fleet = Fleet(router, [], model, valkey_url)
        assert await fleet.command("eng") == 0, "the name of its server stands for all of its cores"
        await fleet.noticed(1)
        assert await fleet.ask() == 503
        await asyncio.sleep(0.3)  # a probe that had begun may end
        (before,) = await router.fleet.workers.read()
        await asyncio.sleep(0.6)
        (after,) = await router.fleet.workers.read()
        assert after.state is WorkerState.DRAINING
        assert after.record["probed"] == before.record["probed"], "it is not probed"
        assert await fleet.command("eng.0", "--undo") == 0
        await router.routable(1)
        assert await fleet.ask() == 200


async def test_a_pool_that_does_not_answer_keeps_no_engine_of_another_from_its_drain(
    valkey_url: str, model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = f"{model}#1"

    def of_master(url: str, tag: str, **options: Any) -> aioredis.Redis:
        return connect("redis://127.0.0.1:1/0" if tag == model_tag(lost) else url, tag, **options)

    monkeypatch.setattr(served, "connect", of_master)
    async with fleet_of(valkey_url, model, 1) as fleet:
        await fleet.router.routable(1)
        client = connect(valkey_url, timeout_s=5)
        await PoolRegistry(client, model).write([PoolEntry(model), PoolEntry(lost)])
        await client.aclose()
        name = worker_id(fleet.engines[0].url)
        assert await fleet.command(name) == 0
        printed = capsys.readouterr()
        assert f"{name} gets no new requests" in printed.out
        assert f"{lost} is left out" in printed.err
        assert await fleet.command("nobody") == 2
        assert f"'nobody' runs in no pool that answers; {lost} cannot be asked" in capsys.readouterr().err


async def test_a_wait_ends_when_somebody_undoes_it(
    valkey_url: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with fleet_of(valkey_url, model, 1) as fleet:
        stream = asyncio.create_task(fleet.router.post({"prompt": HELD, "max_tokens": 2, "stream": True}))
        name = worker_id(fleet.engines[0].url)
        await poll(lambda: fleet.engines[0].seen, 10, "it streams")
        waiting = asyncio.create_task(fleet.command(name, "--wait"))

        async def drained() -> bool:
            return (await fleet.router.fleet.workers.read())[0].draining

        await poll(drained, 10, "it is drained")
        assert await fleet.command(name, "--undo") == 0
        assert await asyncio.wait_for(waiting, 20) == 2
        assert f"{name} is no longer drained" in capsys.readouterr().err
        fleet.finish.set()
        assert (await stream)[0] == 200


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["drain", "nobody", "--model", "test/of-nobody"], "no worker is called 'nobody'; known are: none"),
        (["drain", "w", "--model", "m", "--undo", "--wait"], "choose one of them"),
        (["drain", "w"], "name the model with --model"),
        (["drain", "w", "--model", "a{b}"], "a{b}"),
    ],
)
def test_what_it_cannot_do_it_says(
    words: list[str], message: str, valkey_url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WARMFLEET_MODELS", raising=False)
    assert main([*words, "--redis", valkey_url]) == 2
    assert message in capsys.readouterr().err
