"""The limits of clients of a model with several pools: each client has one pool that counts for it, and no other does.

It is the first one by rendezvous hashing of the client among the pools that are not away, so all replicas name the same
without asking anybody. A request is counted there while its home pools are asked, so no answer waits for another one,
and the home pools count nothing. Only a client that was refused a moment ago is asked about first: else each of its
refused requests would cost two decisions, and book load for a moment.

Where that pool does not answer, requests pass unchecked. When it changes (a pool comes or goes, or is away), requests
that run count in the new one within a renewal.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from warmfleet.errors import WarmfleetError
from warmfleet.fleet import KEEP_AT_ONCE, ClientUse
from warmfleet.pools.homes.rendezvous import in_order
from warmfleet.protocol.wire import RESERVATION_LENGTH

if TYPE_CHECKING:
    from warmfleet.errors import RateLimited
    from warmfleet.fleet import ClientLimits
    from warmfleet.metrics import Metrics
    from warmfleet.pools.pool import Pool, Pools

logger = logging.getLogger("warmfleet.routing.clients.counting")

LATE_S = 0.05  # longest wait for the answer once a pool has answered; counting takes a tenth of a decision
REFUSED_S = 1.0  # so long after a refusal a client is asked about first: it is told to come again in a second
MAX_REFUSED = 1_024  # clients that are remembered for it


class Counting:
    """Lets pools count this replica's requests for clients with limits. ``open``: the requests that count, by id."""

    def __init__(self, pools: Pools, metrics: Metrics) -> None:
        self.open: dict[str, Counted] = {}
        self._pools = pools
        self._metrics = metrics
        self._refused_until: dict[str, float] = {}  # by the tag of a client
        self._telling = 0  # ends that Redis has neither taken nor refused
        self._all_told = asyncio.Event()

    def begin(self, model: str, reservation: str, limits: ClientLimits, prompt_tokens: int) -> Counted:
        """Have a request counted. The caller awaits ``Counted.check``, and must call ``Counted.end`` in every case."""
        name = reservation[:RESERVATION_LENGTH] + limits.tag
        counted = Counted(self, model, name, limits, prompt_tokens)
        until = self._refused_until.get(limits.tag)
        counted.first = until is not None and time.monotonic() < until
        counted.pool = self.pool_of(model, limits.tag)
        self.open[counted.name] = counted
        if counted.pool is None:
            counted.told(None)
        else:
            counted.pool.fleet.admit(counted.name, limits, prompt_tokens, counted.told)
        return counted

    def pool_of(self, model: str, tag: str) -> Pool | None:
        """The pool that counts for the client with this tag; None if all pools of the model are away."""
        pools = {pool.tag: pool for pool in self._pools.served[model].pools}
        return next((pools[name] for name in _order(tag, tuple(pools)) if pools[name].degraded.asks_redis), None)

    async def keep(self) -> None:
        """Let the requests of this replica count on. Raises the first failure of a pool, once all were asked."""
        kept: dict[Pool, list[str]] = {}
        clients = {(counted.model, counted.limits.tag) for counted in self.open.values()}
        pools = {client: self.pool_of(*client) for client in clients}
        for counted in self.open.values():
            pool = pools[counted.model, counted.limits.tag]
            if pool is None:
                continue
            if counted.pool is not None and counted.pool is not pool:
                self.end_in(counted.pool, counted.name, 0)
            counted.pool = pool
            kept.setdefault(pool, []).append(counted.name)
        failures: list[WarmfleetError] = []
        for pool, names in kept.items():
            for start in range(0, len(names), KEEP_AT_ONCE):
                # Those that ended meanwhile are left out: nobody would end them again.
                batch = [name for name in names[start : start + KEEP_AT_ONCE] if name in self.open]
                try:
                    await pool.fleet.keep_counted(batch) if batch else None
                except WarmfleetError as error:
                    failures.append(error)
        for failure in failures:
            raise failure

    async def keep_one(self, model: str, name: str) -> None:
        """Let a gateway's request count on. name: the reservation as the gateway has it. Raises FleetUnavailable."""
        pool = self.pool_of(model, name[RESERVATION_LENGTH:])
        if pool is not None:
            await pool.fleet.keep_counted([name])

    def end_one(self, model: str, name: str, tokens: int) -> None:
        """A gateway's request counts no longer. tokens: that it has used besides its prompt."""
        pool = self.pool_of(model, name[RESERVATION_LENGTH:])
        if pool is not None:
            self.end_in(pool, name, tokens)

    def end_in(self, pool: Pool, name: str, tokens: int) -> None:
        """Tell a pool that a request counts no longer, and wait for nothing."""
        self._telling += 1
        pool.fleet.end_counted(name, tokens, self._told)

    def _told(self, _answer: object, error: WarmfleetError | None) -> None:
        self._telling -= 1
        if not self._telling:
            self._all_told.set()
        if error is not None:
            logger.info("a request of a client with limits counts until it expires: %s", error)

    async def drained(self) -> None:
        """Return when Redis has taken or refused every end."""
        while self._telling:
            self._all_told.clear()
            await self._all_told.wait()

    def refused(self, counted: Counted, error: RateLimited) -> None:
        """Remember that a limit refused a request."""
        if len(self._refused_until) >= MAX_REFUSED:
            self._refused_until.clear()
        self._refused_until[counted.limits.tag] = time.monotonic() + REFUSED_S
        self._metrics.client_limits.labels(counted.limits.name, error.type).inc()

    def unchecked(self, counted: Counted) -> None:
        """No pool counts the request: it passes."""
        self._metrics.client_limits.labels(counted.limits.name, "unchecked").inc()
        logger.warning("%s: the limits of %s were not checked: no answer", counted.model, counted.limits.name)


class Counted:
    """A request of a client with limits, from the moment at which it is asked about until it ends.

    ``name``: its reservation with the client's tag behind it. ``pool``: that counts it, None if none can. ``first``:
    await ``check`` before pools are asked. ``use``: of the limits, with this request; None while it is not known.
    """

    __slots__ = ("_answer", "_counting", "_ended", "first", "limits", "model", "name", "pool", "prompt_tokens", "use")

    def __init__(self, counting: Counting, model: str, name: str, limits: ClientLimits, prompt_tokens: int) -> None:
        self._counting = counting
        self._answer: asyncio.Future[Any] | None = asyncio.get_running_loop().create_future()
        self._ended = False
        self.model = model
        self.name = name
        self.limits = limits
        self.prompt_tokens = prompt_tokens
        self.pool: Pool | None = None
        self.first = False
        self.use: ClientUse | None = None

    def told(self, answer: Any, error: WarmfleetError | None = None) -> None:
        """The answer of the pool that counts, which may come late; None: there is none."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(None if error is not None else answer)

    async def check(self) -> None:
        """Return when the request is counted, or is to pass unchecked. Raises RateLimited. Later calls do nothing."""
        future = self._answer
        if future is None:
            return
        if not future.done():
            await asyncio.wait((future,), timeout=LATE_S)
        self._answer = None
        answer = future.result() if future.done() else None
        if answer is None:
            self._counting.unchecked(self)
        elif answer[0] == b"LIMITED":
            refusal = self.limits.refusal(answer, self.prompt_tokens)
            self._counting.refused(self, refusal)
            raise refusal
        else:
            self.use = ClientUse(*answer)

    def end(self, tokens: int | None) -> None:
        """The request is over. tokens: of its answer; None: it was not served, so its prompt costs nothing, either."""
        if self._leave() and self.pool is not None:
            self._counting.end_in(self.pool, self.name, -self.prompt_tokens if tokens is None else tokens)

    def hand_over(self) -> str:
        """Leave the request to a gateway, so that this replica keeps it no longer; returns the id for the gateway."""
        self._leave()
        return self.name

    def _leave(self) -> bool:
        ended, self._ended = self._ended, True
        self._counting.open.pop(self.name, None)
        return not ended


@lru_cache(maxsize=4_096)
def _order(tag: str, pools: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(in_order(tag.encode(), dict.fromkeys(pools, 1)))
