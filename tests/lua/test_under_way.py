"""A decision counts part of the running prefill as done, by time and speed, and never more than may be under way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from tests.support.fleet.reporting_worker import blocks

from warmfleet.fleet import Lease, Renewal
from warmfleet_worker.protocol import wire

if TYPE_CHECKING:
    from tests.support.fleet.keyspace import Keyspace
    from tests.support.fleet.reporting_worker import ReportingWorker

SPEED = 10_000  # tokens a second: keyspace.py
WRAPS = 2**32


def clock_ms() -> int:
    return int(time.time() * 1000) % WRAPS


async def wait_s(keyspace: Keyspace) -> float:
    """Seconds of work that are ahead of a request with one token to compute on w1, without their price."""
    _, rows = await keyspace.fleet.queue.explain(keyspace.ask(extra_tokens=1))
    return rows[0].cost_s / keyspace.fleet.constants.weights.wait_price


async def waits(keyspace: Keyspace, since_ms: int, left: int) -> bool:
    """Whether the worker's work ahead is the time for ``left`` tokens, less the time until the decision."""
    began = time.monotonic()
    await keyspace.change(1, since_ms=(clock_ms() - since_ms) % WRAPS)
    found = await wait_s(keyspace)
    return left / SPEED - (time.monotonic() - began) - 0.01 < found < left / SPEED + 0.01


@pytest.mark.parametrize(
    ("since_s", "under_way", "left"),
    [
        (0.0, 5_000, 6_000),  # the prefill began this moment
        (0.3, 5_000, 3_000),
        (9.0, 5_000, 1_000),  # the engine may stand still: all other booked work counts
        (9.0, 0, 6_000),
        (-60.0, 5_000, 1_000),  # the clock went back
    ],
)
async def test_what_is_done_goes_by_time_up_to_one_prefill(
    keyspace: Keyspace, since_s: float, under_way: int, left: int
) -> None:
    await keyspace.workers(1, prefill_tokens=6_000, under_way_tokens=under_way)
    assert await waits(keyspace, int(since_s * 1000), left)


async def test_the_clock_of_a_row_may_wrap(keyspace: Keyspace) -> None:
    """The counter of milliseconds wraps after 49.7 days."""
    await keyspace.workers(1, prefill_tokens=6_000, under_way_tokens=6_000)
    assert await waits(keyspace, 200, 4_000)


async def test_foreign_prefill_is_not_known_to_be_done(keyspace: Keyspace) -> None:
    await keyspace.workers(1, foreign_prefill_tokens=6_000, under_way_tokens=6_000)
    await keyspace.change(1, since_ms=(clock_ms() - 9_000) % WRAPS)
    assert await wait_s(keyspace) == pytest.approx(6_000 / SPEED, abs=0.01)


async def test_a_prefill_begins_on_an_idle_worker_or_when_another_ends(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    asks = [keyspace.ask(extra_tokens=tokens) for tokens in (500, 800, 300)]
    begun = clock_ms()
    for ask in asks:
        await keyspace.fleet.bookings.decide(ask)
    row = await keyspace.row(1)
    assert row.under_way_tokens == 500, "the others wait"
    assert (row.since_ms - begun) % WRAPS < 2_000
    await keyspace.change(1, since_ms=(begun - 5_000) % WRAPS)
    for ask, under_way in zip(asks, (500, 300, 0), strict=True):  # at most as much as the prefill before
        await keyspace.fleet.bookings.settle(ask.reservation, "started")
        row = await keyspace.row(1)
        assert row.under_way_tokens == under_way
        assert (row.since_ms - begun) % WRAPS < 2_000


@pytest.mark.parametrize(
    ("ended_before_s", "under_way"),
    [
        (-60.0, 1_200),  # both prefills ended in this moment: in one step, so the engine may do as much in the next
        (5.0, 400),  # only the second prefill
    ],
)
async def test_as_much_as_ended_together_may_be_under_way(
    keyspace: Keyspace, ended_before_s: float, under_way: int
) -> None:
    await keyspace.workers(1)
    asks = [keyspace.ask(extra_tokens=tokens) for tokens in (800, 400, 5_000)]
    for ask in asks:
        await keyspace.fleet.bookings.decide(ask)
    await keyspace.fleet.bookings.settle(asks[0].reservation, "started")
    await keyspace.change(1, under_way_tokens=800, since_ms=(clock_ms() - int(1_000 * ended_before_s)) % WRAPS)
    await keyspace.fleet.bookings.settle(asks[1].reservation, "started")
    assert (await keyspace.row(1)).under_way_tokens == under_way


async def test_after_a_long_prefill_half_as_much_may_be_under_way(keyspace: Keyspace) -> None:
    """A short prompt may have ended alone in its step, and more of them may be computed in the next step."""
    await keyspace.workers(1)
    asks = [keyspace.ask(extra_tokens=tokens) for tokens in (800, 100, 5_000)]
    for ask in asks:
        await keyspace.fleet.bookings.decide(ask)
    for ask, under_way in zip(asks, (800, 400), strict=False):
        await keyspace.change(1, since_ms=(clock_ms() - 5_000) % WRAPS)
        await keyspace.fleet.bookings.settle(ask.reservation, "started")
        assert (await keyspace.row(1)).under_way_tokens == under_way


async def test_a_request_that_was_never_sent_ends_no_prefill(keyspace: Keyspace) -> None:
    """Of two home pools the dearer one gives its booking back: its engine goes on with what it has."""
    await keyspace.workers(1, speed_tps=0)
    first, *others = [keyspace.ask(extra_tokens=tokens) for tokens in (500, 800, 300)]
    for ask in (first, *others):
        await keyspace.fleet.bookings.decide(ask)
    since_ms = (clock_ms() - 4_000) % WRAPS
    await keyspace.change(1, since_ms=since_ms)
    for ask in others:
        assert await keyspace.fleet.bookings.settle(ask.reservation, "unsent") == "SETTLED"
        row = await keyspace.row(1)
        assert (row.since_ms, row.under_way_tokens, row.speed_tps) == (since_ms, 500, 0)
    await keyspace.fleet.bookings.settle(first.reservation, "started")
    row = await keyspace.row(1)
    assert row.speed_tps == pytest.approx(500 / 4, rel=0.2), "the speed is told by the time since the engine began"
    assert (row.prefill_tokens, row.in_flight) == (0, 1)


async def test_of_a_request_that_was_never_sent_nothing_stays_under_way(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    first, second = keyspace.ask(extra_tokens=500), keyspace.ask(extra_tokens=300)
    await keyspace.fleet.bookings.decide(first)
    await keyspace.fleet.bookings.decide(second)
    await keyspace.fleet.bookings.settle(first.reservation, "unsent")
    row = await keyspace.row(1)
    assert (row.prefill_tokens, row.under_way_tokens) == (300, 300)
    await keyspace.fleet.bookings.settle(second.reservation, "unsent")
    row = await keyspace.row(1)
    assert (row.prefill_tokens, row.under_way_tokens, row.in_flight) == (0, 0, 0)


async def test_a_first_token_that_a_renewal_tells_counts_as_well(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    assert await keyspace.fleet.bookings.renew(
        [Renewal("wf-a", "w1.0", 700, 900), Renewal("wf-b", "w1.0", 400, 900)]
    ) == (
        0,
        2,
        0,
    )
    assert (await keyspace.row(1)).under_way_tokens == 700
    await keyspace.fleet.bookings.renew([Renewal("wf-a", "w1.0", 700, 900, started=True)])
    row = await keyspace.row(1)
    assert (row.prefill_tokens, row.under_way_tokens) == (400, 400)


async def test_a_lease_that_expired_takes_what_it_had_under_way_with_it(keyspace: Keyspace) -> None:
    """A worker that kept the expired lease's work would seem to have done more than it got, and beat idle workers."""
    await keyspace.workers(2)
    dead, alive = (
        keyspace.ask(extra_tokens=50_000, exclude=("w2.0",)),
        keyspace.ask(extra_tokens=500, exclude=("w2.0",)),
    )
    for ask in (dead, alive):
        await keyspace.fleet.bookings.decide(ask)
    await keyspace.change(1, since_ms=(clock_ms() - 9_000) % WRAPS)
    await keyspace.store.zadd(keyspace.keys.leases, {dead.reservation: 1})
    assert (await keyspace.fleet.bookings.decide(keyspace.ask(extra_tokens=1))).worker_id == "w2.0"
    row = await keyspace.row(1)
    assert (row.prefill_tokens, row.under_way_tokens) == (500, 500)
    assert await wait_s(keyspace) > 0


async def test_progress_tells_that_a_prefill_ended(reporter: ReportingWorker) -> None:
    row = await reporter.row()
    lease = Lease(row.epoch, row.slot, 300, 50, 64, 364, 0, "s.0", (blocks(1),))
    await reporter.store.hset(reporter.keys.lease, "wf-a", lease.pack())
    packed = bytearray(row.pack("s.0"))
    packed[4:8] = (500).to_bytes(4, "big")
    await reporter.store.hset(reporter.keys.load, "s.0", bytes(packed))
    await reporter.send("progress", wire.dumps([["wf-a", 64, 364]]))
    await reporter.applied()
    row = await reporter.row()
    assert (row.prefill_tokens, row.under_way_tokens) == (200, 200)
    assert (clock_ms() - row.since_ms) % WRAPS < 5_000


async def test_of_several_prompts_only_those_that_ended_count(reporter: ReportingWorker) -> None:
    """A request with several prompts tells the end of each; the others may be computed in a later step."""
    row = await reporter.row()
    lease = Lease(row.epoch, row.slot, 300, 50, 0, 300, 0, "s.0", (blocks(1),))
    await reporter.store.hset(reporter.keys.lease, "wf--a", lease.pack())
    packed = bytearray(row.pack("s.0"))
    packed[4:8] = (1_000).to_bytes(4, "big")
    await reporter.store.hset(reporter.keys.load, "s.0", bytes(packed))
    await reporter.send("progress", wire.dumps([["wf--a", 0, 100]]))
    await reporter.applied()
    row = await reporter.row()
    assert (row.prefill_tokens, row.under_way_tokens) == (900, 100)


async def test_progress_of_one_step_counts_together(reporter: ReportingWorker) -> None:
    row = await reporter.row()
    for name, tokens in (("wf-a", 300), ("wf-b", 200), ("wf-c", 900)):
        lease = Lease(row.epoch, row.slot, tokens, 50, 64, tokens + 64, 0, "s.0", (blocks(1),))
        await reporter.store.hset(reporter.keys.lease, name, lease.pack())
    packed = bytearray(row.pack("s.0"))
    packed[4:8] = (1_400).to_bytes(4, "big")
    await reporter.store.hset(reporter.keys.load, "s.0", bytes(packed))
    await reporter.send("progress", wire.dumps([["wf-a", 64, 364], ["wf-b", 64, 264]]))
    await reporter.applied()
    row = await reporter.row()
    assert (row.prefill_tokens, row.under_way_tokens) == (900, 500)
