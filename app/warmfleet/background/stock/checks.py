"""Checks the engines without the plugin that the operator lists; registers those that pass as workers.

Every replica checks the engines of its own list, and registers them under the same names, so that an engine is one
worker whichever replicas list it. The fleet has the engines of all lists. An engine that leaves a list drains and is
forgotten a round later, unless another replica lists it. An engine that the fleet has already, by its plugin or under
another URL, does not become a second worker (``known_engines``).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import re
import secrets
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from warmfleet.background.stock import engine_facts
from warmfleet.background.stock.engine_facts import EngineFacts
from warmfleet.background.stock.known_engines import KnownEngines
from warmfleet.background.stock.readiness import Readiness
from warmfleet.errors import BadArgument, UpstreamGone, WarmfleetError
from warmfleet.fleet import Check
from warmfleet.pools.stalled_requests import STILL_S
from warmfleet.prompt.block_hashes import TEXT_SCHEME
from warmfleet.protocol.labels import read_labels
from warmfleet.protocol.pools import weight
from warmfleet.protocol.wire import Scheme, default_none_hash, tag_of
from warmfleet.settings import without_userinfo

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from warmfleet.background.stock.engine_list import EngineList, ListedEngine
    from warmfleet.background.stock.readiness import Ready
    from warmfleet.engines.allowed_addresses import Addresses
    from warmfleet.engines.engine_client import EngineClient
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools
    from warmfleet.settings import Settings
    from warmfleet.timing import Timing

logger = logging.getLogger("warmfleet.background.stock.checks")

#: Most checks that run at a time; more run if a round in which no engine answers would else exceed ROUND_S. The
#: next round begins after the slowest check, and a worker expires 15 s after its last check.
CHECKS_AT_ONCE = 64
ROUND_S = 9.0
#: Most engines with a failed last check that one round checks again, in turn, besides all other engines. They run at
#: once, so dead engines lengthen a round by at most one time-out. Of 200 dead engines, each is asked once a minute.
FAILED_IN_A_ROUND = 32
TOLD_LATELY = 0.8  # share of the check interval for which no replica reads an engine's load after another has read it
NAME_CHARACTERS = 64
#: Most blocks of an engine's mirror in Redis (the blocks that its cache likely holds), and the mirror's size if the
#: cache's is unknown. With blocks of 16 tokens, these 5 million tokens exceed what a GPU holds and take at most 60 MB.
MAX_MIRROR_BLOCKS = 320_000
REASON_CHARACTERS = 200  # most characters of a failed check's reason, in its worker's record
MAX_COUNT = 2**31  # largest context length in tokens that is accepted from an engine


@dataclass(frozen=True, slots=True)
class CheckedEngine:
    """The last check that an engine passed.

    facts_at: when ``facts`` were read; failing_since: when the first check after this one failed, or None (monotonic).
    """

    pool: Pool
    record: dict[str, Any]
    capacity_blocks: int
    facts: EngineFacts
    facts_at: float
    failing_since: float | None = None


class LockedError(ValueError):
    """The engine refuses this replica's key, or the lack of a key."""


class StockEngines:
    """Checks each engine once per round. An engine that passes is registered again, which is its heartbeat."""

    def __init__(
        self,
        pools: Pools,
        client: EngineClient,
        engines: EngineList,
        addresses: Addresses,
        settings: Settings,
        timing: Timing,
    ) -> None:
        self._pools = pools
        self._client = client
        self._list = engines
        self._addresses = addresses
        self._settings = settings
        self._timing = timing
        self._replica = secrets.token_hex(8)
        self._checked: dict[str, CheckedEngine] = {}  # by URL
        self._leaving: dict[str, float | None] = {}  # URL that left the list -> when Redis was first told, or None
        self._failed: dict[str, None] = {}  # URLs whose last check failed, the longest ago first
        #: Listed URL whose engine is registered as another worker -> id of that worker, last passed check of the URL.
        self._standing_back: dict[str, tuple[str, CheckedEngine]] = {}
        self._gate = asyncio.Semaphore(CHECKS_AT_ONCE)  # limits the checks of the current round
        self._headers: dict[str, str] = {}
        if settings.worker_api_key:
            self._headers["Authorization"] = f"Bearer {settings.worker_api_key}"
        self._known = KnownEngines(pools, client)
        self._readiness = Readiness(client, self._headers, timing.health_interval_s)

    async def round(self) -> bool:
        """Check the listed engines and those that leave; of engines whose last check failed, only FAILED_IN_A_ROUND.

        Returns whether an engine passed whose last check failed. Raises FleetUnavailable if Redis does not take the
        result, and BadArgument if a list cannot be read.
        """
        listed, before = await self._list.look(), self._passing()
        urls = {engine.url for engine in listed}
        self._leaving = {url: self._leaving.get(url) for url in self._checked.keys() - urls}
        self._addresses.name([*urls, *self._leaving])
        self._standing_back = {url: known for url, known in self._standing_back.items() if url in urls}
        self._readiness.keep(urls)
        await self._known.look()
        self._failed = {url: None for url in self._failed if url in urls or url in self._leaving}
        at_once = math.ceil((len(urls) + len(self._leaving)) * self._timing.check_timeout_s / ROUND_S)
        self._gate = asyncio.Semaphore(max(CHECKS_AT_ONCE, at_once))
        again = set(islice((url for url in self._failed if url in urls), FAILED_IN_A_ROUND))
        results = await asyncio.gather(
            *[self._check(engine) for engine in listed if engine.url in again],
            *[self._in_gate(partial(self._check, engine)) for engine in listed if engine.url not in self._failed],
            *[self._in_gate(partial(self._let_go, url)) for url in self._leaving],
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        for problem in self._list.problems:
            raise BadArgument(problem)
        return not self._passing() <= before

    def _passing(self) -> set[str]:
        return {url for url, engine in self._checked.items() if engine.failing_since is None}

    async def _in_gate(self, work: Callable[[], Awaitable[None]]) -> None:
        async with self._gate:
            await work()

    async def _check(self, listed: ListedEngine) -> None:
        url, now = listed.url, time.monotonic()
        last, aside = self._checked.get(url), self._standing_back.pop(url, None)
        self._failed.pop(url, None)
        try:
            engine = await self._look(listed, aside[1] if aside else last)
        except (WarmfleetError, ValueError, KeyError, TypeError) as error:
            await self._not_passed(url, last, error, now)
            return
        key = await self._known.key_of(url, engine.facts.identity)
        if holder := self._known.holder(url, key, engine.pool.tag, worker_id(url)):
            if aside is None or aside[0] != holder:
                logger.info(
                    "engine %s is the worker %s: it is booked under that name only", without_userinfo(url), holder
                )
            self._standing_back[url] = holder, engine
            await self._stand_back(url, holder, last)
            return
        ready = await self._ready(url, engine, last)
        if last is None or last.failing_since is not None:
            logger.info("engine %s answers: a worker of %s", without_userinfo(url), engine.pool.tag)
        self._checked[url] = engine
        check = Check("PASSED", self._replica, paused=ready.paused, wait_s=ready.wait_s)
        await engine.pool.fleet.workers.register(worker_id(url), engine.record, engine.capacity_blocks, check)
        if last is not None and last.pool is not engine.pool:  # so that the old pool sends it nothing more
            await last.pool.fleet.workers.register(
                worker_id(url), last.record, last.capacity_blocks, Check("FAILED", self._replica)
            )

    async def _not_passed(self, url: str, last: CheckedEngine | None, error: Exception, now: float) -> None:
        """Take an engine out after a failed check, unless the check was only slow because the engine has other work."""
        slow = isinstance(error, UpstreamGone) and error.late
        if slow and last is not None and last.failing_since is None and self._works(url, last.pool):
            logger.info("engine %s is slow to answer its check, but is at work", without_userinfo(url))
            check = Check("PASSED", self._replica)
            await last.pool.fleet.workers.register(worker_id(url), last.record, last.capacity_blocks, check)
            return
        self._known.release(url)
        self._failed[url] = None
        if last is None:
            logger.warning("engine %s is not usable yet: %s", without_userinfo(url), error)
            return
        if last.failing_since is None:
            logger.warning("engine %s does not answer: %s", without_userinfo(url), error)
            last = replace(last, failing_since=now)
        self._checked[url] = last
        told = Check("SLOW" if slow else "FAILED", self._replica, now - (last.failing_since or now))
        check = told._replace(cause=_cause(error), reason=_reason(error))
        await last.pool.fleet.workers.register(worker_id(url), last.record, last.capacity_blocks, check)

    def _works(self, url: str, pool: Pool) -> bool:
        """Whether the engine has sent something to this replica lately, or may do so soon, so that it is not dead."""
        return pool.tries.sends(worker_id(url), time.perf_counter(), STILL_S)

    async def _stand_back(self, url: str, holder: str, last: CheckedEngine | None) -> None:
        """Leave the engine to the worker ``holder``; this URL's own worker, if any, ends once it has no requests."""
        if last is None or worker_id(url) == holder:
            self._checked.pop(url, None)
            return
        check = Check("LEAVING", self._replica, self._timing.health_interval_s)
        found = await last.pool.fleet.workers.register(worker_id(url), last.record, last.capacity_blocks, check)
        if found.word in ("LISTED", "UP") or (found.in_flight and found.word in ("LEAVING", "OUT")):
            self._checked[url] = last
            return
        if found.word != "GONE":
            await last.pool.fleet.upkeep.forget(worker_id(url))
        self._checked.pop(url, None)

    async def _ready(self, url: str, engine: CheckedEngine, last: CheckedEngine | None) -> Ready:
        """Ask whether the engine takes requests. After a failed check or a restart, all PAUSE_PATHS are tried again."""
        anew = last is None or last.failing_since is not None or last.facts.started != engine.facts.started
        read = self._known.told_s(engine.pool.tag, worker_id(url)) >= TOLD_LATELY * self._timing.health_interval_s
        return await self._readiness.ask(url, anew=anew, read=read)

    async def _let_go(self, url: str) -> None:
        """Drain an engine that is not listed here now, and forget it once it has no requests, unless others list it."""
        engine, now, since = self._checked[url], time.monotonic(), self._leaving[url]
        self._known.release(url)
        if since is None:
            logger.info("engine %s is no longer listed: it leaves unless others list it", without_userinfo(url))
        answers = url not in self._failed and await self._client.healthy(url, self._timing.check_timeout_s)
        if not answers:
            self._failed[url] = None
        check = Check("LEAVING" if answers else "FAILED", self._replica, 0.0 if since is None else now - since)
        found = await engine.pool.fleet.workers.register(worker_id(url), engine.record, engine.capacity_blocks, check)
        gone = found.word in ("LEAVING", "OUT")
        if since is None or (gone and found.in_flight):  # replicas that list it have one round to register it
            self._leaving[url] = now if since is None else since
            return
        if gone:
            await engine.pool.fleet.upkeep.forget(worker_id(url))
            logger.info("engine %s has left", without_userinfo(url))
        self._checked.pop(url, None)
        self._failed.pop(url, None)

    async def _look(self, listed: ListedEngine, last: CheckedEngine | None) -> CheckedEngine:
        url = listed.url
        status, body = await self._client.get(url, "/v1/models", self._headers, self._timing.check_timeout_s)
        if status in (401, 403):
            raise LockedError(f"/v1/models answered {status}")
        if status != 200:
            raise ValueError(f"/v1/models answered {status}")
        listed_models = orjson.loads(body)["data"]
        models = [str(entry["id"]) for entry in listed_models]
        pool = self._pool_of(url, models, last)
        facts, facts_at = (EngineFacts(), 0.0) if last is None else (last.facts, last.facts_at)
        due = time.monotonic() - facts_at >= self._timing.facts_interval_s
        if last is None or last.failing_since is not None or due:
            facts, facts_at = await self._facts(url, None if last is None else last.facts), time.monotonic()
        # An engine without the plugin reports no hashes, so it is enough that all routers hash alike. Without a
        # tokenizer in the settings, routers hash the text of a prompt.
        scheme = TEXT_SCHEME
        if self._settings.tokenizer:
            scheme = Scheme("sha256_cbor", default_none_hash("sha256_cbor"), facts.block_tokens)
        tokens = listed.cache_tokens or facts.cache_tokens
        blocks = min(MAX_MIRROR_BLOCKS, max(1, tokens // scheme.block_tokens)) if tokens else MAX_MIRROR_BLOCKS
        record = {
            "scheme_id": scheme.scheme_id,
            "scheme": scheme.as_dict(),
            "url": url,
            "models": models,
            "server_id": worker_id(url),
            "started": facts.started,
            "identity": facts.identity,
            "labels": read_labels(listed.labels),
            **_told_of(listed_models),
        }
        return CheckedEngine(pool, record, blocks, facts, facts_at)

    def _pool_of(self, url: str, models: Sequence[str], last: CheckedEngine | None) -> Pool:
        """Choose the pool of an engine with these models; if none has such a name, its pool so far. Raises ValueError.

        Of several pools, rendezvous hashing of the URL chooses one, so that all replicas take the same pool, and a new
        or removed pool moves few engines.
        """
        served = self._pools.served
        tags = {*models, *map(tag_of, models)}
        model = next((model for name, model in served.items() if name in tags), None)
        if model is None and last is not None and last.pool in self._pools.all:
            return last.pool
        if model is None and len(served) == 1:
            (model,) = served.values()
        if model is None:
            raise ValueError(f"it serves {', '.join(models)[:200]}, none of WARMFLEET_MODELS")
        serving = [pool for pool in model.pools if pool.tag not in model.draining | model.moving] or model.pools
        return max(serving, key=lambda pool: weight(pool.tag, url))

    async def _facts(self, url: str, known: EngineFacts | None) -> EngineFacts:
        """Read the facts that the engine reports. If the engine does not answer, return the known facts, because all
        replicas must have equal facts; without known facts, raise UpstreamError or ValueError."""
        try:
            timeout_s = self._timing.check_timeout_s
            status, page = await self._client.get(url, "/metrics", self._headers, timeout_s)
            if status >= 500:
                raise ValueError(f"/metrics answered {status}")  # noqa: TRY301
            if status != 200:
                return EngineFacts()
            facts = engine_facts.from_metrics(page)
            if facts.asks_info:
                status, page = await self._client.get(url, engine_facts.TGI_FACTS, self._headers, timeout_s)
                facts = engine_facts.from_info(facts, page if status == 200 else b"")
        except (WarmfleetError, ValueError):
            if known is None:
                raise
            return known
        return facts


def _cause(error: Exception) -> str:
    """Return the cause of a failed check, as a key of STOCK_REMEDIES in background/worker_words."""
    if isinstance(error, UpstreamGone):
        return "late" if error.late else "away"
    return "locked" if isinstance(error, LockedError) else "ill"


def _reason(error: Exception) -> str:
    if isinstance(error, WarmfleetError | ValueError):
        return str(error)[:REASON_CHARACTERS].rstrip(".")
    return "/v1/models answers otherwise than OpenAI's API"


def _told_of(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what an engine's /v1/models tells besides names: longest context, and the base model of each adapter."""
    told: dict[str, Any] = {}
    limit = max((_count(entry.get("max_model_len")) for entry in entries), default=0)
    if limit:
        told["max_model_len"] = limit
    parents = {str(entry["id"]): str(entry["parent"]) for entry in entries if entry.get("parent")}
    return told | {"parents": parents} if parents else told


def _count(value: Any) -> int:
    return value if type(value) is int and 0 < value < MAX_COUNT else 0


def worker_id(url: str) -> str:
    """Return the worker id of a stock engine: host and port, and the URL's digest if it has a path or a long host."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{parts.hostname or ''}-{port}")
    if len(name) > NAME_CHARACTERS or parts.path.strip("/"):
        name = f"{name[-(NAME_CHARACTERS - 9) :]}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"
    return name
