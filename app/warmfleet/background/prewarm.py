"""Sends a worker with an empty cache the most shared prefixes of its model's prompts, before the worker takes requests.

The replica whose probe of the worker passed does this before it records that result. Its claim in the worker's record
keeps other replicas away meanwhile. A prefix is sent with the salt and the adapter of its prompts, so only requests
with that salt and adapter find its blocks. After any failure the worker soon takes requests with a cold cache.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any

import orjson

from warmfleet.background.probe import current, headers_for
from warmfleet.background.supervisor import stop
from warmfleet.errors import WarmfleetError
from warmfleet.fleet import Proof
from warmfleet.prompt.prefix_trie import whole
from warmfleet.prompt.request import PATHS

if TYPE_CHECKING:
    from warmfleet.engines.engine_client import EngineClient
    from warmfleet.fleet import WorkerView
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.prompt.prefix_trie import Node
    from warmfleet.settings import Settings

logger = logging.getLogger("warmfleet.background.prewarm")

AT_ONCE = 8  # most workers that one replica warms at a time; further ones start cold
PROMPT_S = 8.0  # longest wait for the answer to one prefix
CLAIM_S = 10.0  # lifetime of one replica's right to warm a worker, renewed before each prefix, in case the replica dies
IN_ALL_S = 30.0  # longest warming of one worker
EMPTY = 0.1  # largest used share of a cache that counts as empty
SILENT = ("slow", "failed")  # results of a worker that did not answer; such a worker is probed again
FILL = 0.5  # largest share of a cache that warming fills, because more would evict the first prefixes


class Prewarmer:
    """Sends popular prefixes, one after the other, to workers whose probe has just passed."""

    def __init__(self, client: EngineClient, settings: Settings, metrics: Metrics) -> None:
        self._client = client
        self._settings = settings
        self._metrics = metrics
        self._running: set[asyncio.Task[None]] = set()

    async def takes(self, pool: Pool, worker: WorkerView) -> bool:
        """Begin to warm a worker, and record afterwards that its probe passed; return False if it is not warmed: then
        the caller records the probe. Raises FleetUnavailable."""
        limit = self._settings.warm_prefixes
        if not limit or not worker.state.unproved or len(self._running) >= AT_ONCE:
            return False
        fresh = await current(pool, worker)
        nodes = pool.uses.most_used(limit)
        if fresh is None or not nodes or not _others(pool, worker) or not _empty(fresh):
            return False
        owner, nonce = secrets.token_hex(8), str(worker.record.get("nonce"))
        if await self._claim(pool, worker, owner) != "OK":
            return False  # another replica warms the worker, or has warmed it already since it joined
        task = asyncio.ensure_future(self._warm(pool, worker, nodes, owner, nonce))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return True

    async def close(self) -> None:
        """Stop all warming; other replicas probe the unfinished workers once the claims of this replica expire."""
        await stop(list(self._running))

    async def _warm(self, pool: Pool, worker: WorkerView, nodes: list[Node], owner: str, nonce: str) -> None:
        began, sent = time.monotonic(), list[int]()
        try:
            async with asyncio.timeout(IN_ALL_S):
                result = await self._send(pool, worker, nodes, owner, sent)
        except TimeoutError:
            result = "slow"
        except WarmfleetError as error:
            result = "failed"
            logger.info("worker %s is not warmed: %s", worker.worker_id, error.message)
        self._metrics.warmings.labels(result).inc()
        level = logging.INFO if result == "done" else logging.WARNING
        tokens, seconds = sum(sent), time.monotonic() - began
        logger.log(level, "worker %s: warming %s, %d tokens in %.1f s", worker.worker_id, result, tokens, seconds)
        proof = "pending" if result in SILENT else "proven"
        try:
            told = await pool.fleet.probes.prove(worker.worker_id, nonce, Proof(proof, "", owner=owner))
            logger.info("worker %s at %s: %s (%s)", worker.worker_id, worker.url, proof, told)
        except WarmfleetError as error:
            logger.warning("worker %s is tested again when its warming expires: %s", worker.worker_id, error)

    async def _claim(self, pool: Pool, worker: WorkerView, owner: str) -> str:
        nonce = str(worker.record.get("nonce"))
        return await pool.fleet.probes.warming(worker.worker_id, nonce, owner, int(1000 * CLAIM_S))

    async def _send(self, pool: Pool, worker: WorkerView, nodes: list[Node], owner: str, sent: list[int]) -> str:
        """Send the prefixes; return the label for the metric. sent: list that gets each answered prefix's tokens."""
        scheme, capacity, result = worker.record["scheme"], worker.load.capacity_blocks, "done"
        room = int(FILL * capacity * scheme["block_tokens"])
        for node in nodes:
            body = _body(pool, worker, node)
            if body is None or node.tokens > room - sum(sent):
                continue
            if _drained(pool, worker):
                return "lost"  # the operator has drained the worker: it gets no more requests
            if not _others(pool, worker):
                return "needed"  # a cold worker that takes requests now is better than none
            if await self._claim(pool, worker, owner) != "OK":
                return "lost"
            headers = headers_for(pool, worker, self._settings) | {"X-Request-Id": "unbooked.warming"}
            async with asyncio.timeout(PROMPT_S):
                status, _ = await self._client.post(worker.url, PATHS["completions"], body, headers)
            if status >= 500:
                return "failed"
            if status == 200:
                sent.append(node.tokens)
                self._metrics.warmed_tokens.inc(node.tokens)
            else:
                result = "refused"  # only this prefix failed: its adapter may have been unloaded
        return result


def _others(pool: Pool, worker: WorkerView) -> bool:
    """Whether another worker can take the model's requests during the warming."""
    return any(other.routable and other.worker_id != worker.worker_id for other in pool.view.workers)


def _drained(pool: Pool, worker: WorkerView) -> bool:
    return any(other.worker_id == worker.worker_id and other.draining for other in pool.view.workers)


def _empty(worker: WorkerView) -> bool:
    return worker.load.blocks <= EMPTY * worker.load.capacity_blocks


def _body(pool: Pool, worker: WorkerView, node: Node) -> bytes | None:
    """Build the body of a request with this prefix as its prompt, for an answer of one token.

    None if the worker does not serve the prefix's adapter, or if less than one block fits into the worker's context.
    """
    ids, salt, lora = whole(node)
    size = int(worker.record["scheme"]["block_tokens"])
    longest = int(worker.record.get("max_model_len") or 0) or len(ids) + 1
    ids = ids[: longest - 1]
    body: dict[str, Any] = {"model": worker.models[0], "prompt": ids, "max_tokens": 1, "temperature": 0}
    if len(ids) < size:
        return None
    if lora is not None:
        names = pool.view.names
        if names.paths.get(lora[0]) != lora[1] or worker.worker_id in names.lacking(lora[0]):
            return None
        body["model"] = lora[0]
    if salt is not None:
        body["cache_salt"] = salt
    return orjson.dumps(body)
