"""The models that this replica serves, and the pools of each."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from warmfleet.errors import BadRequest, FleetUnavailable, ModelNotFound
from warmfleet.pools.home_pools import HOME_PREFIX_TOKENS, Beginnings, in_order
from warmfleet.pools.served_names import misnamed
from warmfleet.protocol.pools import DRAINING, SERVING
from warmfleet.protocol.wire import WORKER_TTL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from warmfleet.fleet import WorkerView
    from warmfleet.pools.identified_prompt import IdentifiedPrompt
    from warmfleet.pools.pool import Pool

Of = TypeVar("Of")
Answer = TypeVar("Answer")

FIRST_READING_S = 2.0  # longest wait of a request for the first reading of the fleet
NOT_READ = (
    "The fleet was not read yet: Redis is away or slow. Ask again; for the operator, the replica's log and "
    "`warmfleet doctor` say what is wrong."
)
NAMED_MODELS = 16  # most models that an error names; /v1/models lists all
NAMED_CHARACTERS = 80  # most characters of each name that an error shows
RANDOM_BYTES = 8  # length of the random key that places a prompt whose first blocks are not known


class ServedModel:
    """A model and its pools, of which it has at least one. ``several``: whether it has more than one.

    ``draining``: tags of the pools that get no new request while another pool can serve it. ``moving``: tags of the
    pools whose workers move to other pools; they serve with the workers that are left.
    """

    def __init__(
        self,
        name: str,
        pools: Sequence[Pool],
        draining: frozenset[str] = frozenset(),
        moving: frozenset[str] = frozenset(),
    ) -> None:
        self.name = name
        self.pools = tuple(pools)
        self.several = len(self.pools) > 1
        self.drain(draining, moving)
        self._beginnings = Beginnings()

    def drain(self, tags: frozenset[str], moving: frozenset[str] = frozenset()) -> None:
        """Drain the pools of these tags, and no others: they get no new request while another pool can serve it.

        moving: tags of the pools whose workers shall go to other pools.
        """
        self.draining, self.moving = tags, moving
        for pool in self.pools:
            pool.draining = pool.tag in tags

    def succeed(self, before: ServedModel) -> None:
        """Take over the counts of prompts' beginnings from ``before``, the same model with other pools."""
        self._beginnings = before._beginnings

    @property
    def missing(self) -> list[str]:
        """The tags of the pools that a new replica waits for: they get new requests, but are not usable yet.

        A pool that was read and has no worker at all may be new: it is missing only if no other pool is usable.
        """
        drained = len(self.draining) == len(self.pools)
        waited_for = [pool for pool in self.pools if not pool.usable and (drained or not pool.draining)]
        if any(pool.usable for pool in self.pools):
            waited_for = [pool for pool in waited_for if pool.view.workers or not pool.contacted]
        return [pool.tag for pool in waited_for]

    @property
    def reference(self) -> Pool:
        """The pool whose tokenizer makes a prompt's token ids first: a usable pool, if the model has any."""
        *others, last = self.pools
        for pool in others:
            if pool.usable:
                return pool
        return last

    @property
    def names(self) -> set[str]:
        """Every name that a routable worker of any pool serves."""
        return {name for pool in self.pools for name in pool.view.names.routable}

    def servers_of(self, model: str) -> int:
        """Return how many workers of all pools serve this name."""
        return sum(pool.servers_of(model) for pool in self.pools)

    def order_for(self, prompt: IdentifiedPrompt, model: str, *, counted: bool = True) -> tuple[Pool, ...]:
        """Return the pools in which a request looks for a worker, first by its prompt's key; draining pools last.

        model: as the request names it. Pools without a worker that serves this name are left out.
        counted: False for a prompt that is only explained, so must not change which beginnings count as common.
        """
        able = self.pools
        if model and model != self.name:
            able = tuple(pool for pool in able if pool.servers_of(model)) or able
        key = self._beginnings.key(prompt.chains, HOME_PREFIX_TOKENS, len(self.pools), counted=counted)
        key = key or os.urandom(RANDOM_BYTES)
        by_tag = {pool.tag: pool for pool in able}
        ordered = [by_tag[tag] for tag in in_order(key, {pool.tag: pool.weight for pool in able})]
        if self.draining:
            ordered.sort(key=lambda pool: pool.draining)
        return tuple(ordered)


class Pools:
    """All pools of this replica, by the models that they serve. Pools may come and go while it runs (``change``).

    ``served``: by the name of the model. ``leaving``: removed pools whose last requests have not ended yet.
    """

    def __init__(self, pools: Sequence[Pool]) -> None:
        self.all: tuple[Pool, ...] = tuple(pools)
        names = dict.fromkeys(pool.name for pool in self.all)
        self.served = {name: ServedModel(name, self.named(name)) for name in names}
        self.leaving: tuple[Pool, ...] = ()
        self._contacted = False  # every model was read from Redis once; an outage later keeps the last readings
        self._first_reading_until: float | None = None
        self._ready_at = float("inf")

    def change(self, model: ServedModel) -> None:
        """Serve a model with other pools from now on. Pools that the model does not keep are ``leaving``."""
        before = self.served.get(model.name)
        gone: list[Pool] = []
        if before is not None:
            gone = [pool for pool in before.pools if pool not in model.pools]
            model.succeed(before)
        self.leaving = (*(pool for pool in self.leaving if pool not in model.pools), *gone)
        self.served[model.name] = model
        self._count()

    def forget(self, pool: Pool) -> None:
        """Drop a leaving pool, in which this replica has no request any more."""
        self.leaving = tuple(other for other in self.leaving if other is not pool)
        self._count()

    def _count(self) -> None:
        self.all = (*(pool for model in self.served.values() for pool in model.pools), *self.leaving)

    def named(self, name: str) -> list[Pool]:
        """Return all pools of this model, leaving or not."""
        return [pool for pool in self.all if pool.name == name]

    def state_of(self, pool: Pool) -> str:
        """Return the state as ``warmfleet pools`` shows it: serving, draining or moving; removed, if it is leaving."""
        model = self.served[pool.name]
        if pool not in model.pools:
            return "removed"
        return "moving" if pool.tag in model.moving else DRAINING if pool.draining else SERVING

    def moved(self, pool: Pool, workers: Iterable[WorkerView]) -> dict[str, str]:
        """Return worker_id -> tag of the pool, for each of these workers that is silent here but heard in another pool.

        Pools of other models count only for engines without the plugin, whose id is their URL: other ids may be equal.
        """
        silent = {(worker.worker_id, worker.approximate) for worker in workers if not worker.heard}
        others = [other for other in self.all if other is not pool] if silent else []
        return {
            worker.worker_id: other.tag
            for other in others
            for worker in other.view.workers
            if worker.heard and (other.name == pool.name or worker.approximate)
            if (worker.worker_id, worker.approximate) in silent
        }

    def keeping(self, response_id: str) -> Pool | None:
        """Return the pool of the worker that keeps the answer with this id; None if no pool has such a worker."""
        return next((pool for pool in self.all if pool.view.keeper_of(response_id)), None)

    def tagged(self, tag: str) -> Pool | None:
        """Return the pool with this tag, leaving or not; None if there is none."""
        return next((pool for pool in self.all if pool.tag == tag), None)

    def unready(self) -> str:
        """Return why this new replica should get no requests yet; "" once it is ready.

        The replica is ready when no pool is ``missing``. After a worker's TTL it is ready in any case: workers that are
        missing then are missing in the fleet, too.
        """
        if not self.contacted:
            return "no contact with Redis yet"
        now = time.monotonic()
        missing = [tag for model in self.served.values() for tag in model.missing]
        self._ready_at = min(self._ready_at, now + (WORKER_TTL_SECONDS if missing else 0.0))
        if self._ready_at <= now:
            return ""
        return f"no worker is routable yet, or its tokenizer is not loaded: {', '.join(missing)}"

    def names(self) -> dict[str, Pool]:
        """Return every name that a routable worker serves, with a pool; a model without workers by its own name."""
        found: dict[str, Pool] = {}
        for model in self.served.values():
            for pool in model.pools:
                for name in pool.view.names.routable:
                    found.setdefault(name, pool)
            if not model.names:
                found.setdefault(model.name, model.pools[0])
        return found

    def not_found(self, model: str, allowed: frozenset[str] | None = None) -> ModelNotFound:
        """Return the error for a model that does not exist, with the names of those that do.

        allowed: the names that the client may know; None: all.
        """
        names = sorted(name for name in self.names() if allowed is None or name in allowed)
        shown = ", ".join(f"`{name[:NAMED_CHARACTERS]}`" for name in names[:NAMED_MODELS])
        more = f" and {len(names) - NAMED_MODELS} more, which GET /v1/models lists" if names[NAMED_MODELS:] else ""
        told = f"Served are: {shown}{more}." if names else "There is none that this key may use."
        if allowed is None and (why := self._misnamed(model)):
            told += f" For the operator: {why}."
        return ModelNotFound(f"The model `{model[:200]}` does not exist here. {told}", "model")

    def _misnamed(self, model: str) -> str:
        """Tell why a worker with this name gets no request (its pool has another name); empty without such a worker."""
        for pool in self.all:
            for worker in pool.view.workers:
                if worker.misnamed and model in worker.names:
                    return f"an engine in the pool `{pool.tag}` is misnamed, {misnamed(worker, pool.name)}"
        return ""

    async def find(self, model: str, allowed: frozenset[str] | None = None) -> Pool:
        """Find a pool that serves ``model``; of several pools the ``reference``.

        Waits for the first reading of the fleet if there was none yet.

        allowed: see ``not_found``. Raises ModelNotFound, FleetUnavailable if that reading does not come, and BadRequest
        if the request names no model though this router serves several.
        """
        if not self._contacted:
            await self._first_reading()
        served = self.served.get(model)
        if served is not None:  # a model's own name means that model, whatever other models' workers announce
            return served.reference
        if not model:
            if len(self.served) == 1:
                return next(iter(self.served.values())).reference
            raise BadRequest("model is required: this router serves several.", "model")
        found = max(self.served.values(), key=lambda served: served.servers_of(model))
        if found.servers_of(model):
            return max(found.pools, key=lambda pool: pool.servers_of(model))
        if not self.contacted:
            raise FleetUnavailable(NOT_READ)
        raise self.not_found(model, allowed)

    async def ready(self) -> None:
        """Wait for the first reading of the fleet if there was none yet."""
        if not self._contacted:
            await self._first_reading()

    async def _first_reading(self) -> None:
        """Wait until every pool was read once, or until FIRST_READING_S have passed since the first request came."""
        self._contacted = self.contacted
        if self._contacted:
            return
        if self._first_reading_until is None:
            self._first_reading_until = asyncio.get_running_loop().time() + FIRST_READING_S
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._first_reading_until):
                for pool in self.all:
                    await pool.read.wait()

    @property
    def contacted(self) -> bool:
        """Whether at least one pool of every model was read; other pools of a model may be away."""
        return all(any(pool.contacted for pool in model.pools) for model in self.served.values())

    async def each(self, work: Callable[[Pool], Awaitable[object]]) -> None:
        """Do ``work`` for every pool, even if it fails for some; then raise the first failure."""
        if len(self.all) == 1:
            await work(self.all[0])
            return
        await all_of(map(work, self.all))

    async def ask_each(
        self, ask: Callable[[Pool], asyncio.Future[Answer]], take: Callable[[Pool, Answer], Awaitable[object]]
    ) -> None:
        """Ask for every pool at once, pass each answer to ``take`` even if some fail; then raise the first failure."""
        await as_answered({ask(pool): pool for pool in self.all}, take)


async def all_of(works: Iterable[Awaitable[object]]) -> None:
    """Await all at once, even if some fail; then raise the first failure.

    So a pool whose Redis is away keeps no other pool waiting for its time-out.
    """
    for result in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


async def as_answered(
    asked: Mapping[asyncio.Future[Answer], Of], take: Callable[[Of, Answer], Awaitable[object]]
) -> None:
    """Call ``take`` with each answer and its subject as soon as the answer is there; then raise the first failure.

    A late answer delays no other. One task takes all answers, because a task for each would cost more time than they.
    """
    waiting, failures = set(asked), list[Exception]()
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for answer in [answer for answer in asked if answer in done]:
                try:
                    await take(asked[answer], answer.result())
                except Exception as error:  # noqa: BLE001  raised below
                    failures.append(error)
    finally:
        for answer in waiting:
            answer.cancel()
    if failures:
        raise failures[0]
