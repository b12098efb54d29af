"""Copies the numbers of sessions by state from the ledger in Redis into the gauges of /metrics."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from warmfleet.metrics import SESSION_STATES
from warmfleet.pools.reasons import state_of

if TYPE_CHECKING:
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools


async def look(pools: Pools, metrics: Metrics) -> None:
    """Read every model's ledger once. Raises FleetUnavailable if a ledger cannot be read; its last figures stay."""
    await pools.each(partial(_read, metrics=metrics))


async def _read(pool: Pool, metrics: Metrics) -> None:
    if not pool.fleet.constants.sessions.held_max_ms:
        return
    states = Counter(map(state_of, (await pool.fleet.ledger.read()).sessions))
    for state in SESSION_STATES:
        metrics.sessions.labels(state, pool.tag).set(states[state])
