"""The limits of clients of a model with several pools: a single pool counts each client's requests and tokens.

The counting pool is the first by rendezvous hashing of the client among the pools that are not away, so all replicas
find the same pool by themselves. It counts a request while the request's home pools decide, so that neither answer
waits for the other; the home pools count nothing. Only for a client that was refused a moment ago, the limits are
checked before, because otherwise each refused request would cost two decisions and book load for a moment.

If the counting pool does not answer, the next pool is asked; if that does not answer in time either, the request passes
unchecked. When another pool becomes the counting pool (as pools come, go, or are away), running requests count in the
new pool from their next renewal on, and in the old pool until they end or expire. So a pool that was away for a moment
still has its counts when it comes back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import lru_cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from warmfleet.errors import FleetUnavailable, WarmfleetError
from warmfleet.fleet import KEEP_AT_ONCE, ClientUse
from warmfleet.pools.home_pools import in_order
from warmfleet.pools.late_pools import LatePool, late
from warmfleet.protocol.wire import RESERVATION_LENGTH

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from warmfleet.errors import RateLimited
    from warmfleet.fleet import ClientLimits
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools

logger = logging.getLogger("warmfleet.routing.client_limits")

REFUSED_S = 1.0  # time after a refusal in which a client's limits are checked before any pool decides
MAX_REFUSED = 1_024  # most clients whose refusal is remembered
MAX_NOT_TAKEN = 4_096  # most ends of requests stored until a silent pool answers; the others count until they expire


class Counting:
    """Has pools count this replica's requests of clients with limits.

    ``open``: by id, the running requests, whose counts this replica renews.
    """

    def __init__(self, pools: Pools, metrics: Metrics) -> None:
        self.open: dict[str, Counted] = {}
        self._pools = pools
        self._metrics = metrics
        self._refused_until: dict[str, float] = {}  # tag of a client -> time until which limits are checked first
        self._under_way = 0  # ends of requests that were sent to Redis and not answered yet
        self._not_taken: dict[Pool, dict[str, int]] = {}  # requests whose end the pool did not take -> tokens
        self._none_left = asyncio.Event()

    def begin(self, model: str, reservation: str, limits: ClientLimits, prompt_tokens: int) -> Counted:
        """Have a request counted. The caller awaits ``Counted.check``, and must call ``Counted.end`` in every case."""
        name = reservation[:RESERVATION_LENGTH] + limits.tag
        counted = Counted(self, model, name, limits, prompt_tokens)
        until = self._refused_until.get(limits.tag)
        counted.first = until is not None and time.monotonic() < until
        self.open[counted.name] = counted
        counted.ask()
        return counted

    def pool_of(self, model: str, tag: str, but: Collection[Pool] = ()) -> Pool | None:
        """Return the pool that counts for the client with this tag; None if all pools of the model are away.

        but: pools that have just failed.
        """
        pools = {pool.tag: pool for pool in self._pools.served[model].pools}
        found = (pools[name] for name in _order(tag, tuple(pools)))
        return next((pool for pool in found if pool not in but and pool.degraded.asks_redis), None)

    async def keep(self) -> None:
        """Renew the counts of this replica's requests, each in the first pool of its client that answers.

        All clients' first pools are asked at the same time; then, in place of pools that failed, the next pools. Raises
        the first failure of a pool at the end.
        """
        left = [counted for counted in self.open.values() if counted.answered]
        failures: dict[Pool, WarmfleetError] = {}
        while left:
            kept: dict[Pool, list[Counted]] = {}
            clients = {(counted.model, counted.limits.tag) for counted in left}
            pools = {client: self.pool_of(*client, failures) for client in clients}
            for counted in left:
                pool = pools[counted.model, counted.limits.tag]
                if pool is not None:
                    kept.setdefault(pool, []).append(counted)
            calls = [self._keep_in(pool, requests, failures) for pool, requests in kept.items()]
            left = list(chain.from_iterable(await asyncio.gather(*calls)))
        for failure in failures.values():
            raise failure

    async def _keep_in(
        self, pool: Pool, requests: Sequence[Counted], failures: dict[Pool, WarmfleetError]
    ) -> Sequence[Counted]:
        """Renew the counts of these requests in this pool; return the requests that are left because the pool failed.

        failures: by pool; a failure of this pool is added.
        """
        for start in range(0, len(requests), KEEP_AT_ONCE):
            # Requests that ended meanwhile are left out, because their counts would never be ended.
            batch = [counted for counted in requests[start : start + KEEP_AT_ONCE] if counted.name in self.open]
            if not batch:
                continue
            for counted in batch:
                counted.counts_in(pool)
                self._not_taken.get(pool, {}).pop(counted.name, None)  # the request runs, and shall count there again
            try:
                await pool.fleet.clients.keep([counted.name for counted in batch])
            except WarmfleetError as error:
                self.failed(pool, error)
                failures[pool] = error
                return requests[start:]
            self.answers(pool)
        return ()

    async def keep_one(self, model: str, name: str) -> None:
        """Renew the count of a gateway's request, in the first pool that answers. Never raises.

        name: the reservation's id as the gateway has it, with the client's tag.
        """
        failed: list[Pool] = []
        while (pool := self.pool_of(model, name[RESERVATION_LENGTH:], failed)) is not None:
            try:
                await pool.fleet.clients.keep([name])
            except WarmfleetError as error:
                self.failed(pool, error)
                failed.append(pool)
            else:
                return
        logger.warning("%s: a gateway's request of a client with limits counts only until it expires", model)

    def failed(self, pool: Pool, error: WarmfleetError) -> None:
        """Note a failure of a pool: after two failures in a row it counts as away, for decisions as well."""
        if isinstance(error, FleetUnavailable):
            pool.degraded.failed(f"limits of clients: {error}")

    def end_one(self, model: str, name: str, tokens: int) -> None:
        """End the count of a gateway's request. tokens: the number used besides the prompt."""
        pool = self.pool_of(model, name[RESERVATION_LENGTH:])
        if pool is not None:
            self.end_in(pool, name, tokens)

    def end_in(self, pool: Pool, name: str, tokens: int) -> None:
        """Send a pool the end of a request that counts there, without waiting for the answer."""
        self._under_way += 1
        pool.fleet.clients.end(name, tokens, partial(self._end_answered, pool, name, tokens))

    def _end_answered(self, pool: Pool, name: str, tokens: int, _answer: object, error: WarmfleetError | None) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._none_left.set()
        if error is None:
            return
        logger.info("a request of a client with limits counts until its pool answers, or it expires: %s", error)
        ends = self._not_taken.setdefault(pool, {})
        if len(ends) < MAX_NOT_TAKEN:
            ends[name] = tokens

    def answers(self, pool: Pool) -> None:
        """Send this pool, which answers again, the ends of requests that could not be sent before."""
        for name, tokens in self._not_taken.pop(pool, {}).items():
            self.end_in(pool, name, tokens)

    async def drained(self) -> None:
        """Return when Redis has taken or refused every end."""
        while self._under_way:
            self._none_left.clear()
            await self._none_left.wait()

    def refused(self, counted: Counted, error: RateLimited) -> None:
        """Remember that a limit refused a request."""
        if len(self._refused_until) >= MAX_REFUSED:
            self._refused_until.clear()
        self._refused_until[counted.limits.tag] = time.monotonic() + REFUSED_S
        self._metrics.client_limits.labels(counted.limits.name, error.type).inc()

    def unchecked(self, counted: Counted) -> None:
        """Note in metrics and log that a request passes because no pool could count it."""
        self._metrics.client_limits.labels(counted.limits.name, "unchecked").inc()
        logger.warning("%s: the limits of %s were not checked: no answer", counted.model, counted.limits.name)


class Counted:
    """A request of a client with limits, from when a pool is asked to count it until it ends.

    ``name``: its reservation with the client's tag at the end. ``first``: ``check_first`` comes before any decision.
    ``use``: how much of the limits is used, with this request; None while it is not known.
    """

    __slots__ = (
        "_answer", "_asked", "_charged", "_checked", "_counting", "first", "limits", "model", "name", "prompt_tokens",
        "use",
    )  # fmt: skip

    def __init__(self, counting: Counting, model: str, name: str, limits: ClientLimits, prompt_tokens: int) -> None:
        self._counting = counting
        self._answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()  # None: no pool can answer
        self._checked = False
        self._asked: list[Pool] = []  # in order: each pool after the pool before it had failed or was late
        self._charged: dict[Pool, int] = {}  # tokens of its prompt, by each pool that counts it or may do so
        self.model = model
        self.name = name
        self.limits = limits
        self.prompt_tokens = prompt_tokens
        self.first = False
        self.use: ClientUse | None = None

    def ask(self) -> None:
        """Ask the next pool to count the request, and end the count in the pool that was asked before.

        If no pool is left, the answer is None.
        """
        pool = self._counting.pool_of(self.model, self.limits.tag, self._asked)
        if pool is None:
            self._answer.set_result(None)
            return
        if self._asked:
            self._give_back(self._asked[-1])
        self._asked.append(pool)
        self._charged[pool] = self.prompt_tokens
        pool.fleet.clients.admit(self.name, self.limits, self.prompt_tokens, partial(self._admit_answered, pool))

    def _give_back(self, pool: Pool) -> None:
        """End the count of the request and of its prompt in this pool."""
        charged = self._charged.pop(pool, None)
        if charged is not None:
            self._counting.end_in(pool, self.name, -charged)

    def _admit_answered(self, pool: Pool, answer: Any, error: WarmfleetError | None) -> None:
        """Take the answer of a pool, perhaps a late one."""
        if pool not in self._charged:  # the pool already got the end of the request
            return
        if error is not None:
            self._give_back(pool)
            if not self.answered:  # a late answer counted as the pool's failure already
                self._counting.failed(pool, error)
                self.ask()
        elif self.answered:
            if answer[0] == b"LIMITED":  # too late: the request runs, and its next renewal may count it in this pool
                self._charged[pool] = 0
        else:
            pool.degraded.succeeded()
            self._counting.answers(pool)
            if answer[0] == b"LIMITED":
                self._leave()  # the request counts nowhere, so no count is left to renew or to end
            self._answer.set_result(answer)

    @property
    def answered(self) -> bool:
        """Whether a pool has answered in time, or no pool is left to answer."""
        return self._answer.done()

    async def check_first(self) -> None:
        """Do as ``check``, but return without a result if the answer is slow; ``check`` must then be called later."""
        if not await late([self._answer]):
            await self.check()

    async def check(self) -> None:
        """Return when the request is counted, or may pass unchecked. Raises RateLimited. Later calls do nothing."""
        if self._checked:
            return
        if await self._is_late():
            self.ask()
            await self._is_late()
        self._checked = True
        if not self.answered:
            self._answer.set_result(None)
        answer = self._answer.result()
        if answer is None:
            self._counting.unchecked(self)
        elif answer[0] == b"LIMITED":
            refusal = self.limits.refusal(answer, self.prompt_tokens)
            self._counting.refused(self, refusal)
            raise refusal
        else:
            self.use = ClientUse(*answer)

    async def _is_late(self) -> bool:
        """Wait for the answer; return whether the pool that was asked last is late."""
        if not await late([self._answer]):
            return False
        self._counting.failed(self._asked[-1], LatePool())
        return True

    def counts_in(self, pool: Pool) -> None:
        """Note that this pool counts the request, too, so that ``end`` also ends the count there."""
        self._charged.setdefault(pool, 0)

    def end(self, tokens: int | None) -> None:
        """End the count. tokens: of the answer; None: the request was not served, so its prompt does not count."""
        for pool, charged in self._leave().items():
            self._counting.end_in(pool, self.name, -charged if tokens is None else tokens)

    def hand_over(self) -> str:
        """Let the gateway that sends the request renew and end its count, by the id that this returns."""
        self._leave()
        return self.name

    def _leave(self) -> dict[Pool, int]:
        """Stop renewing the request's count, and forget the pools that count it; return them with their tokens."""
        self._counting.open.pop(self.name, None)
        charged, self._charged = self._charged, {}
        return charged


@lru_cache(maxsize=4_096)
def _order(tag: str, pools: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(in_order(tag.encode(), dict.fromkeys(pools, 1)))
