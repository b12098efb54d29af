"""Rounds that keep the fleet in order: apply events, renew leases, give back leftovers, follow the policy, audit."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from warmfleet.fleet import RENEW_AT_ONCE

if TYPE_CHECKING:
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool, Pools
    from warmfleet.untrusted.template_approval import Templates

logger = logging.getLogger("warmfleet.background.upkeep")

APPLY_INTERVAL_S = 0.05  # less than the plugin's flush of 0.1 s: a block is matched as soon as it is announced
RENEW_INTERVAL_S = 10.0  # a reservation lives 30 s: it survives two renewals that fail
AUDIT_INTERVAL_S = 3_600.0  # of one worker's part of the index; digests find nearly everything within 5 s


async def renew(pools: Pools, metrics: Metrics) -> None:
    """Keep the reservations of running requests; rebuild those that Redis lost."""

    async def one(pool: Pool) -> None:
        reservations = list(pool.open)
        for start in range(0, len(reservations), RENEW_AT_ONCE):
            batch = reservations[start : start + RENEW_AT_ONCE]
            sent = [one for one in batch if one in pool.open]
            counts = await pool.fleet.renew([pool.open[one] for one in sent])
            for ended in (one for one in sent if one not in pool.open):  # while we renewed: it may be booked anew
                await pool.fleet.settle(ended, "cancelled")
            for result, count in zip(("renewed", "rebuilt", "refused"), counts, strict=True):
                metrics.renewed.labels(result).inc(count)

    await pools.each(one)


async def clear(pools: Pools) -> None:
    """Give back what nobody else will: outcomes that Redis did not take, leases and tickets of replicas that died."""

    async def one(pool: Pool) -> None:
        for reservation, outcome in list(pool.unsettled.items()):
            await pool.fleet.settle(reservation, outcome)
            pool.unsettled.pop(reservation, None)
        await pool.fleet.reap()
        if pool.fleet.limits.max_engine_wait_s:
            await pool.fleet.poll()

    await pools.each(one)


async def follow_policy(pools: Pools) -> None:
    """Choose by the policy that the operator named last, from now on."""

    async def one(pool: Pool) -> None:
        told = await pool.fleet.switched()
        if pool.policy.follow(told):
            logger.warning("%s: the policy is %s now, by %s", pool.tag, pool.policy.name, pool.policy.source)

    await pools.each(one)


async def follow_approvals(pools: Pools, templates: Templates) -> None:
    """Let templates run in this process that the operator approved, and no others. Raises FleetUnavailable.

    Of a model whose approvals cannot be read, those of the last reading stay.
    """

    async def one(pool: Pool) -> None:
        await templates.approve(pool.tag, await pool.fleet.approved())

    await pools.each(one)


async def apply(pools: Pools, metrics: Metrics) -> None:
    """One round of the write path of every model; any number of replicas may do it at once."""

    async def one(pool: Pool) -> None:
        metrics.applied_blocks.inc(await pool.fleet.step())

    await pools.each(one)


async def audit(pools: Pools, metrics: Metrics) -> None:
    """Compare the index with its digests, a piece at a time, until nobody is due. One walk at a time for the fleet."""

    async def one(pool: Pool) -> None:
        walking = True
        while walking:
            step = await pool.fleet.audit(AUDIT_INTERVAL_S)
            metrics.audited_blocks.inc(step.blocks)
            if step.differs:
                metrics.audit_mismatches.inc()
                logger.error("%s: the index of a worker differed from its digest; it is sent anew", pool.tag)
            walking = step.walking
            if walking:
                await asyncio.sleep(pool.fleet.pace.audit_gap_ms / 1000)

    await pools.each(one)
