"""settle: gives back exactly the booked load, once, in any order."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, cast

import pytest
from tests.support.fleet.keyspace import Keyspace
from tests.support.redis.servers import PATIENT

from warmfleet.errors import BadArgument
from warmfleet.fleet import Constants, Fleet, Question, Spans, Stage

if TYPE_CHECKING:
    import redis.asyncio as aioredis


async def load(keyspace: Keyspace, number: int = 1) -> tuple[int, int, int]:
    row = await keyspace.row(number)
    return row.prefill_tokens, row.decode_tokens, row.in_flight


async def booked(keyspace: Keyspace, blocks: int = 100) -> Question:
    """A request of a new chain on w1; 1,601 tokens of prefill, 2,000 of decode."""
    ask = keyspace.ask(keyspace.chain(blocks), decode_tokens=2_000, exclude=("w2.0", "w3.0"))
    await keyspace.fleet.bookings.decide(ask)
    return ask


async def test_from_booked_to_finished(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    ask = await booked(keyspace)
    assert await load(keyspace) == (1_601, 2_000, 1)
    assert await keyspace.fleet.bookings.settle(ask.reservation, "started") == "STARTED"
    assert await load(keyspace) == (0, 2_000, 1)
    lease = (await keyspace.leases())[ask.reservation]
    assert (lease.stage, lease.prefill_tokens, lease.decode_tokens) == (Stage.STARTED, 0, 2_000)
    assert await keyspace.fleet.bookings.settle(ask.reservation, "started") == "SAME"
    assert await keyspace.fleet.bookings.settle(ask.reservation, "finished") == "SETTLED"
    assert await load(keyspace) == (0, 0, 0)
    assert await keyspace.fleet.bookings.settle(ask.reservation, "finished") == "SAME"
    assert await keyspace.fleet.bookings.settle(ask.reservation, "failed") == "SAME"
    assert await load(keyspace) == (0, 0, 0)


async def test_a_first_token_that_is_only_due_gives_the_prefill_back_and_tells_no_speed(keyspace: Keyspace) -> None:
    """A replica computes the due time from the speed, so learning the speed from it would be circular."""
    await keyspace.workers(1, speed_tps=0)
    ask, streamed = await booked(keyspace), await booked(keyspace)
    await keyspace.change(1, since_ms=(time.time_ns() // 1_000_000 - 4_000) % 2**32)
    assert await keyspace.fleet.bookings.settle(ask.reservation, "due") == "STARTED"
    assert await load(keyspace) == (1_601, 4_000, 2)
    assert (await keyspace.leases())[ask.reservation].stage == Stage.STARTED
    assert (await keyspace.row(1)).speed_tps == 0
    for again in ("due", "started"):
        assert await keyspace.fleet.bookings.settle(ask.reservation, again) == "SAME"
    await keyspace.change(1, since_ms=(time.time_ns() // 1_000_000 - 4_000) % 2**32)
    assert await keyspace.fleet.bookings.settle(streamed.reservation, "started") == "STARTED"
    assert (await keyspace.row(1)).speed_tps == pytest.approx(400, rel=0.3)
    assert await keyspace.fleet.bookings.settle(ask.reservation, "finished") == "SETTLED"


async def test_what_finished_made_lingers_and_then_goes(store: aioredis.Redis, model: str) -> None:
    keyspace = Keyspace(
        store, Fleet(store, model, timeouts=PATIENT, constants=Constants(spans=Spans(linger_ms=20_000)))
    )
    await keyspace.workers(2)
    ask = await booked(keyspace)
    await keyspace.fleet.bookings.settle(ask.reservation, "finished")
    lease = (await keyspace.leases())[ask.reservation]
    assert lease.stage == Stage.LINGERING
    expiry = cast("float", await keyspace.store.zscore(keyspace.keys.leases, ask.reservation))
    assert expiry == pytest.approx(time.time() * 1000 + 20_000, abs=9_000)
    _, rows = await keyspace.fleet.queue.explain(Question("wf-next", ask.chains, ask.prompt_tokens, 0))
    assert {row.worker_id: row.matched_tokens for row in rows} == {"w1.0": 1_600, "w2.0": 0}
    assert (await keyspace.fleet.bookings.decide(ask)).outcome == "known"
    await keyspace.expire(ask.reservation)
    assert await keyspace.leases() == {}
    assert await keyspace.speculation() == {}
    assert await load(keyspace) == (0, 0, 0)


async def test_what_the_engine_has_reported_does_not_linger(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    ask = await booked(keyspace)
    await keyspace.hold(1, ask.chains[0].hashes)
    assert await keyspace.fleet.bookings.settle(ask.reservation, "finished") == "SETTLED"
    assert await keyspace.leases() == {}
    assert await keyspace.speculation() == {}


@pytest.mark.parametrize("who", ["settle", "decide"])
async def test_an_expired_lease_is_given_back_once(keyspace: Keyspace, who: str) -> None:
    await keyspace.workers(1)
    ask, other = await booked(keyspace), await booked(keyspace)
    await keyspace.store.zadd(keyspace.keys.leases, {ask.reservation: 1})
    for number in range(3):
        if who == "settle":
            await keyspace.fleet.bookings.settle("wf-nobody", "finished")
        else:
            await keyspace.done(Question(f"wf-other-{number}", (), 10, 10))
        assert await load(keyspace) == (1_601, 2_000, 1)
    assert set(await keyspace.leases()) == {other.reservation}


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
@pytest.mark.parametrize("started", [False, True])
async def test_failed_and_cancelled_end_at_once(keyspace: Keyspace, outcome: Any, started: bool) -> None:
    await keyspace.workers(1)
    ask = await booked(keyspace)
    if started:
        await keyspace.fleet.bookings.settle(ask.reservation, "started")
    assert await keyspace.fleet.bookings.settle(ask.reservation, outcome) == "SETTLED"
    assert await load(keyspace) == (0, 0, 0)
    assert await keyspace.leases() == {}
    assert await keyspace.store.zcard(keyspace.keys.leases) == 0
    assert await keyspace.speculation() == {}


@pytest.mark.parametrize(
    ("outcome", "left"),
    [("failed", True), ("cancelled", True), ("unsent", True), ("started", False), ("due", False), ("finished", False)],
)
async def test_an_unknown_id_leaves_a_tombstone_only_if_it_ended(keyspace: Keyspace, outcome: Any, left: bool) -> None:
    await keyspace.workers(1)
    assert await keyspace.fleet.bookings.settle("wf-1", outcome) == "UNKNOWN"
    leases = await keyspace.leases()
    assert ("wf-1" in leases) is left
    if left:
        assert leases["wf-1"].stage == Stage.TOMBSTONE
        expiry = cast("float", await keyspace.store.zscore(keyspace.keys.leases, "wf-1"))
        assert expiry == pytest.approx(time.time() * 1000 + 60_000, abs=9_000)
        assert await keyspace.fleet.bookings.settle("wf-1", outcome) == "SAME"
        await keyspace.store.zadd(keyspace.keys.leases, {"wf-1": 1})
        await keyspace.fleet.bookings.settle("wf-2", "finished")
        assert await keyspace.leases() == {}


async def test_a_worker_that_joined_anew_owes_nothing(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    ask = await booked(keyspace)
    await keyspace.change(1, epoch=2, prefill_tokens=5, decode_tokens=0, in_flight=1)
    assert await keyspace.fleet.bookings.settle(ask.reservation, "started") == "STARTED"
    assert await keyspace.fleet.bookings.settle(ask.reservation, "failed") == "SETTLED"
    assert await load(keyspace) == (5, 0, 1)
    assert await keyspace.speculation() == {}


async def test_a_forgotten_worker_is_not_made_again(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    ask = await booked(keyspace)
    await cast("Any", keyspace.store.hdel(keyspace.keys.load, "w1.0"))
    assert await keyspace.fleet.bookings.settle(ask.reservation, "finished") == "SETTLED"
    assert await keyspace.rows() == {}


async def test_what_settle_refuses(keyspace: Keyspace) -> None:
    with pytest.raises(BadArgument):
        await keyspace.fleet.bookings.settle("wf-1", cast("Any", "gone"))
    with pytest.raises(BadArgument):
        await keyspace.fleet.bookings.settle("", "failed")
