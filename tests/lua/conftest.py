"""A fleet without streams, for the scripts of the read path."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.fleet.keyspace import Keyspace
from tests.support.fleet.reporting_worker import ReportingWorker

if TYPE_CHECKING:
    import redis.asyncio as aioredis

    from warmfleet.fleet import Fleet


@pytest.fixture
def keyspace(store: aioredis.Redis, fleet: Fleet) -> Keyspace:
    """An empty fleet on each of the two servers."""
    return Keyspace(store, fleet)


@pytest.fixture
async def reporter(store: aioredis.Redis, fleet: Fleet) -> ReportingWorker:
    """A worker that has joined through its stream."""
    reporter = ReportingWorker(store, fleet)
    await reporter.join()
    await reporter.applied()
    return reporter
