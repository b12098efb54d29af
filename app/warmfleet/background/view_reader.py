"""Reads the workers of every model again and again, and loads the tokenizer (identity) that most of them announce.

The tables of a view are derived again only when a worker's standing (``_standing``: all its values but loads and ages)
has changed, because in a fleet at rest only loads and ages change from one reading to the next.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from warmfleet.background import announced
from warmfleet.background.agreement import Agreement
from warmfleet.background.supervisor import stop
from warmfleet.background.vouching import ASK_AFTER_S
from warmfleet.errors import NotFound, WarmfleetError
from warmfleet.fleet.artifacts import BadArtifact
from warmfleet.fleet.image_reports import AT_ONCE as IMAGES_AT_ONCE
from warmfleet.fleet.worker.state import METRIC_LABELS, UNROUTABLE
from warmfleet.pools.capabilities import token_capabilities
from warmfleet.pools.fleet_view import MAX_SCHEMES, view_of
from warmfleet.pools.served_models import all_of, as_answered
from warmfleet.pools.served_names import misnamed
from warmfleet.prompt.block_hashes import TEXT_SCHEME, Hasher
from warmfleet.protocol.wire import Scheme, WireError
from warmfleet.untrusted.tokenizer_trial import Refused

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine, Mapping, Sequence

    from warmfleet.fleet import WorkerView
    from warmfleet.metrics import Metrics
    from warmfleet.pools.fleet_view import View
    from warmfleet.pools.identities import Identities
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools
    from warmfleet.prompt.prompt_identity import Identity
    from warmfleet.settings import Settings
    from warmfleet.timing import Timing

logger = logging.getLogger("warmfleet.background.view_reader")

MAX_FAILED_LOADS = 256
#: Most pools that are read at once, and the pause before the next ones. Each reading takes a quarter of a millisecond
#: of this process, so 64 readings at once would keep every request waiting.
AT_ONCE, TURN_S = 8, 0.05
IMAGE_PAGES = 4  # most pages of reports about images in a round, so that a new replica has read all after 32 rounds


class ViewReader:
    """Keeps every pool's view (list of workers) fresh, and loads tokenizers (identities) in the background."""

    def __init__(
        self, pools: Pools, identities: Identities, settings: Settings, timing: Timing, metrics: Metrics
    ) -> None:
        self._pools = pools
        self._identities = identities
        self._settings = settings
        self._interval_s = timing.view_interval_s
        self._rest_s = 2 * timing.view_interval_s  # time between two readings of a pool without requests
        self._load_retry_s = timing.load_retry_s
        self._metrics = metrics
        self._agreement = Agreement(metrics)
        self._groupings: dict[str, announced.Grouping] = {}
        self._hashers: dict[int, Hasher] = {}
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._not_before: dict[str, float] = {}
        #: Keys of identities whose files cannot be used: identities of other workers are preferred.
        self._unreadable: set[str] = set()
        #: Tag -> the workers' values (``_standing``) from which a view was last derived, and the latest view. Only for
        #: views with the identity that their workers announce: any other identity may change at the next reading.
        self._derived: dict[str, tuple[list[tuple[object, ...]], View]] = {}

    async def round(self) -> bool:
        """Read the workers of every pool, except of pools at rest that were read lately; return whether any was read.

        Raises FleetUnavailable if a pool cannot be read.
        """
        pools = [pool for pool in self._pools.all if not self._may_rest(pool)]
        if pools:
            await self._read(pools)
        return bool(pools)

    def _may_rest(self, pool: Pool) -> bool:
        """Whether the last reading of this pool need not be renewed yet, because the pool is at rest.

        A pool with a worker that misses heartbeats does not rest, because ``vouching`` must ask the worker first.
        """
        until_s = self._rest_s - self._interval_s / 2
        return pool.idle.lasts and pool.view_age_s < until_s and pool.fleet.workers.quiet_s < ASK_AFTER_S - self._rest_s

    async def refresh(self) -> None:
        """Read the workers of every pool once. Raises FleetUnavailable if a pool cannot be read."""
        await self._read(self._pools.all)

    async def _read(self, pools: Sequence[Pool]) -> None:
        turns = [pools[start : start + AT_ONCE] for start in range(0, len(pools), AT_ONCE)]

        async def read(turn: int) -> None:
            await asyncio.sleep(turn * TURN_S)
            workers = as_answered({pool.fleet.workers.reading(): pool for pool in turns[turn]}, self._refresh)
            await all_of([workers, *[self._learn(pool) for pool in turns[turn] if pool.view.images is not None]])

        try:
            await all_of(map(read, range(len(turns))))
        finally:
            views, tags = [pool.view for pool in self._pools.all], {pool.tag for pool in self._pools.all}
            for gone in (self._derived.keys() | self._groupings.keys()) - tags:
                self._derived.pop(gone, None)
                self._groupings.pop(gone, None)
                self._agreement.forget(gone)
            self._identities.keep({view.identity.key for view in views if view.identity is not None})
            self._hashers = {hasher.scheme.scheme_id: hasher for view in views for hasher in view.hashers}
            self._metrics.unreadable_records.set(sum(pool.fleet.workers.records.unreadable for pool in self._pools.all))

    async def _refresh(self, pool: Pool, reading: list[Any]) -> None:
        workers = await pool.fleet.workers.look(reading)
        standing = [_standing(worker) for worker in workers]
        before, view = self._derived.get(pool.tag, ([], None))
        if view is None or view is not pool.view or standing != before:
            pool.show(self._derive(pool, workers, standing))
            self._count_workers(pool)
        else:
            view = replace(view, workers=tuple(workers), read_at=time.monotonic())
            self._derived[pool.tag] = standing, view
            pool.show(view)
        others = [other.view.workers for other in self._pools.named(pool.name) if other is not pool]
        self._metrics.given_up.inc(pool.tries.look(workers, time.perf_counter(), others))

    async def _learn(self, pool: Pool) -> None:
        """Read what engines have reported of images, a page at a time: requests come in between."""
        for _ in range(IMAGE_PAGES):
            news = await pool.fleet.images.news()
            for report, told_at in news.items():
                self._metrics.image_reports.labels(pool.learned.take(report, told_at), pool.tag).inc()
            if len(news) < IMAGES_AT_ONCE:
                break

    def _derive(self, pool: Pool, workers: Sequence[WorkerView], standing: list[tuple[object, ...]]) -> View:
        """Derive the view of these workers from scratch."""
        self._derived.pop(pool.tag, None)
        alive = [w for w in workers if w.heard]
        exact = [w for w in alive if w.load.scheme != TEXT_SCHEME.scheme_id]
        bringers = self._groupings.setdefault(pool.tag, announced.Grouping()).by_identity(alive)
        identity, reference = self._identity(pool, bringers)
        text = any(w.load.scheme == TEXT_SCHEME.scheme_id for w in alive)
        handoff = token_capabilities(bringers)
        self._agreement.misnamed(pool.tag, {w.worker_id: misnamed(w, pool.name) for w in alive if w.misnamed})
        awaited = identity is None and (reference is not None or bool(self._settings.tokenizer))
        identity = identity or pool.view.identity  # the last identity stays in use until the new one is loaded
        hashers = self._schemes(pool, exact, MAX_SCHEMES - text)
        keys = {worker.worker_id: key for key, group in bringers.items() for worker in group}
        view = view_of(
            workers,
            identity,
            hashers,
            text=text,
            reference=reference,
            identity_keys=keys,
            handoff=handoff,
            may_split=self._settings.token_handoff,
        )
        self._agreement.look(pool.tag, "images", view.image_groups)
        view = view.remembering(pool.view)
        if not awaited:
            self._derived[pool.tag] = standing, view
        return view

    def _schemes(self, pool: Pool, workers: Sequence[WorkerView], limit: int) -> list[Hasher]:
        """Return hashers for the ``limit`` most frequent schemes of these workers, the most frequent first."""
        holders: dict[Scheme, list[WorkerView]] = {}
        for worker in workers:
            try:
                scheme = Scheme.from_dict(worker.record["scheme"])
            except (WireError, KeyError, TypeError):
                continue  # a scheme of a later version: its worker gets requests by load alone
            holders.setdefault(scheme, []).append(worker)
        schemes = sorted(holders, key=lambda scheme: -len(holders[scheme]))
        groups = {_in_words(scheme): _ids(holders[scheme]) for scheme in schemes}
        self._agreement.look(pool.tag, "scheme", groups)
        self._agreement.unhashed(pool.tag, [name for scheme in schemes[limit:] for name in _ids(holders[scheme])])
        return [self._hashers.get(scheme.scheme_id) or Hasher(scheme) for scheme in schemes[:limit]]

    def _identity(
        self, pool: Pool, bringers: Mapping[str, Sequence[WorkerView]]
    ) -> tuple[Identity | None, WorkerView | None]:
        """Return the identity to use, and a worker that announced it.

        The identity is None while it loads, which may begin here. The worker is None if the settings name a tokenizer.

        bringers: key of an identity -> the workers that announce it, the most frequent first.
        """
        if self._settings.tokenizer:
            key = f"override {self._settings.tokenizer}"
            loaded = self._identities.known(key)
            if loaded is None:
                self._begin(key, self._override())
            return loaded, None
        bringers = dict(sorted(bringers.items(), key=lambda item: item[0] in self._unreadable))
        self._agreement.look(
            pool.tag, "identity", {announced.in_words(key, workers): _ids(workers) for key, workers in bringers.items()}
        )
        if not bringers:
            return None, None
        key, group = next(iter(bringers.items()))
        loaded = self._identities.known(key)
        if loaded is None:
            self._begin(key, self._from_workers(pool, key, group))
        return loaded, group[0]

    def _begin(self, key: str, work: Coroutine[Any, Any, None]) -> None:
        """Start this load, unless it runs already or has failed lately."""
        if key in self._loads or time.monotonic() < self._not_before.get(key, 0.0):
            work.close()
            return
        self._loads[key] = asyncio.ensure_future(self._load(key, work))

    async def _load(self, key: str, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001  a worker's files may raise any exception
            self._load_failed(key, error)
        else:
            await self._use_loaded()
        finally:
            del self._loads[key]

    async def _use_loaded(self) -> None:
        """Read the fleet again, so that views use an identity just loaded; if this fails, the next round does so."""
        try:
            await self.refresh()
        except Exception as error:  # noqa: BLE001  the next round reports the error
            logger.info("token identity loaded, but not every pool could be read with it yet: %s", error)

    def _load_failed(self, key: str, error: Exception) -> None:
        self._metrics.task_failures.labels("identity").inc()
        logger.warning("no token identity, requests are routed by load: %s", error)
        if len(self._not_before) >= MAX_FAILED_LOADS:
            self._not_before.clear()
            self._unreadable.clear()
        if not isinstance(error, WarmfleetError):
            self._unreadable.add(key)
        pause = error.again_s if isinstance(error, Refused) else self._load_retry_s
        self._not_before[key] = time.monotonic() + pause

    async def _override(self) -> None:
        await self._identities.load(self._settings.tokenizer)

    async def _from_workers(self, pool: Pool, key: str, workers: Sequence[WorkerView]) -> None:
        """Build an identity from the first server whose files are in Redis; not all announced files are there."""
        failure: WarmfleetError | None = None
        servers = {str(worker.record["server_id"]): worker.server or {} for worker in workers}
        for server_id, server in list(servers.items())[: announced.MAX_SERVERS]:
            files = {name: entry for name, entry in server["artifacts"].items() if name in announced.FILES}
            try:
                artifacts = {name: await pool.fleet.artifacts.read(server_id, entry) for name, entry in files.items()}
            except (NotFound, BadArtifact) as error:
                failure = failure or error
                logger.warning(
                    "%s: the files of %s cannot be used, another server is asked: %s", pool.tag, server_id, error
                )
                continue
            await self._identities.build(key, artifacts, server.get("facts") or {})
            return
        if failure is not None:
            raise failure

    def _count_workers(self, pool: Pool) -> None:
        if self._pools.tagged(pool.tag) is not pool:
            return  # the pool ended while its workers were read
        counted = Counter(METRIC_LABELS.get(worker.state, UNROUTABLE) for worker in pool.view.workers)
        for label in {*METRIC_LABELS.values(), UNROUTABLE}:
            self._metrics.workers.labels(label, pool.tag).set(counted[label])

    async def close(self) -> None:
        await stop(list(self._loads.values()))


def _standing(worker: WorkerView) -> tuple[object, ...]:
    """Return all values of a worker on which a view depends, without loads and ages; equal values give equal views."""
    load, record = worker.load, worker.record
    served = worker.server, worker.url, worker.models
    announced_by_core = record.get("scheme"), record.get("server_id"), record.get("rank"), record.get("max_model_len")
    return (
        worker.worker_id,
        worker.state,
        worker.heard,
        load.flags,
        load.scheme,
        load.speed_tps,
        served,
        announced_by_core,
        worker.transfer,
    )


def _ids(workers: Sequence[WorkerView]) -> list[str]:
    return [worker.worker_id for worker in workers]


def _in_words(scheme: Scheme) -> str:
    step = f" hashed by {scheme.hash_block_tokens}" if scheme.steps > 1 else ""
    return f"{scheme.scheme_id:08x} ({scheme.algorithm}, blocks of {scheme.block_tokens} tokens{step})"
