"""Sessions of agents in a replica and a real Redis: one has a place, the others are held, and nothing is left."""

from __future__ import annotations

import asyncio
import json
import random
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.engines.simulated import simulated
from tests.support.polling import poll
from tests.support.replicas.replica import Replica, replica

from warmfleet.api import fleet_status
from warmfleet.cli import explain, workers
from warmfleet.cli.terminal.output import Table
from warmfleet.fleet import LedgerView, Place, Question, Spans
from warmfleet.routing import router as router_module
from warmfleet.routing.sessions import TOOLS, session_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from warmfleet_loadtest.engine import Engine

STEP_S = 0.05  # time of the engine for a token, until a test makes it faster
LONG, SHORT = 1_500, 4  # tokens of an answer: one that outlives every wait of a test, and one that ends soon
BUSY = 65_535


def body(seed: int, max_tokens: int = SHORT) -> dict[str, Any]:
    rng = random.Random(seed)
    prompt, usage = [rng.randint(10, 900) for _ in range(300)], {"include_usage": True}
    return {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "stream_options": usage}


@pytest.fixture(autouse=True)
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each request declare tools, which simulated engines refuse."""

    def with_tools(*asked: Any) -> bytes:
        session = session_of(*asked)
        return bytes([session[0] | TOOLS]) + session[1:]

    for module in (router_module, fleet_status):
        monkeypatch.setattr(module, "session_of", with_tools)


@asynccontextmanager
async def bound(redis_url: str, model: str, **settings: Any) -> AsyncIterator[tuple[Replica, Engine]]:
    """A replica whose ledger binds, and its one engine, which has room for the context of one session only."""
    chosen = {"max_engine_wait_s": 0.0, "session_wait_max_s": 100_000.0} | settings
    async with (
        simulated(redis_url, model, speed="trace") as slow,
        replica(redis_url, model, **chosen) as router,
    ):
        slow.engine.core.costs = replace(slow.engine.core.costs, base_s=STEP_S)
        await router.routable(1)
        fleet = router.fleet
        fleet.use(spans=Spans(lease_ms=600_000))
        await fleet.bookings.decide(Question("wf-0busy", (), 10_000_000, 10_000_000, "cost"))

        async def binds() -> bool:
            (worker,) = await fleet.workers.read()
            now = int(1_000 * time.time()) % 2**32
            row = replace(worker.load, blocks=worker.load.capacity_blocks, busy_share=BUSY, since_ms=now)
            await fleet.redis.hset(fleet.keys.load, worker.worker_id, row.pack(worker.worker_id))
            return bool((await fleet.ledger.read()).engines)

        await poll(binds, 30, "the ledger binds", every_s=0.1)
        yield router, slow.engine
        await fleet.bookings.settle("wf-0busy", "finished")


def ask(
    router: Replica, seed: int, max_tokens: int = SHORT, headers: dict[str, str] | None = None
) -> asyncio.Task[Any]:
    return asyncio.create_task(router.post(body(seed, max_tokens), **(headers or {})))


async def seen(router: Replica, what: str, **counts: int) -> LedgerView:
    """Return the ledger once it has these numbers of sessions, by the names of Place."""

    async def counted() -> LedgerView | None:
        view = await router.fleet.ledger.read()
        numbers = {name: sum(session.place is Place[name] for session in view.sessions) for name in counts}
        return view if numbers == counts else None

    found = await poll(counted, 30, what)
    assert isinstance(found, LedgerView)
    return found


async def first_has_a_place(router: Replica) -> asyncio.Task[Any]:
    first = ask(router, 1, LONG)
    await seen(router, "the first session has a place", IN=1)
    return first


async def says(router: Replica, metric: str, value: float) -> bool:
    return await router.metric(metric) == value


async def test_a_session_is_held_until_another_one_ends(valkey_url: str, model: str) -> None:
    async with bound(valkey_url, model, truth_interval_s=0.2) as (router, engine):
        first = await first_has_a_place(router)
        second = ask(router, 2, headers={"X-Request-Id": "held"})
        await seen(router, "the second is held", IN=1, NEW=1)
        third = ask(router, 3, headers={"X-Warmfleet-Session": "third"})
        await seen(router, "two are held", IN=1, NEW=2)
        await poll(lambda: says(router, "warmfleet_held_requests", 2), 30, "the replica holds both")
        await poll(lambda: says(router, 'warmfleet_sessions{state="new"}', 2), 30, "the gauge tells it")
        (told,) = json.loads((await router.get("/workers"))[1])["models"]
        assert (told["ledger"]["running"], told["ledger"]["held"], len(told["ledger"]["line"])) == (1, 2, 2)
        assert told["ledger"]["line"][0]["because"].startswith("it is new")
        assert told["workers"][0]["places"]["sessions"] == 1
        explained = json.loads((await router.post(body(4) | {"endpoint": "/v1/completions"}, "/explain"))[2])
        assert (explained["held"]["state"], explained["held"]["ahead"], explained["held"]["refused"]) == (
            "new",
            2,
            False,
        )
        assert any("The request would be held" in str(part) for part in explain.parts_of(explained))
        printed = [part for part in workers.parts_of({"models": [told]}) if isinstance(part, Table)]
        assert printed[0].header[-2:] == ("SESSIONS", "TAKEN")
        third.cancel()
        await seen(router, "the client that hung up is in line no more", IN=1, NEW=1)
        engine.core.costs = replace(engine.core.costs, base_s=0.0)
        assert (await first)[0] == (await second)[0] == 200
        (why,) = json.loads((await router.get("/why?id=held"))[1])["requests"]
        assert (why["held"], why["ahead"]) == ("new", 0)
        assert why["held_ms"] > 0
        assert "held until the caches have room for its session (it was new, 0 sessions before it)" in why["because"]
        await poll(lambda: says(router, "warmfleet_held_requests", 0), 10, "nobody is held")
        await seen(router, "its answer called no tool, so it gave up its place", IN=0, NEW=0, PAUSED=0)


async def test_the_ledger_learns_the_tokens_of_the_context_and_the_end(valkey_url: str, model: str) -> None:
    async with bound(valkey_url, model) as (router, _):
        named = {"X-Warmfleet-Session": "only"}
        status, headers, _answer = await ask(router, 1, 7, named)
        assert status == 200
        (session,) = (await seen(router, "it ended", OUT=1)).sessions
        context = int(headers["x-warmfleet-prompt-tokens"]) + 7
        assert (session.tokens, session.running, session.calls_tools) == (context, 0, False)
        assert (await ask(router, 1, 7, named | {"X-Warmfleet-Conversation": "ended"}))[0] == 200
        await seen(router, "Redis forgets it", OUT=0, IN=0)


async def test_a_new_session_with_too_many_before_it_is_refused(valkey_url: str, model: str) -> None:
    async with bound(valkey_url, model, session_wait_max_s=1.0) as (router, _):
        first = await first_has_a_place(router)
        second = ask(router, 2, LONG)  # nobody is refused before somebody was held

        async def refused() -> dict[str, Any] | None:
            asked = body(3) | {"endpoint": "/v1/completions"}
            told: dict[str, Any] = json.loads((await router.post(asked, "/explain"))[2])
            return told if told["held"] and told["held"]["refused"] else None

        explained: Any = await poll(refused, 20, "the ledger knows its pace, and tells a wait by it")
        assert any("The request would be refused" in str(part) for part in explain.parts_of(explained))
        status, headers, answer = await ask(router, 3)
        error = json.loads(answer)["error"]
        assert (status, error["code"]) == (429, "overloaded")
        assert "sessions wait before it" in error["message"]
        assert 10 < int(headers["retry-after"]) <= 60, "the time by which the wait is too long, at most a minute"
        assert await router.metric('warmfleet_queue_rejections_total{reason="sessions"}') == 1
        await seen(router, "it does not stand in the line", IN=2, NEW=0)
        first.cancel()
        second.cancel()


async def test_nobody_is_held_by_a_redis_that_lost_everything(valkey_url: str, model: str) -> None:
    async with bound(valkey_url, model) as (router, _):
        first = await first_has_a_place(router)
        second = ask(router, 2)
        await seen(router, "it is held", IN=1, NEW=1)
        keys = router.fleet.keys
        await router.fleet.redis.unlink(keys.sessions, keys.session_line, keys.places, keys.tick)
        async with asyncio.timeout(20):
            assert (await second)[0] == 200
        first.cancel()
