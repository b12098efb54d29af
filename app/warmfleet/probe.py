"""Join is proved: a random prompt sent to the announced URL must show up in that worker's own stream of blocks."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import orjson

from warmfleet.blocks import Hasher
from warmfleet.errors import WarmfleetError
from warmfleet.fleet import Flag, WorkerView
from warmfleet.maintenance import stop
from warmfleet.prompt import PATHS
from warmfleet_worker.wire import HASH_BYTES, WORKER_TTL_SECONDS, Scheme, WireError

if TYPE_CHECKING:
    from warmfleet.metrics import Metrics
    from warmfleet.pool import Pool, Pools
    from warmfleet.settings import Settings
    from warmfleet.upstream import Upstream

logger = logging.getLogger("warmfleet.probe")

TOKEN_IDS = range(3, 256)  # in every vocabulary; two blocks of 16 have 250 random bits
POLL_S = 0.05
BACKOFF_S = 5.0, 60.0
MAX_ANSWER_S = 30.0  # an engine's first request may compile something


@dataclass(frozen=True, slots=True)
class Result:
    proof: str
    reason: str = ""


class Prober:
    """Probes what is pending, and what failed with back-off. Two replicas may probe the same worker: harmless."""

    def __init__(self, pools: Pools, upstream: Upstream, settings: Settings, metrics: Metrics) -> None:
        self._pools = pools
        self._upstream = upstream
        self._settings = settings
        self._metrics = metrics
        self._running: dict[str, asyncio.Task[None]] = {}
        self._next: dict[str, tuple[float, float]] = {}  # incarnation -> when again, the wait after that

    async def round(self) -> None:
        """Start a probe for every worker that needs one; does not wait for them."""
        now, seen = time.monotonic(), set()
        for pool in self._pools.all:
            for worker in pool.view.workers:
                name = f"{pool.tag} {worker.worker_id} {worker.record.get('nonce')}"
                seen.add(name)
                due = self._next.get(name, (0.0, 0.0))[0] <= now
                if name not in self._running and due and _needs_probe(worker):
                    self._running[name] = asyncio.ensure_future(self._probe(name, pool, worker))
        self._next = {name: value for name, value in self._next.items() if name in seen}

    async def close(self) -> None:
        await stop(list(self._running.values()))

    async def _probe(self, name: str, pool: Pool, worker: WorkerView) -> None:
        try:
            result = await self._ask(pool, worker)
            nonce = str(worker.record.get("nonce"))
            if result.proof != "proven" and await self._proven_meanwhile(pool, worker.worker_id, nonce):
                return  # by another replica: its success says more than our time-out
            self._metrics.probes.labels(result.proof).inc()
            if result.proof != worker.proof or result.proof == "proven":
                level = logging.INFO if result.proof == "proven" else logging.WARNING
                logger.log(level, "worker %s at %s: %s %s", worker.worker_id, worker.url, result.proof, result.reason)
            await pool.fleet.prove(worker.worker_id, nonce, result.proof, result.reason)
        except WarmfleetError as error:
            logger.info("probe of %s: %s", worker.worker_id, error)
        finally:
            wait = self._next.get(name, (0.0, BACKOFF_S[0]))[1]
            self._next[name] = time.monotonic() + wait, min(2 * wait, BACKOFF_S[1])
            del self._running[name]

    async def _ask(self, pool: Pool, worker: WorkerView) -> Result:
        try:
            hasher = Hasher(Scheme.from_dict(worker.record["scheme"]))
        except (WireError, KeyError, TypeError) as error:
            return Result("identity", f"its scheme is not known here: {error}")
        size = hasher.scheme.block_tokens
        limit = int(worker.record.get("max_model_len") or 0) or 2 * size + 2
        blocks = min(2, (limit - 2) // size)
        ids = [random.choice(TOKEN_IDS) for _ in range(blocks * size + 1)]
        result = await self._send(pool, worker, ids)
        if result is not None:
            return result
        packed = hasher.chain(ids).hashes
        hashes = [packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]
        deadline = time.monotonic() + self._settings.probe_timeout_s
        while time.monotonic() < deadline:
            if hashes and all(await pool.fleet.holds(worker.load.slot, hashes)):
                return Result("proven")
            await asyncio.sleep(POLL_S)
        return Result("identity", "the probe's blocks did not appear in its stream: routed by load only")

    async def _send(self, pool: Pool, worker: WorkerView, ids: list[int]) -> Result | None:
        """None if the worker answered as a completion should."""
        if not worker.url or not worker.models:
            return Result("url", "its server announced no URL or no model")
        headers = {"Content-Type": "application/json"}
        if self._settings.worker_api_key:
            headers["Authorization"] = f"Bearer {self._settings.worker_api_key}"
        if worker.worker_id in pool.view.ranks:
            headers["X-data-parallel-rank"] = pool.view.ranks[worker.worker_id]
        body = orjson.dumps({"model": worker.models[0], "prompt": ids, "max_tokens": 1, "temperature": 0})
        try:
            async with asyncio.timeout(MAX_ANSWER_S):
                answer = await self._upstream.post(worker.url, PATHS["completions"], body, headers)
        except (WarmfleetError, TimeoutError) as error:
            return Result("url", f"no answer: {error}"[:200])
        status = answer.status
        answer.close()
        if status == 200:
            return None
        if status in (401, 403):
            return Result("identity", f"it answered {status}: set WARMFLEET_WORKER_API_KEY; routed by load only")
        return Result("url", f"it answered {status} to a completion")

    async def _proven_meanwhile(self, pool: Pool, worker_id: str, nonce: str) -> bool:
        return any(
            worker.worker_id == worker_id and worker.record.get("nonce") == nonce and worker.proof == "proven"
            for worker in await pool.fleet.workers()
        )


def _needs_probe(worker: WorkerView) -> bool:
    alive = worker.heartbeat_age_s is not None and worker.heartbeat_age_s <= WORKER_TTL_SECONDS
    return (
        alive
        and worker.proof in ("pending", "identity", "url")
        and bool(worker.load.flags & Flag.SERVER)
        and worker.server is not None
    )
