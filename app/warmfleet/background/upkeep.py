"""The rounds of background tasks that work on Redis; ``supervisor`` repeats each of them.

They apply events, renew leases, send unsent outcomes of requests, follow the operator's policy and approvals, and audit
the index.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from warmfleet.fleet import RENEW_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Callable

    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools
    from warmfleet.timing import Timing
    from warmfleet.untrusted.template_approval import Templates

logger = logging.getLogger("warmfleet.background.upkeep")

#: Time between two ``apply`` rounds of a pool at rest. After 2.5 s without them, no worker would expire (lua/tick.lua).
REST_STEP_S = 1.0
REST_SHARES = 8  # parts of REST_STEP_S over which the pools at rest are spread, so that Redis gets no bursts
REST_STREAMS = 640  # most event streams of a pool that may rest; of more, each would be read less than once in 4 s


async def renew(pools: Pools, metrics: Metrics) -> None:
    """Extend the leases of running requests, and book again those that Redis has lost."""

    async def renew_model(pool: Pool) -> None:
        names = [renewal.reservation for renewal in pool.reservations.renewals()]
        for start in range(0, len(names), RENEW_AT_ONCE):
            batch = names[start : start + RENEW_AT_ONCE]
            sent = [renewal for name in batch if (renewal := pool.reservations.renewal(name)) is not None]
            counts = await pool.fleet.bookings.renew(sent)
            # ``renew`` may have booked again a request that ended during the call, so its booking is ended here.
            for ended in [renewal for renewal in sent if renewal.reservation not in pool.reservations]:
                await pool.fleet.bookings.settle(ended.reservation, "cancelled")
            for result, count in zip(("renewed", "rebuilt", "refused"), counts, strict=True):
                metrics.renewed.labels(result).inc(count)

    await pools.each(renew_model)


async def tell_again(pools: Pools) -> None:
    """Send Redis again the outcomes of requests that it has not accepted; if there are none, send nothing."""

    async def tell_model(pool: Pool) -> None:
        for reservation, outcome in pool.reservations.outcomes():
            if reservation in pool.reservations:
                continue  # the request was booked again while other outcomes were sent
            await pool.fleet.bookings.settle(reservation, outcome)
            pool.reservations.outcome_taken(reservation)

    if any(pool.reservations.outcomes() for pool in pools.all):
        await pools.each(tell_model)


async def carry_out(pools: Pools, metrics: Metrics) -> None:
    """Tell Redis which failing workers to eject, and which ejected ones serve well again; without any, send nothing."""

    async def tell_model(pool: Pool) -> None:
        for worker_id, good in list(pool.outliers.verdicts.items()):
            told = await pool.fleet.workers.eject(worker_id, good=good)
            del pool.outliers.verdicts[worker_id]
            metrics.ejections.labels(told.lower()).inc()
            if told in ("EJECTED", "REFUSED"):
                why = "half of the workers are ejected already" if told == "REFUSED" else "it fails what others serve"
                logger.warning("%s: worker %s is %s: %s", pool.tag, worker_id, told.lower(), why)

    if any(pool.outliers.verdicts for pool in pools.all):
        await pools.each(tell_model)


async def clear(pools: Pools) -> None:
    """Remove expired leases and dead replicas' queue tickets. Decisions do so, too, but a fleet at rest makes none."""

    async def clear_model(pool: Pool) -> None:
        await pool.fleet.bookings.reap()
        if pool.fleet.constants.limits.max_engine_wait_s:
            await pool.fleet.queue.poll()

    await pools.each(clear_model)


async def follow_policy(pools: Pools) -> None:
    """Use the policy that the operator has set in Redis, from the next decision on."""

    async def follow_model(pool: Pool, ordered: str) -> None:
        if pool.policy.follow(ordered):
            logger.warning("%s: the policy is %s now, by %s", pool.tag, pool.policy.name, pool.policy.source)

    await pools.ask_each(lambda pool: pool.fleet.operator.switched(), follow_model)


async def follow_approvals(pools: Pools, templates: Templates) -> None:
    """Let this process run only those templates that the operator has approved in Redis. Raises FleetUnavailable.

    If the approvals of a model cannot be read, those read last stay in force.
    """

    approved: dict[str, frozenset[str]] = {}

    async def read_model(pool: Pool, digests: frozenset[str]) -> None:
        approved[pool.tag] = digests

    try:
        await pools.ask_each(lambda pool: pool.fleet.operator.approved(), read_model)
    finally:
        # All models at once: no revocation waits until another model's template is compiled.
        await templates.approve(approved, {pool.tag for pool in pools.all})


async def apply(pool: Pool, metrics: Metrics, until_beat: Callable[[], float], timing: Timing) -> None:
    """Apply waiting events of the model's workers to the index (a step), and return when the next step is due.

    A step is due when a worker has written, but not within ``apply_interval_s`` of the last step. While the model is at
    rest, a step is due on the next beat, in ``until_beat`` seconds, or when a request comes. Several replicas may do
    steps at the same time.
    """
    loop = asyncio.get_running_loop()
    due = loop.time() + timing.apply_interval_s
    may_rest = len(pool.view.streams) <= REST_STREAMS
    step = await pool.fleet.upkeep.step(rest=may_rest and pool.idle.lasts, used_permille=pool.used_permille)
    metrics.applied_blocks.inc(step.blocks)
    if step.stirred or pool.reservations:
        pool.idle.wake()
    if may_rest and pool.idle.lasts:
        await pool.idle.wait(until_beat())
        return
    if not step.busy:
        await pool.fleet.upkeep.await_events(pool.view.streams, timing.tick_within_s)
    await asyncio.sleep(due - loop.time())


async def audit(pools: Pools, metrics: Metrics, interval_s: float) -> None:
    """Compare the index of each worker with its digest (checksum), some blocks at a time, until no worker is due.

    One replica audits at a time. interval_s: time between two audits of a worker.
    """

    async def audit_model(pool: Pool) -> None:
        walking = True
        while walking:
            step = await pool.fleet.upkeep.audit(interval_s)
            metrics.audited_blocks.inc(step.blocks)
            if step.differs:
                metrics.audit_mismatches.inc()
                logger.error("%s: the index of a worker differed from its digest; it is sent anew", pool.tag)
            walking = step.walking
            if walking:
                await asyncio.sleep(pool.fleet.upkeep.pace.audit_gap_ms / 1000)

    await pools.each(audit_model)
