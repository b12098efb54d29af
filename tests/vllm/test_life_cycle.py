"""The life of a real server's worker: it joins when it can serve, leaves before its core ends, and can be drained."""

from __future__ import annotations

import asyncio
import io
import json
import random
import signal
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary
from tests.vllm.engine import ROOT, SERVED_NAME, START_SECONDS, TRUTH, EngineOptions, VllmEngine
from tests.vllm.replicas import running_replicas

from warmfleet.__main__ import main
from warmfleet.cli.doctor.command import Plan, examine
from warmfleet.cli.doctor.finding import Report, State
from warmfleet.fleet import Fleet, connect
from warmfleet.settings import Settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long(
        minutes=5,
        shows=(
            "real vLLM gets no request while it loads, none after SIGTERM or `warmfleet drain`, and finishes what it "
            "has; its log says when both halves joined; after SIGTERM, SIGINT and a rolling replacement its goodbye is "
            "no fault to anybody"
        ),
    ),
    pytest.mark.timeout(900),
]

LONG_ANSWER = 3_800  # tokens: many seconds


@dataclass
class Life:
    """A server, the stream of its API server, and a replica, which is started when first used."""

    engine: VllmEngine
    fleet: Fleet
    store: str

    async def told(self, key: str) -> list[tuple[int, bytes]]:
        """(Redis' milliseconds, operation) of the entries of a stream that are not applied yet, oldest first."""
        entries = cast("Any", await self.fleet.redis.xrange(key))
        return [(int(number.split(b"-")[0]), entry[b"o"]) for number, entry in entries]

    def lines(self, what: str) -> list[str]:
        return [line for line in self.engine.log.read_text(errors="replace").splitlines() if what in line]


@pytest.fixture
def store() -> Iterator[str]:
    with server(valkey_binary()) as url:
        yield url


@asynccontextmanager
async def life(store: str, *arguments: str) -> AsyncIterator[Life]:
    path = f"{TRUTH}:{ROOT / 'worker_plugin'}"  # the plugin of this checkout, not an installed one
    engine = VllmEngine(EngineOptions(redis_url=store, arguments=arguments, environment={"PYTHONPATH": path}))
    fleet = Fleet(connect(store, timeout_s=5), SERVED_NAME)
    try:
        engine.start()
        yield Life(engine, fleet, store)
    finally:
        await asyncio.to_thread(engine.remove)
        await fleet.close()


async def serving(one: Life) -> None:
    """Wait until the server's health is fine; before that its API server must not have joined."""
    deadline = time.monotonic() + 2 * START_SECONDS
    async with httpx.AsyncClient(timeout=2) as client:
        while time.monotonic() < deadline:
            joined = await one.told(one.fleet.keys.server("vllm-a"))
            try:
                if (await client.get(f"{one.engine.url}/health")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            assert joined == [], "its API server joined before it could serve"
            await asyncio.sleep(0.1)
    raise AssertionError(f"not healthy:\n{one.engine.log.read_text(errors='replace')[-3_000:]}")


def words(count: int, seed: int = 1) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(["import", "return", "class", "value", "index", "yield", "self"]) for _ in range(count))


async def ask(url: str) -> int:
    async with httpx.AsyncClient(timeout=60) as client:
        body = {"model": SERVED_NAME, "prompt": words(100), "max_tokens": 1}
        return (await client.post(f"{url}/v1/completions", json=body)).status_code


async def stream(url: str, begun: asyncio.Event, seed: int = 1) -> int:
    """A long greedy answer to a random prompt; returns the number of its tokens, by what the engine counted."""
    body: dict[str, Any] = {
        "model": SERVED_NAME,
        "prompt": words(60, seed),
        "max_tokens": LONG_ANSWER,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    tokens = 0
    async with (
        httpx.AsyncClient(timeout=120) as client,
        client.stream("POST", f"{url}/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            begun.set()
            if line.startswith("data: {"):
                tokens = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", tokens)
    return tokens


async def routable(url: str) -> bool:
    async with httpx.AsyncClient(timeout=10) as client:
        (model,) = (await client.get(f"{url}/workers")).json()["models"]
    return any(worker["routable"] for worker in model["workers"])


async def not_routable(url: str) -> bool:
    return not await routable(url)


async def test_it_joins_when_it_serves_and_leaves_before_its_core_is_killed(store: str) -> None:
    async with life(store) as one:
        await serving(one)
        server_key, events_key = one.fleet.keys.server("vllm-a"), one.fleet.keys.events("vllm-a.0")

        async def both() -> bool:
            return bool(await one.told(server_key)) and bool(await one.told(events_key))

        await poll(both, 60, "both halves have joined")
        assert len(one.lines("warmfleet: vllm-a.0 joined tiny")) == 1
        (line,) = one.lines("warmfleet: server vllm-a joined tiny as ")
        assert line.startswith("(APIServer pid="), "in vLLM's own format"
        process = one.engine.process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) is not None
        assert [what for _, what in await one.told(server_key)][-1] == b"leave"
        log = one.engine.log.read_text(errors="replace")
        goodbye, core_ends = (
            log.index("warmfleet: server vllm-a said goodbye"),
            log.index("send sigterm to process EngineCore"),
        )
        assert goodbye < core_ends


async def test_it_is_drained_by_the_operator_and_by_sigterm_and_finishes_what_it_has(store: str) -> None:
    async with life(store, "--shutdown-timeout", "60") as one:
        await serving(one)
        with running_replicas(store, 1, 1, WARMFLEET_DECIDE_TIMEOUT_S="2") as (replica,):
            url = replica.url
            assert await ask(url) == 200
            drained = ["drain", "vllm-a", "--model", SERVED_NAME, "--redis", store]
            begun = asyncio.Event()
            running = asyncio.create_task(stream(url, begun))
            await begun.wait()
            assert await asyncio.to_thread(main, drained) == 0
            assert await ask(url) == 503, "nothing new"
            assert await running == LONG_ANSWER, "what it had is finished"
            assert await asyncio.to_thread(main, [*drained, "--undo"]) == 0
            await poll(lambda: routable(url), 30, "it is routable again")
            assert await ask(url) == 200

            begun = asyncio.Event()
            running = asyncio.create_task(stream(url, begun))
            await begun.wait()
            process = one.engine.process
            assert process is not None
            process.send_signal(signal.SIGTERM)
            await poll(lambda: not_routable(url), 10, "it is not routable")
            assert not running.done()
            assert await ask(url) == 503, "nothing new"
            assert await running == LONG_ANSWER, "vLLM finishes its requests"
            assert await asyncio.to_thread(process.wait, 60) is not None
            assert one.lines("warmfleet: vllm-a.0 said goodbye")


async def state_of(fleet: Fleet, worker_id: str) -> str:
    return next((str(worker.state) for worker in await fleet.workers.read() if worker.worker_id == worker_id), "")


async def faults(store: str) -> list[str]:
    """The faults that `warmfleet doctor` finds in the workers."""
    settings = Settings(redis_url=store, models=(SERVED_NAME,), decide_timeout_s=2.0)
    report = Report(out=io.StringIO())
    await examine(Plan(settings, store), report)
    checks = ("worker", "halves", "workers", "url")
    return [finding.detail for _, finding in report.found if finding.check in checks and finding.state is not State.OK]


async def test_a_goodbye_is_no_fault_after_a_rolling_replacement(store: str) -> None:
    """A second engine replaces the first, which then replaces the second under its old name."""
    async with life(store) as old:
        await serving(old)
        options = replace(old.engine.options, worker_id="vllm-b")
        new = VllmEngine(options)
        try:
            with running_replicas(store, 1, 1) as (replica,):
                new.start()
                await asyncio.to_thread(new.wait)
                for leaves, stays, how in ((old.engine, new, signal.SIGTERM), (new, old.engine, signal.SIGINT)):
                    await poll(partial(is_state, old.fleet, stays.worker_id, "proven"), 120, "the other one serves")
                    assert leaves.process is not None
                    leaves.process.send_signal(how)
                    await poll(partial(is_state, old.fleet, leaves.worker_id, "left"), 20, f"left after {how.name}")
                    assert await ask(replica.url) == 200
                    assert await faults(store) == []
                    await asyncio.to_thread(leaves.kill)
                    for _ in range(4):  # longer than it takes until the engine's other half counts as silent
                        await asyncio.sleep(5)
                        assert await state_of(old.fleet, leaves.worker_id) == "left"
                        assert await faults(store) == []
                    leaves.start()
                    await asyncio.to_thread(leaves.wait)
        finally:
            await asyncio.to_thread(new.remove)


async def is_state(fleet: Fleet, worker_id: str, wanted: str) -> bool:
    return await state_of(fleet, worker_id) == wanted
