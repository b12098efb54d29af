"""Decisions also count the blocks that a session leaves behind when it moves, and the recent load."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import pytest
from tests.support.fleet.keyspace import BLOCK

from warmfleet.fleet import Renewal

if TYPE_CHECKING:
    from tests.support.fleet.keyspace import Keyspace

    from warmfleet.fleet.bookings import Outcome

WRAPS, ALWAYS, MEMORY_S = 2**32, 65_535, 15.0


def clock_ms() -> int:
    return int(time.time() * 1000) % WRAPS


async def costs(keyspace: Keyspace, chain: bytes, **ask: int) -> dict[str, float]:
    _, rows = await keyspace.fleet.queue.explain(keyspace.ask(chain, **ask))
    return {row.worker_id: 10_000 * row.cost_s for row in rows}  # in tokens: the workers' speed is 10,000


async def test_what_one_worker_alone_holds_has_the_price_of_moving_away(keyspace: Keyspace) -> None:
    await keyspace.workers(4)
    chain = keyspace.chain(100)
    await keyspace.hold(1, chain)
    stay = keyspace.fleet.constants.weights.stay - 1
    assert (await costs(keyspace, chain))["w2.0"] == pytest.approx(1_601 + stay * 1_600, abs=1)
    await keyspace.hold(3, chain, 30)  # others use these 30 blocks, too
    assert await costs(keyspace, chain) == pytest.approx(
        {"w1.0": 1, "w2.0": 1_601 + stay * 1_120, "w3.0": 1_121 + stay * 1_120, "w4.0": 1_601 + stay * 1_120}, abs=1
    )
    await keyspace.hold(3, chain)
    assert await costs(keyspace, chain) == pytest.approx({"w1.0": 1, "w2.0": 1_601, "w3.0": 1, "w4.0": 1_601}, abs=1)


async def test_eviction_has_its_price_only_for_what_is_computed(keyspace: Keyspace) -> None:
    await keyspace.workers(2)
    chain = keyspace.chain(100)
    await keyspace.hold(1, chain)
    await keyspace.hold(2, chain, 50)
    await keyspace.change(1, blocks=8_000)  # 0.4 caches above the mean
    found, price = await costs(keyspace, chain), keyspace.fleet.constants.weights.pressure_price
    assert found["w1.0"] == pytest.approx(1 + 0.4 * price, abs=1)
    await keyspace.change(1, blocks=0)
    await keyspace.change(2, blocks=8_000)
    moved = 801 + (keyspace.fleet.constants.weights.stay - 1) * 800
    assert (await costs(keyspace, chain))["w2.0"] == pytest.approx(moved + 0.4 * price * 801, abs=2)


async def test_a_worker_that_was_busy_lately_has_its_price_for_the_whole_prompt(keyspace: Keyspace) -> None:
    await keyspace.workers(3)
    chain = keyspace.chain(100)
    await keyspace.hold(1, chain, 50)
    await keyspace.hold(2, chain, 50)
    await keyspace.change(1, busy_share=ALWAYS // 2, since_ms=clock_ms())
    found, place = await costs(keyspace, chain), keyspace.fleet.constants.weights.place
    assert found["w1.0"] == pytest.approx(801 + place / 2 * 1_601, rel=0.02)
    assert found["w2.0"] == pytest.approx(801, abs=1)
    assert (await keyspace.fleet.queue.explain(keyspace.ask(chain)))[0] == "w2.0"


async def test_the_share_fades_while_a_worker_is_idle_and_grows_while_it_computes(keyspace: Keyspace) -> None:
    await keyspace.workers(2)
    place, ago_s = keyspace.fleet.constants.weights.place, MEMORY_S / 2
    faded = math.exp(-0.5)
    since = int(clock_ms() - 1_000 * ago_s) % WRAPS
    await keyspace.change(1, busy_share=ALWAYS // 2, since_ms=since)
    await keyspace.change(2, busy_share=ALWAYS // 2, since_ms=since, prefill_tokens=1, under_way_tokens=1)
    found = await costs(keyspace, keyspace.chain(100))
    assert found["w1.0"] == pytest.approx(1_601 * (1 + place * 0.5 * faded), rel=0.02)
    assert found["w2.0"] == pytest.approx(1_601 * (1 + place * (0.5 * faded + 1 - faded)), rel=0.02)


async def test_a_row_without_a_past_has_no_share(keyspace: Keyspace) -> None:
    """A row that was written by hand or by an older replica, or never had a prefill, has a clock that tells nothing."""
    await keyspace.workers(1, prefill_tokens=1_000)
    assert (await costs(keyspace, keyspace.chain(100)))["w1.0"] == pytest.approx(1.5 * 1_000 + 2 * 1_601, abs=1)


async def aged(keyspace: Keyspace, seconds: float, **row: int) -> None:
    await keyspace.change(1, since_ms=int(clock_ms() - 1_000 * seconds) % WRAPS, **row)


@pytest.mark.parametrize("ends", ["started", "finished", "cancelled"])
async def test_the_row_keeps_the_share_of_time_in_prefill(keyspace: Keyspace, ends: Outcome) -> None:
    await keyspace.workers(1)
    await aged(keyspace, MEMORY_S, busy_share=30_000, evicted=7)
    ask = keyspace.ask(keyspace.chain(10))
    await keyspace.fleet.bookings.decide(ask)  # the worker was idle
    row = await keyspace.row(1)
    assert row.busy_share == pytest.approx(30_000 * math.exp(-1), rel=0.01)
    await aged(keyspace, MEMORY_S)
    await keyspace.fleet.bookings.settle(ask.reservation, ends)  # the worker computed
    row = await keyspace.row(1)
    assert row.busy_share == pytest.approx(30_000 * math.exp(-2) + ALWAYS * (1 - math.exp(-1)), rel=0.01)
    assert (row.evicted, row.in_flight) == (7, 1 if ends == "started" else 0)


async def test_what_is_decided_while_a_prefill_runs_changes_no_share(keyspace: Keyspace) -> None:
    await keyspace.workers(1)
    await aged(keyspace, 1.0, busy_share=30_000, prefill_tokens=500, in_flight=1)
    before = await keyspace.row(1)
    await keyspace.fleet.bookings.decide(keyspace.ask(keyspace.chain(10)))
    await keyspace.fleet.bookings.renew([Renewal("wf-lost", "w1.0", 100, 100)])
    after = await keyspace.row(1)
    assert (after.busy_share, after.since_ms) == (before.busy_share, before.since_ms)


async def test_prefills_of_a_millisecond_add_up(keyspace: Keyspace) -> None:
    """A millisecond changes the share by 3 of 65,535 at most, and by a half of that near the balance."""
    await keyspace.workers(1, prefill_tokens=1)
    expected = float(ALWAYS * 9 // 10)
    await keyspace.change(1, in_flight=500, prefill_tokens=400, busy_share=int(expected), since_ms=clock_ms())
    for number in range(300):
        await keyspace.fleet.bookings.renew([Renewal(f"wf-{number}", "w1.0", 1, 1)])
    for number in range(300):
        began = (clock_ms() - 1) % WRAPS
        await keyspace.change(1, since_ms=began)
        await keyspace.fleet.bookings.settle(f"wf-{number}", "started")
        lasted_s = (
            ((await keyspace.row(1)).since_ms - began) % WRAPS / 1000
        )  # longer than a millisecond on a busy machine
        expected = ALWAYS - (ALWAYS - expected) * math.exp(-lasted_s / MEMORY_S)
    assert (await keyspace.row(1)).busy_share == pytest.approx(expected, abs=50)


async def test_a_step_that_goes_on_from_one_that_is_being_reported_is_credited(keyspace: Keyspace) -> None:
    """Two steps of a session overlap: the second one comes while the blocks of the first are being reported."""
    await keyspace.workers(2)
    first = keyspace.chain(100)
    await keyspace.hold(1, first, 80)
    await keyspace.fleet.bookings.decide(keyspace.ask(first, exclude=("w2.0",)))
    second = keyspace.chain(120, head=first)
    for reported in (80, 90, 99):
        await keyspace.hold(1, first, reported)
        _, rows = await keyspace.fleet.queue.explain(keyspace.ask(second))
        found = {row.worker_id: row.matched_tokens // BLOCK for row in rows}
        assert found == {"w1.0": 100, "w2.0": 0}, reported
