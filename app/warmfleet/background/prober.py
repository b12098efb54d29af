"""Probes each worker after it joined, every ``probe_interval_s``, and soon after it was suspected.

Only a failed probe downgrades a worker. An engine's answer or stream that differs from what the router expected
(``lua/parts/apply/progress.lua``) only makes the worker suspected. So a client that sends odd requests can cause
probes, at most as often as ``suspected_s`` allows, but no downgrade.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING

from warmfleet.background import announced
from warmfleet.background.prewarm import Prewarmer
from warmfleet.background.probe import Probe, Result
from warmfleet.background.supervisor import stop
from warmfleet.errors import WarmfleetError
from warmfleet.fleet import Proof, WorkerState, WorkerView

if TYPE_CHECKING:
    from warmfleet.engines.engine_client import EngineClient
    from warmfleet.metrics import Metrics
    from warmfleet.pools.fleet_view import View
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools
    from warmfleet.settings import Settings
    from warmfleet.timing import Timing

logger = logging.getLogger("warmfleet.background.prober")

AT_ONCE = 64  # most probes that one replica runs at a time, each with small requests and a connection to Redis
SOON_S = 1.0  # pause after a first probe that learned nothing; short, because an unproved worker takes no requests
SPREAD = 1.2  # largest random factor on a replica's probe interval: the replica with the shortest probes for all
#: The states in which a probe can be due, the most urgent first.
URGENCY = {
    WorkerState.PENDING: 0,
    WorkerState.SUSPECTED: 1,
    WorkerState.UNREACHABLE: 2,
    WorkerState.LOAD_ONLY: 2,
    WorkerState.PROVEN: 3,
}


class Prober:
    """Probes the workers that are due. Two replicas may probe one worker at a time; only the first result counts."""

    def __init__(
        self, pools: Pools, client: EngineClient, settings: Settings, timing: Timing, metrics: Metrics
    ) -> None:
        self._pools = pools
        self._worker_probe = Probe(client, settings, timing.blocks_timeout_s)
        self.prewarmer = Prewarmer(client, settings, metrics)
        self._settings = settings
        self._timing = timing
        self._metrics = metrics
        self._interval_s = timing.probe_interval_s * random.uniform(1.0, SPREAD)
        self._running: dict[str, asyncio.Task[None]] = {}
        #: A worker, as ``round`` names it -> when its next probe may begin, and the pause after that probe.
        self._next: dict[str, tuple[float, float]] = {}
        self._first_seen: dict[str, float] = {}  # by the same names, monotonic seconds
        self._begun: dict[tuple[str, str], float] = {}  # per tag and worker_id: when its last probe began

    async def round(self) -> None:
        """Start a probe of every worker that is due, the most urgent first; does not wait for their results.

        Of equally urgent workers, worker ids never probed come first, then those probed longest ago. So a worker that
        answers slowly, and joins again and again under its id, delays only itself.
        """
        now, seen, names = time.monotonic(), set[str](), set[tuple[str, str]]()
        due: list[tuple[int, float, float, str, Pool, WorkerView]] = []
        for pool in self._pools.all:
            identity = pool.view.identity.key if pool.view.identity else ""
            for worker in pool.view.workers:
                # With another tokenizer (identity) in use here the worker gets a new name, so it is probed again.
                name = f"{pool.tag} {worker.worker_id} {worker.record.get('nonce')} {identity}"
                seen.add(name)
                names.add((pool.tag, worker.worker_id))
                self._first_seen.setdefault(name, now)
                rested = self._next.get(name, (0.0, 0.0))[0] <= now
                if name not in self._running and rested and self._due(name, pool.view, worker):
                    begun = self._begun.get((pool.tag, worker.worker_id), 0.0)
                    due.append((URGENCY[worker.state], begun, random.random(), name, pool, worker))
        for _, begun, _, name, pool, worker in sorted(due)[: AT_ONCE - len(self._running)]:
            if begun and len(self._running) >= AT_ONCE / 2:
                continue  # half of AT_ONCE is kept for workers never probed, which slow probes of others must not delay
            self._begun[pool.tag, worker.worker_id] = now
            self._running[name] = asyncio.ensure_future(self._probe(name, pool, worker))
        self._next = {name: value for name, value in self._next.items() if name in seen}
        self._first_seen = {name: value for name, value in self._first_seen.items() if name in seen}
        self._begun = {name: value for name, value in self._begun.items() if name in names}

    async def close(self) -> None:
        await stop(list(self._running.values()))
        await self.prewarmer.close()

    # ------------------------------------------------ which workers are due

    def _due(self, name: str, view: View, worker: WorkerView) -> bool:
        if worker.state not in URGENCY or worker.server is None:
            return False  # silent, joining without its API server, draining, being warmed, or without the plugin
        record, ready = worker.record, _identity_ready(view)
        age = worker.probed_age_s if worker.probed_age_s is not None else float("inf")
        tries = int(record.get("tries") or 0)
        if worker.state is WorkerState.PENDING:
            hopeless = view.identity is None and view.reference is None and not self._settings.tokenizer
            return ready or hopeless or time.monotonic() - self._first_seen[name] >= self._timing.identity_wait_s
        if worker.state is WorkerState.UNREACHABLE:
            return age >= _backoff(self._timing.backoff_s, tries - 1)
        differs = _differs(view, worker)
        if differs:
            return record.get("reason") != differs
        if not ready:
            return False  # without a loaded identity a probe would learn nothing
        if worker.state is WorkerState.LOAD_ONLY:
            if record.get("cause") == "unmatched":
                return False  # its engine reported that it keeps no blocks, which holds until it joins again
            return record.get("cause") in ("differs", "untested") or age >= _backoff(self._timing.backoff_s, tries - 1)
        if worker.state is WorkerState.SUSPECTED:
            return age >= _backoff(self._timing.suspected_s, tries)
        if self._settings.tokenizer and name not in self._next:
            return True  # the worker may be proven for its own tokenizer, but not for the tokenizer of the settings
        return age >= self._interval_s

    # ------------------------------------------------ one probe

    async def _probe(self, name: str, pool: Pool, worker: WorkerView) -> None:
        proven = False
        try:
            result = await self._result(pool, worker)
            self._metrics.probes.labels(result.proof or "none").inc()
            proven = result.proof == "proven"
            if not (proven and await self.prewarmer.takes(pool, worker)):
                await self._record(pool, worker, result)
        except WarmfleetError as error:
            logger.info("probe of %s: %s", worker.worker_id, error)
        finally:
            wait = self._next.get(name, (0.0, SOON_S))[1]
            first_s, most_s = self._timing.backoff_s
            again = first_s if proven else min(max(2 * wait, first_s), most_s)
            self._next[name] = time.monotonic() + wait, again
            del self._running[name]

    async def _result(self, pool: Pool, worker: WorkerView) -> Result:
        """Probe the worker and return the result; if its proof is empty, nothing is to be recorded."""
        differs, ready = _differs(pool.view, worker), _identity_ready(pool.view)
        proved_before = not worker.state.unproved
        if differs and proved_before:
            return Result("identity", "differs", differs)
        texts = ready and not differs
        result = await self._worker_probe.run(pool, worker, texts=texts)
        if not proved_before and result.proof != "url" and not (result.witnessed or self._settings.lists_workers):
            # An answer came, but nothing shows that this worker sent it: any service of the network may answer.
            return Result("pending", result.cause or "silent", result.reason or "its stream tells nothing of a probe")
        if result.cause in ("text", "chat", "image", "tokens"):
            result = await self._worker_probe.run(pool, worker, texts=texts)  # only a second failure in a row counts
        if proved_before:
            return Result("", result.cause, result.reason) if result.proof == "url" else result
        if result.proof == "" and result.cause:  # the worker's URL answers, and the probe learned nothing more
            return Result("identity", result.cause, result.reason)
        if differs and result.proof != "url":
            return Result("identity", "differs", differs)
        comes = self._settings.tokenizer or "tokenizer.json" in ((worker.server or {}).get("artifacts") or {})
        # If neither the settings nor the worker bring a tokenizer, engines make the token ids: no text needs a test.
        if result.proof == "proven" and not texts and comes:
            return Result("identity", "untested", "no tokenizer is loaded here yet to test its text with")
        return result

    async def _record(self, pool: Pool, worker: WorkerView, result: Result) -> None:
        """Write the result to Redis and log it. A failure is dropped if another replica's result came first."""
        nonce, cause, answer = str(worker.record.get("nonce")), result.cause, ""
        if result.proof:
            probed_ms = int(worker.record.get("probed") or 0)
            proof = Proof(result.proof, result.reason, cause, probed_ms)
            answer = await pool.fleet.probes.prove(worker.worker_id, nonce, proof)
        if answer in ("STALE", "TAKEN"):
            return
        same = result.proof == worker.proof and cause == (worker.record.get("cause") or "")
        harmless = result.proof in ("proven", "") or cause in ("untested", "unmatched")
        level = logging.DEBUG if same else logging.INFO if harmless else logging.WARNING
        reason = f" ({result.reason})" if result.reason else ""
        logger.log(level, "worker %s at %s: %s%s", worker.worker_id, worker.url, result.proof, reason)
        if answer == "DOWNGRADED":
            self._metrics.downgrades.labels(cause).inc()


def _identity_ready(view: View) -> bool:
    """Whether the tokenizer (identity) of most workers, or that of the settings, is loaded in this replica."""
    identity, reference = view.identity, view.reference
    return identity is not None and (reference is None or identity.key == view.identity_keys.get(reference.worker_id))


def _differs(view: View, worker: WorkerView) -> str:
    """Name the files or facts in which this worker differs from the worker whose tokenizer is used; empty if none."""
    reference, keys = view.reference, view.identity_keys
    if reference is None or keys.get(worker.worker_id, "") == keys.get(reference.worker_id):
        return ""
    names = announced.differences(worker, reference)
    return f"its {announced.listed(names)} differ{'s' if len(names) == 1 else ''} from the fleet's" if names else ""


def _backoff(bounds: tuple[float, float], times: int) -> float:
    return min(bounds[0] * 2.0 ** max(0, min(times, 16)), bounds[1])
