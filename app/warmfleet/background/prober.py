"""When a worker is tested and what becomes of it: at join, once in a while, and at once when it is suspected.

Only a failed test downgrades a worker. What requests show (``lua/apply.lua``) makes it suspected and nothing worse:
whoever sends requests can make tests happen, as many as the waits here allow, and no more.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING

from warmfleet.background import announced as brought
from warmfleet.background.prewarm import Warmer
from warmfleet.background.probe import Result, SelfTest
from warmfleet.background.supervisor import stop
from warmfleet.errors import WarmfleetError
from warmfleet.fleet import Flag, WorkerView
from warmfleet.protocol.wire import WORKER_TTL_SECONDS

if TYPE_CHECKING:
    from warmfleet.engines.upstream import Upstream
    from warmfleet.metrics import Metrics
    from warmfleet.pools.fleet_view import View
    from warmfleet.pools.pool import Pool, Pools
    from warmfleet.settings import Settings

logger = logging.getLogger("warmfleet.background.prober")

AT_ONCE = 8  # probes of one replica: at most as many tiny requests, and as many of Redis's connections
BACKOFF_S = 5.0, 60.0  # after a failure, doubled
SOON_S = 1.0  # after a first probe that learned nothing: until it is proven a worker is routed by load only
SUSPECTED_S = 5.0, 600.0  # after a result, before a suspicion is looked into; doubled while suspicions prove wrong
IDENTITY_WAIT_S = 5.0  # a join waits so long for a tokenizer that loads; then its scheme alone is tested
SPREAD = 1.2  # of the interval between replicas: mostly one of them comes first
URGENCY = {"pending": 0, "url": 2, "identity": 2, "proven": 3}


class Prober:
    """Tests who is due. Two replicas may test the same worker: harmless; the first result ends the reason for it."""

    def __init__(self, pools: Pools, upstream: Upstream, settings: Settings, metrics: Metrics) -> None:
        self._pools = pools
        self._selftest = SelfTest(upstream, settings)
        self.warmer = Warmer(upstream, settings, metrics)
        self._settings = settings
        self._metrics = metrics
        self._interval_s = settings.probe_interval_s * random.uniform(1.0, SPREAD)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._next: dict[str, tuple[float, float]] = {}  # worker and identity -> when again, the wait after that
        self._first: dict[str, float] = {}  # when it was first seen here

    async def round(self) -> None:
        """Start a probe for every worker that needs one, the most urgent first; does not wait for them."""
        now, seen = time.monotonic(), set[str]()
        due: list[tuple[float, str, Pool, WorkerView]] = []
        for pool in self._pools.all:
            for worker in pool.view.workers:
                name = _name(pool, worker)
                seen.add(name)
                self._first.setdefault(name, now)
                late = self._next.get(name, (0.0, 0.0))[0] <= now
                if name not in self._running and late and self._due(name, pool.view, worker):
                    urgency = 1 if worker.record.get("suspect") else URGENCY[worker.proof]
                    due.append((urgency + random.random(), name, pool, worker))
        for _, name, pool, worker in sorted(due)[: AT_ONCE - len(self._running)]:
            self._running[name] = asyncio.ensure_future(self._probe(name, pool, worker))
        self._next = {name: value for name, value in self._next.items() if name in seen}
        self._first = {name: value for name, value in self._first.items() if name in seen}

    async def close(self) -> None:
        await stop(list(self._running.values()))
        await self.warmer.close()

    # ------------------------------------------------ who is due

    def _due(self, name: str, view: View, worker: WorkerView) -> bool:
        alive = worker.heartbeat_age_s is not None and worker.heartbeat_age_s <= WORKER_TTL_SECONDS
        if not alive or not worker.load.flags & Flag.SERVER or worker.server is None:
            return False
        record, ready = worker.record, _identity_ready(view)
        age = worker.probed_age_s if worker.probed_age_s is not None else float("inf")
        tries = int(record.get("tries") or 0)
        if worker.proof == "warming":
            return False  # somebody is at it
        if worker.proof == "pending":
            hopeless = view.identity is None and view.reference is None and not self._settings.tokenizer
            return ready or hopeless or time.monotonic() - self._first[name] >= IDENTITY_WAIT_S
        if worker.proof == "url":
            return age >= _backoff(BACKOFF_S, tries - 1)
        differs = _differs(view, worker)
        if differs:
            return record.get("reason") != differs
        if not ready:
            return False  # nothing could be learned
        if worker.proof == "identity":
            return record.get("cause") in ("differs", "untested") or age >= _backoff(BACKOFF_S, tries - 1)
        if record.get("suspect"):
            return age >= _backoff(SUSPECTED_S, tries)
        if self._settings.tokenizer and name not in self._next:
            return True  # proven against what workers bring, perhaps; not against what is in use here
        return 0 < self._interval_s <= age

    # ------------------------------------------------ one probe

    async def _probe(self, name: str, pool: Pool, worker: WorkerView) -> None:
        proven = False
        try:
            result = await self._test(pool, worker)
            self._metrics.probes.labels(result.proof or "none").inc()
            proven = result.proof == "proven"
            if not (proven and await self.warmer.takes(pool, worker)):
                await self._tell(pool, worker, result)
        except WarmfleetError as error:
            logger.info("probe of %s: %s", worker.worker_id, error)
        finally:
            wait = self._next.get(name, (0.0, SOON_S))[1]
            again = BACKOFF_S[0] if proven else min(max(2 * wait, BACKOFF_S[0]), BACKOFF_S[1])
            self._next[name] = time.monotonic() + wait, again
            del self._running[name]

    async def _test(self, pool: Pool, worker: WorkerView) -> Result:
        """What is to be recorded; an empty proof: nothing."""
        differs, ready = _differs(pool.view, worker), _identity_ready(pool.view)
        if differs and worker.proof in ("proven", "identity"):
            return Result("identity", "differs", differs)
        texts = ready and not differs
        result = await self._selftest.run(pool, worker, texts=texts)
        if result.proof == "identity" and result.cause in ("text", "chat", "tokens"):
            result = await self._selftest.run(pool, worker, texts=texts)  # two texts, not one
        if worker.proof not in ("pending", "url"):
            return Result("", result.cause, result.reason) if result.proof == "url" else result
        if result.proof == "" and result.cause:  # its URL answers, and nothing more is known
            return Result("identity", result.cause, result.reason)
        if differs and result.proof != "url":
            return Result("identity", "differs", differs)
        comes = self._settings.tokenizer or "tokenizer.json" in ((worker.server or {}).get("artifacts") or {})
        if result.proof == "proven" and not texts and comes:  # else only engines tell its ids, and they are right
            return Result("identity", "untested", "no tokenizer is loaded here yet to test its text with")
        return result

    async def _tell(self, pool: Pool, worker: WorkerView, result: Result) -> None:
        """A failure counts for nothing if another replica's result came first."""
        nonce, cause, told = str(worker.record.get("nonce")), result.cause, ""
        if result.proof:
            probed_ms = int(worker.record.get("probed") or 0)
            told = await pool.fleet.prove(worker.worker_id, nonce, result.proof, result.reason, cause, probed_ms)
        if told in ("STALE", "TAKEN"):
            return
        same = result.proof == worker.proof and cause == (worker.record.get("cause") or "")
        harmless = result.proof in ("proven", "") or cause == "untested"
        level = logging.DEBUG if same else logging.INFO if harmless else logging.WARNING
        logger.log(level, "worker %s at %s: %s %s", worker.worker_id, worker.url, result.proof, result.reason)
        if told == "DOWNGRADED":
            self._metrics.downgrades.labels(cause).inc()


def _name(pool: Pool, worker: WorkerView) -> str:
    """One incarnation under one identity: with another one everything is to be tested anew."""
    known = pool.view.identity.key if pool.view.identity else ""
    return f"{pool.tag} {worker.worker_id} {worker.record.get('nonce')} {known}"


def _identity_ready(view: View) -> bool:
    """What most workers bring is loaded here; or what the settings name."""
    known = view.identity
    return known is not None and (view.reference is None or known.key == brought.key(view.reference))


def _differs(view: View, worker: WorkerView) -> str:
    """Why its prompts are others than the fleet's, by what it brought; empty if they are not."""
    names = brought.differences(worker, view.reference) if view.reference else []
    return f"its {' and '.join(names)} differ{'s' if len(names) == 1 else ''} from the fleet's" if names else ""


def _backoff(bounds: tuple[float, float], times: int) -> float:
    return min(bounds[0] * 2.0 ** max(0, min(times, 16)), bounds[1])
