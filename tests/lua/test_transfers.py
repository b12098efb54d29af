"""How an engine hands blocks to others: a join keeps it in the record, and a malformed one costs only itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.support.fleet.reporting_worker import ReportingWorker
from tests.support.fleet.transfers import PREFILL

from warmfleet.fleet import Flag
from warmfleet.protocol.transfer import read_transfer

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from warmfleet.fleet import Fleet


async def test_a_join_tells_how_blocks_are_handed_over(store: aioredis.Redis, fleet: Fleet) -> None:
    reporter = ReportingWorker(store, fleet)
    await reporter.join(transfer=PREFILL.as_dict())
    await reporter.applied()
    assert (await reporter.record())["transfer"] == PREFILL.as_dict()
    [view] = await fleet.workers.read()
    assert view.transfer == read_transfer(PREFILL.as_dict())
    await reporter.join("n2")
    await reporter.applied()
    assert "transfer" not in await reporter.record(), "its next process has no connector"
    [view] = await fleet.workers.read()
    assert view.transfer is None


@pytest.mark.parametrize(
    "wrong",
    [
        "prefill",
        [],
        {"same": []},
        {"same": {}},
        {"same": ["x"]},
        {"same": {"a": {"b": "c"}}},
        {"role": None},
        {"engine_id": {"a": "b"}},
        {"port": "5600"},
        {"port": 1.5},
        {"kin": 2**32},
        {"kin": -1},
        {"recomputes": True},
    ],
)
async def test_a_malformed_transfer_is_left_out_and_the_worker_joins(
    store: aioredis.Redis, fleet: Fleet, wrong: Any
) -> None:
    reporter = ReportingWorker(store, fleet)
    await reporter.join(transfer=PREFILL.as_dict() | wrong if isinstance(wrong, dict) else wrong)
    await reporter.applied()
    assert (await reporter.row()).flags & Flag.CLOSED
    assert "transfer" not in await reporter.record()


async def test_what_a_script_takes_and_no_router_reads_costs_the_transfer_only(
    store: aioredis.Redis, fleet: Fleet
) -> None:
    reporter = ReportingWorker(store, fleet)
    cases: list[dict[str, Any]] = [{"role": "boss"}, {"host": "\x1b[31m"}, {"kin": 5}, {"port": 2**31 - 1}]
    for number, wrong in enumerate(cases):
        await reporter.join(f"n{number}", transfer=PREFILL.as_dict() | wrong)
        await reporter.applied()
        assert "transfer" in await reporter.record()
        [view] = await fleet.workers.read()
        assert view.transfer is None
