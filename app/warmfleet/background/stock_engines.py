"""Checks the engines without the plugin that the settings name; registers those that pass as approximate workers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from warmfleet.errors import WarmfleetError
from warmfleet.prompt.block_hashes import TEXT_SCHEME
from warmfleet.protocol.wire import Scheme, default_none_hash

if TYPE_CHECKING:
    from warmfleet.engines.engine_client import EngineClient
    from warmfleet.pools.pool import Pool, Pools
    from warmfleet.settings import Settings

logger = logging.getLogger("warmfleet.background.stock_engines")

HEALTH_INTERVAL_S = 5.0  # each passed check counts as the engine's heartbeat: a third of the workers' TTL of 15 s
CHECK_TIMEOUT_S = 3.0
NAME_CHARACTERS = 64
MIRROR_CHECKPOINTS = 20_000  # of one engine: 320,000 blocks of 16 tokens, more than a GPU holds
MIN_CHECKPOINTS = 256
BLOCKS_PER_CHECKPOINT = 16  # estimate: a long chain has one checkpoint per 20 blocks or so
_BLOCK_SIZE = re.compile(rb'cache_config_info\{[^}]*\bblock_size="(\d+)"')
_BLOCKS = re.compile(rb'cache_config_info\{[^}]*\bnum_gpu_blocks="(\d+)"')


@dataclass(slots=True)
class CheckedEngine:
    """The result of the last check that passed. capacity: how many checkpoints its mirror in Redis may hold.

    healthy: whether the last check passed; earlier results stay here when it fails.
    """

    pool: Pool
    record: dict[str, Any]
    capacity: int
    healthy: bool = True


class StockEngines:
    """Checks each engine once per round. An engine that passes is registered again, which is its heartbeat."""

    def __init__(self, pools: Pools, client: EngineClient, settings: Settings) -> None:
        self._pools = pools
        self._client = client
        self._settings = settings
        self._checked: dict[str, CheckedEngine] = {}

    async def round(self) -> None:
        """Check all engines at once. Raises FleetUnavailable if Redis does not take the result."""
        results = await asyncio.gather(*map(self._check, self._settings.static_workers), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _check(self, url: str) -> None:
        try:
            engine = await self._look(url)
        except (WarmfleetError, ValueError, KeyError, TypeError) as error:
            last = self._checked.get(url)
            if last is None:
                logger.warning("engine %s is not usable yet: %s", url, error)
            elif last.healthy:
                last.healthy = False
                logger.warning("engine %s does not answer: %s", url, error)
            if last is not None:
                await last.pool.fleet.register(worker_id(url), last.record, last.capacity, healthy=False)
            return
        if url not in self._checked or not self._checked[url].healthy:
            logger.info("engine %s serves %s", url, engine.pool.tag)
        self._checked[url] = engine
        await engine.pool.fleet.register(worker_id(url), engine.record, engine.capacity, healthy=True)

    async def _look(self, url: str) -> CheckedEngine:
        headers = {}
        if self._settings.worker_api_key:
            headers["Authorization"] = f"Bearer {self._settings.worker_api_key}"
        status, body = await self._client.get(url, "/v1/models", headers, CHECK_TIMEOUT_S)
        if status != 200:
            raise ValueError(f"/v1/models answered {status}")
        models = [str(entry["id"]) for entry in orjson.loads(body)["data"]]
        pool = next((pool for pool in self._pools.all if pool.name in models), None)
        if pool is None and len(self._pools.all) == 1:
            pool = self._pools.all[0]
        if pool is None:
            raise ValueError(f"it serves {', '.join(models)[:200]}, none of WARMFLEET_MODELS")
        if url in self._checked and self._checked[url].pool is pool and self._checked[url].healthy:
            scheme, capacity = Scheme.from_dict(self._checked[url].record["scheme"]), self._checked[url].capacity
        else:
            scheme, capacity = await self._cache_facts(url, headers)
        record = {
            "scheme_id": scheme.scheme_id,
            "scheme": scheme.as_dict(),
            "url": url,
            "models": models,
            "server_id": worker_id(url),
        }
        return CheckedEngine(pool, record, capacity)

    async def _cache_facts(self, url: str, headers: dict[str, str]) -> tuple[Scheme, int]:
        """The scheme by which the engine's prompts are hashed, and its mirror's capacity in checkpoints.

        An engine without the plugin reports no hashes, so it is enough that all routers hash alike. Without a tokenizer
        in the settings, routers hash the text of a prompt.
        """
        block_tokens, capacity = 16, MIRROR_CHECKPOINTS
        try:
            status, page = await self._client.get(url, "/metrics", headers, CHECK_TIMEOUT_S)
        except WarmfleetError:
            status, page = 0, b""
        if status == 200:
            if size := _BLOCK_SIZE.search(page):
                block_tokens = int(size[1])
            if blocks := _BLOCKS.search(page):
                capacity = min(capacity, max(MIN_CHECKPOINTS, int(blocks[1]) // BLOCKS_PER_CHECKPOINT))
        if not self._settings.tokenizer:
            return TEXT_SCHEME, capacity
        return Scheme("sha256_cbor", default_none_hash("sha256_cbor"), block_tokens), capacity


def worker_id(url: str) -> str:
    """The name of a stock engine: host and port, and a digest of its URL if it has a path or a long host name."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{parts.hostname or ''}-{port}")
    if len(name) > NAME_CHARACTERS or parts.path.strip("/"):
        name = f"{name[-(NAME_CHARACTERS - 9) :]}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
    return name
