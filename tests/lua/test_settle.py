"""settle: gives back exactly the booked load, once, in any order."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.conftest import PATIENT
from tests.lua.world import World

from warmfleet.errors import BadArgument
from warmfleet.fleet import Ask, Fleet, Spans, Stage

if TYPE_CHECKING:
    import redis.asyncio as aioredis


async def load(world: World, number: int = 1) -> tuple[int, int, int]:
    row = await world.row(number)
    return row.prefill_tokens, row.decode_tokens, row.in_flight


async def booked(world: World, blocks: int = 100) -> Ask:
    """One request of a new chain on w1; 1,601 tokens of prefill, 2,000 of decode."""
    ask = world.ask(world.chain(blocks), decode_tokens=2_000, exclude=("w2.0", "w3.0"))
    await world.fleet.decide(ask)
    return ask


async def test_from_booked_to_finished(world: World) -> None:
    await world.workers(1)
    ask = await booked(world)
    assert await load(world) == (1_601, 2_000, 1)
    assert await world.fleet.settle(ask.reservation, "started") == "STARTED"
    assert await load(world) == (0, 2_000, 1)
    lease = (await world.leases())[ask.reservation]
    assert (lease.stage, lease.prefill_tokens, lease.decode_tokens) == (Stage.STARTED, 0, 2_000)
    assert await world.fleet.settle(ask.reservation, "started") == "SAME"
    assert await world.fleet.settle(ask.reservation, "finished") == "SETTLED"
    assert await load(world) == (0, 0, 0)
    assert await world.fleet.settle(ask.reservation, "finished") == "SAME"
    assert await world.fleet.settle(ask.reservation, "failed") == "SAME"
    assert await load(world) == (0, 0, 0)


async def test_a_first_token_that_is_only_due_gives_the_prefill_back_and_tells_no_speed(world: World) -> None:
    """Else the speed would be learned from itself: a replica's clock says by the speed when the token is due."""
    await world.workers(1, speed_tps=0)
    ask, streamed = await booked(world), await booked(world)
    await world.change(1, since_ms=(time.time_ns() // 1_000_000 - 4_000) % 2**32)
    assert await world.fleet.settle(ask.reservation, "due") == "STARTED"
    assert await load(world) == (1_601, 4_000, 2)
    assert (await world.leases())[ask.reservation].stage == Stage.STARTED
    assert (await world.row(1)).speed_tps == 0
    for again in ("due", "started"):
        assert await world.fleet.settle(ask.reservation, again) == "SAME"
    await world.change(1, since_ms=(time.time_ns() // 1_000_000 - 4_000) % 2**32)
    assert await world.fleet.settle(streamed.reservation, "started") == "STARTED"
    assert (await world.row(1)).speed_tps == pytest.approx(400, rel=0.3)
    assert await world.fleet.settle(ask.reservation, "finished") == "SETTLED"


async def test_what_finished_made_lingers_and_then_goes(store: aioredis.Redis, model: str) -> None:
    world = World(store, Fleet(store, model, timeouts=PATIENT, spans=Spans(linger_ms=20_000)))
    await world.workers(2)
    ask = await booked(world)
    await world.fleet.settle(ask.reservation, "finished")
    lease = (await world.leases())[ask.reservation]
    assert lease.stage == Stage.LINGERING
    expiry = cast("float", await world.store.zscore(world.keys.leases, ask.reservation))
    assert expiry == pytest.approx(time.time() * 1000 + 20_000, abs=9_000)
    _, rows = await world.fleet.explain(Ask("wf-next", ask.chains, ask.prompt_tokens, 0))
    assert {row.worker_id: row.matched_tokens for row in rows} == {"w1.0": 1_600, "w2.0": 0}
    assert (await world.fleet.decide(ask)).outcome == "known"
    await world.expire(ask.reservation)
    assert await world.leases() == {}
    assert await world.speculation() == {}
    assert await load(world) == (0, 0, 0)


async def test_what_the_engine_has_reported_does_not_linger(world: World) -> None:
    await world.workers(1)
    ask = await booked(world)
    await world.hold(1, ask.chains[0].hashes)
    assert await world.fleet.settle(ask.reservation, "finished") == "SETTLED"
    assert await world.leases() == {}
    assert await world.speculation() == {}


@pytest.mark.parametrize("who", ["settle", "decide"])
async def test_an_expired_lease_is_given_back_once(world: World, who: str) -> None:
    await world.workers(1)
    ask, other = await booked(world), await booked(world)
    await world.store.zadd(world.keys.leases, {ask.reservation: 1})
    for number in range(3):
        if who == "settle":
            await world.fleet.settle("wf-nobody", "finished")
        else:
            await world.done(Ask(f"wf-other-{number}", (), 10, 10))
        assert await load(world) == (1_601, 2_000, 1)
    assert set(await world.leases()) == {other.reservation}


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
@pytest.mark.parametrize("started", [False, True])
async def test_failed_and_cancelled_end_at_once(world: World, outcome: Any, started: bool) -> None:
    await world.workers(1)
    ask = await booked(world)
    if started:
        await world.fleet.settle(ask.reservation, "started")
    assert await world.fleet.settle(ask.reservation, outcome) == "SETTLED"
    assert await load(world) == (0, 0, 0)
    assert await world.leases() == {}
    assert await world.store.zcard(world.keys.leases) == 0
    assert await world.speculation() == {}


@pytest.mark.parametrize(
    ("outcome", "left"),
    [("failed", True), ("cancelled", True), ("unsent", True), ("started", False), ("due", False), ("finished", False)],
)
async def test_an_unknown_id_leaves_a_tombstone_only_if_it_ended(world: World, outcome: Any, left: bool) -> None:
    await world.workers(1)
    assert await world.fleet.settle("wf-1", outcome) == "UNKNOWN"
    leases = await world.leases()
    assert ("wf-1" in leases) is left
    if left:
        assert leases["wf-1"].stage == Stage.TOMBSTONE
        expiry = cast("float", await world.store.zscore(world.keys.leases, "wf-1"))
        assert expiry == pytest.approx(time.time() * 1000 + 60_000, abs=9_000)
        assert await world.fleet.settle("wf-1", outcome) == "SAME"
        await world.store.zadd(world.keys.leases, {"wf-1": 1})
        await world.fleet.settle("wf-2", "finished")
        assert await world.leases() == {}


async def test_a_worker_that_joined_anew_owes_nothing(world: World) -> None:
    await world.workers(1)
    ask = await booked(world)
    await world.change(1, epoch=2, prefill_tokens=5, decode_tokens=0, in_flight=1)
    assert await world.fleet.settle(ask.reservation, "started") == "STARTED"
    assert await world.fleet.settle(ask.reservation, "failed") == "SETTLED"
    assert await load(world) == (5, 0, 1)
    assert await world.speculation() == {}


async def test_a_forgotten_worker_is_not_made_again(world: World) -> None:
    await world.workers(1)
    ask = await booked(world)
    await cast("Any", world.store.hdel(world.keys.load, "w1.0"))
    assert await world.fleet.settle(ask.reservation, "finished") == "SETTLED"
    assert await world.rows() == {}


async def test_what_settle_refuses(world: World) -> None:
    with pytest.raises(BadArgument):
        await world.fleet.settle("wf-1", cast("Any", "gone"))
    with pytest.raises(BadArgument):
        await world.fleet.settle("", "failed")
