"""Real processes under more load than the engines can serve, with tenants of unequal demand, and with long prompts."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.e2e.overload import MODEL, Seen, Stream, done_tokens, load, processes
from tests.support.polling import poll
from tests.support.redis.servers import server, valkey_binary

from warmfleet.fleet import Fleet, connect
from warmfleet_loadtest.measuring.figures import quantile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

pytestmark = pytest.mark.long(
    minutes=7,
    shows=(
        "four simulated engines get 1.5 times the load that they can serve, two tenants at 10:1, and short "
        "prompts beside prompts of 100,000 tokens; a replica is killed while requests wait"
    ),
)

ENGINES = ["--count", "4", "--step-time", "trace", "--blocks", "2048"]  # 1,250 tokens of prefill a second each
CAPACITY = 4 * 1_250
SHORT = ((400, 1.0),)


@pytest.fixture
def own_store() -> Iterator[str]:
    with server(valkey_binary()) as url:
        yield url


@pytest.fixture
async def fleet(own_store: str) -> AsyncIterator[Fleet]:
    """A fleet of the test's own, which only reads the state."""
    made = Fleet(connect(own_store, timeout_s=5), MODEL)
    yield made
    await made.close()


async def left(fleet: Fleet) -> tuple[int, list[bytes]]:
    """Return the sum of the booked load, and the keys of the queue."""
    rows = [worker.load for worker in await fleet.workers.read()]
    keys = [key async for key in fleet.redis.scan_iter(match="*:queue*")]
    return sum(row.prefill_tokens + row.decode_tokens + row.in_flight for row in rows), keys


async def settled(fleet: Fleet) -> None:
    async def nothing() -> bool:
        return await left(fleet) == (0, [])

    await poll(nothing, 20, "no load, no tickets, no tenants are left")


async def measured(fleet: Fleet) -> bool:
    return all(0 < worker.load.speed_tps < 2_500 for worker in await fleet.workers.read())


async def most_tickets(fleet: Fleet, seconds: float) -> int:
    most, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        most = max(most, int(await fleet.redis.zcard(fleet.keys.queue2)))
        await asyncio.sleep(0.02)
    return most


def told(name: str, seen: list[Seen]) -> None:
    ttft = sorted(request.first - request.sent for request in seen if request.status == 200)
    print(
        f"\n{name}: {dict(Counter(request.status for request in seen))}, TTFT p50 {quantile(ttft, 0.5):.2f} s", end=""
    )
    print(f", p99 {quantile(ttft, 0.99):.2f} s")


async def test_half_as_much_again_as_they_can_serve(own_store: str, fleet: Fleet) -> None:
    """The goodput equals that of the saturated engines without a queue, and the queue keeps its bound."""
    streams, seconds, skip = [Stream("a", 1.5 * CAPACITY / 400, SHORT)], 40.0, 10.0
    done: dict[str, float] = {}
    for name, wait_s in (("without", 0.0), ("with", 2.0)):
        with processes(own_store, ENGINES, max_engine_wait_s=wait_s, queue_max=48, queue_timeout_s=20) as running:
            looking = asyncio.create_task(most_tickets(fleet, seconds))
            seen = await load(running.urls, streams, seconds)
            done[name] = done_tokens(seen, skip, seconds) / (seconds - skip)
            told(f"{name} a queue, {done[name]:.0f} tokens/s done, {await looking} tickets at most", seen)
            if wait_s:
                assert 40 <= await looking <= 48
                refused = [request for request in seen if request.status == 429]
                assert refused
                assert all(int(request.retry_after) >= 1 for request in refused)
                assert {request.status for request in seen} <= {200, 429, 503}
            await settled(fleet)
        await cast("Any", fleet.redis.flushall())
    assert done["with"] >= 0.95 * done["without"], done


async def test_two_tenants_at_ten_to_one_get_the_same(own_store: str, fleet: Fleet) -> None:
    """Each tenant uses a replica of its own, and the speed of the engines is known."""
    share = CAPACITY / 2 / 800
    streams = [Stream("much", 11.5 * share, ((800, 1.0),), 0), Stream("little", 1.15 * share, ((800, 1.0),), 1)]
    with processes(own_store, ENGINES, queue_max=48) as running:
        await load(running.urls, [Stream("early", 3.0, ((800, 1.0),))], 8.0)
        await poll(lambda: measured(fleet), 20, "every engine has told its speed")
        seen = await load(running.urls, streams, 50.0)
        done = {name: done_tokens(seen, 10.0, 50.0, name) / 40.0 for name in ("much", "little")}
        for name in done:
            told(f"{name}: {done[name]:.0f} tokens/s done", [request for request in seen if request.tenant == name])
        await settled(fleet)
    assert 0.9 <= done["much"] / done["little"] <= 1.1, done


@pytest.mark.parametrize("wait_s", [0.0, 2.0], ids=["without a queue", "with"])
async def test_short_prompts_beside_long_ones(own_store: str, fleet: Fleet, wait_s: float) -> None:
    """A tenth of the requests has 100,000 tokens, the others 500, and each kind is of one tenant. Prints the times."""
    engines = ["--count", "4", "--step-time", "0.4", "--blocks", "16384", "--max-model-len", "131072"]
    streams = [Stream("short", 2.7, ((500, 1.0),)), Stream("long", 0.3, ((100_000, 1.0),))]  # 10,000 tokens/s each
    with processes(own_store, engines, max_engine_wait_s=wait_s, queue_timeout_s=300) as running:
        seen = await load(running.urls, streams, 60.0)
        for name in ("short", "long"):
            told(f"{name}, max_engine_wait_s {wait_s}", [request for request in seen if request.tenant == name])
        assert all(request.status == 200 for request in seen)
        await settled(fleet)


async def test_a_replica_that_is_killed_leaves_nothing(own_store: str, fleet: Fleet) -> None:
    """Tickets of the killed replica expire, and requests that wait at the other replica are served."""
    streams = [Stream("a", 10.0, SHORT, 0), Stream("b", 10.0, SHORT, 1)]
    with processes(own_store, ENGINES, max_engine_wait_s=1.0, queue_max=64) as running:
        began = time.monotonic()
        sent = asyncio.create_task(load(running.urls, streams, 12.0))
        await poll(lambda: waits(fleet, 30), 30, "30 tickets wait")
        running.kill(0)
        killed_s = time.monotonic() - began
        seen = [request for request in await sent if request.tenant == "b"]
        told("at the other replica", seen)
        assert all(request.status in (200, 429) for request in seen)
        assert len([request for request in seen if request.status == 200 and request.end > killed_s]) > 20
        rows = [worker.load for worker in await fleet.workers.read()]
        print(f"leases of the dead replica: {sum(row.in_flight for row in rows)}")
        assert [key async for key in fleet.redis.scan_iter(match="*:queue*")] == []
        await poll(lambda: unloaded(fleet), 45, "the leases of the dead replica expired")


async def waits(fleet: Fleet, count: int) -> bool:
    return int(await fleet.redis.zcard(fleet.keys.queue2)) >= count


async def unloaded(fleet: Fleet) -> bool:
    return (await left(fleet))[0] == 0
