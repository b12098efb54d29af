"""Labels: what a join announces of them, and what a worker costs that lacks a preferred one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.fleet.reporting_worker import ReportingWorker

from warmfleet.fleet import Flag

if TYPE_CHECKING:
    import redis.asyncio as aioredis
    from tests.support.fleet.keyspace import Keyspace

    from warmfleet.fleet import Fleet


async def test_a_worker_without_the_label_costs_so_many_seconds_more(keyspace: Keyspace) -> None:
    await keyspace.workers(3)
    before = {row.worker_id: row for row in (await keyspace.fleet.queue.explain(keyspace.ask(extra_tokens=900)))[1]}
    keyspace.fleet.use(label_prices={1: 0.05, 3: 0.07})
    chosen, rows = await keyspace.fleet.queue.explain(keyspace.ask(extra_tokens=900))
    assert chosen == "w2.0"
    assert {row.worker_id: row.terms.label_s for row in rows} == {"w1.0": 0.05, "w2.0": 0.0, "w3.0": 0.07}
    for row in rows:
        assert row.cost_s == pytest.approx(before[row.worker_id].cost_s + row.terms.label_s, abs=2e-6)
    assert (await keyspace.fleet.bookings.decide(keyspace.ask(extra_tokens=900))).worker_id == "w2.0"


async def test_a_prompt_that_takes_longer_to_compute_than_the_price_stays_where_it_is_held(keyspace: Keyspace) -> None:
    await keyspace.workers(2)
    session = keyspace.chain(100)
    await keyspace.hold(1, session)
    keyspace.fleet.use(label_prices={1: 0.1})
    assert (await keyspace.fleet.bookings.decide(keyspace.ask(session))).worker_id == "w1.0"
    assert (await keyspace.fleet.bookings.decide(keyspace.ask(session[: 8 * 8]))).worker_id == "w2.0"


async def test_a_join_tells_labels(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = ReportingWorker(store, fleet)
    await reporter.join(labels={"zone": "eu-1a", "1": "h100"})
    await reporter.applied()
    assert (await reporter.record())["labels"] == {"zone": "eu-1a", "1": "h100"}
    await reporter.join("n2")
    await reporter.applied()
    assert "labels" not in await reporter.record(), "its next process has none"


@pytest.mark.parametrize(
    "labels",
    [
        ["zone"],
        "zone=a",
        {"zone": 1},
        {"zone": ""},
        {"zone": "a b"},
        {"z=one": "a"},
        {"zone": "x" * 64},
        {"zone": {"a": "b"}},
        {str(number): "a" for number in range(9)},
        {},
    ],
)
async def test_malformed_labels_are_left_out_and_the_worker_joins(
    store: aioredis.Redis, fleet: Fleet, labels: object
) -> None:
    reporter = ReportingWorker(store, fleet)
    await reporter.join(labels=labels)
    await reporter.applied()
    assert (await reporter.row()).flags & Flag.CLOSED
    assert "labels" not in await reporter.record()
