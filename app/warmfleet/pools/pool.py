"""One model as this replica sees it: its workers at the last reading, and this replica's own requests for it."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from warmfleet.errors import BadRequest, FleetUnavailable, ModelNotFound
from warmfleet.fleet import Ask
from warmfleet.pools.degraded import LastKnown
from warmfleet.pools.fleet_view import View
from warmfleet.pools.identified_prompt import identify
from warmfleet.pools.open_reservations import OpenReservations
from warmfleet.pools.outliers import Outliers
from warmfleet.pools.policy import PolicyChoice
from warmfleet.pools.recent.decisions import RecentDecisions
from warmfleet.pools.stalled_requests import Tries
from warmfleet.pools.ttft_window import TtftWindow
from warmfleet.prompt.popular_prefixes import PopularPrefixes
from warmfleet.protocol.wire import WORKER_TTL_SECONDS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from warmfleet.fleet import ClientLimits, Fleet
    from warmfleet.pools.degraded import DegradedMode
    from warmfleet.pools.identified_prompt import IdentifiedPrompt
    from warmfleet.prompt.request import Request

AVOID_S = 3.0  # a request that failed makes its worker avoided for so long; the fleet needs a TTL to see a death
MAX_AVOIDED = 64
FIRST_READING_S = 2.0  # requests wait so long for the first reading of the fleet
NOT_READ = (
    "The fleet was not read yet: Redis is away or slow. Ask again; for the operator, the replica's log and "
    "`warmfleet doctor` say what is wrong."
)
NAMED_MODELS = 16  # an error names so many models; /v1/models lists them all
NAMED_CHARACTERS = 80  # of each name


class Pool:
    """The workers of one model tag, and everything that this replica remembers about requests for them.

    ``view`` is the last reading of the fleet and ``read`` is set after the first one. ``reservations`` are this
    replica's own, ``tries`` its requests that wait for an engine, ``outliers`` its verdicts on workers, ``ttft`` its
    clients' times to first token, ``uses`` the prefixes that its prompts share, and ``recent`` its last decisions.
    ``degraded`` and ``last_known`` choose a worker while Redis cannot.
    """

    def __init__(
        self, tag: str, fleet: Fleet, degraded: DegradedMode, policy: str = "cost", objective_s: float = 0.0
    ) -> None:
        self.tag = tag
        self.name = tag.partition("#")[0]
        self.fleet = fleet
        self.degraded = degraded
        self.policy = PolicyChoice(policy)
        self.view = View()
        self.reservations = OpenReservations()
        self.tries = Tries()
        self.outliers = Outliers()
        self.ttft = TtftWindow(objective_s)
        self.uses = PopularPrefixes()
        self.recent = RecentDecisions()
        self.read = asyncio.Event()
        self.last_known = LastKnown(fleet)
        self._avoided_until: dict[str, float] = {}

    @property
    def contacted(self) -> bool:
        """Whether the fleet was read at least once."""
        return self.read.is_set()

    @property
    def usable(self) -> bool:
        """Whether some worker is routable, and prompts can be identified as far as the workers allow it."""
        view = self.view
        needs_ids = bool(view.hashers) or any(worker.server for worker in view.workers)
        identifiable = view.identity is not None or view.text or not needs_ids
        return identifiable and any(worker.routable for worker in view.workers)

    @property
    def view_age_s(self) -> float:
        """Seconds since the last reading; infinite before the first."""
        return time.monotonic() - self.view.read_at if self.contacted else float("inf")

    def show(self, view: View) -> None:
        """Use a new reading of the fleet from now on."""
        self.view = view
        self.fleet.block_tokens = {hasher.scheme.scheme_id: hasher.scheme.block_tokens for hasher in view.hashers}
        self.read.set()
        self.last_known.show(view)

    def avoid(self, worker_id: str, seconds: float = AVOID_S) -> None:
        """Let decisions avoid this worker for a while: a request just failed there, or a health check did."""
        until = self._avoided_until
        if worker_id in until or len(until) < MAX_AVOIDED:
            until[worker_id] = max(until.get(worker_id, 0.0), time.monotonic() + seconds)

    def avoided(self) -> tuple[str, ...]:
        """Ids of the workers that decisions avoid at this moment."""
        if not self._avoided_until:
            return ()
        now = time.monotonic()
        self._avoided_until = {worker: until for worker, until in self._avoided_until.items() if until > now}
        return tuple(self._avoided_until)

    def servers_of(self, model: str) -> int:
        """How many workers serve this name or adapter; the workers that were known last, if none does now."""
        return self.view.names.get(model) or self.last_known.names.get(model, 0)

    def identify(self, request: Request, expected_output: int) -> Awaitable[IdentifiedPrompt]:
        """Identify the request's prompt without asking an engine. Never fails; see ``identified_prompt``."""
        return identify(request, lambda: self.view, self.uses, expected_output)

    def ask(
        self,
        prompt: IdentifiedPrompt,
        reservation: str,
        exclude: tuple[str, ...],
        prefix_tokens: int,
        order: tuple[str, ...],
        limits: ClientLimits | None = None,
    ) -> Ask:
        """The question of a decision under the policy and the TTFT objective in force; arguments as in ``Ask``."""
        return Ask(
            reservation,
            prompt.chains,
            prompt.prompt_tokens,
            prompt.decode_tokens,
            self.policy.name,
            exclude,
            0,
            prefix_tokens,
            order,
            self.ttft.in_force_s,
            limits,
        )


class Pools:
    """All models of this replica."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self.all = tuple(pools)
        self._by_name = {pool.name: pool for pool in reversed(self.all)}
        self._contacted = False  # it is only set: readings are never forgotten
        self._first_reading_until: float | None = None
        self._ready_at = float("inf")

    def unready(self) -> str:
        """Why this new replica should get no requests yet; "" once it is ready.

        It is ready when every model is usable. After a worker's TTL it is ready in any case: what is missing then is
        missing in the fleet, not in this replica.
        """
        if not self.contacted:
            return "no contact with Redis yet"
        now = time.monotonic()
        wait = 0.0 if all(pool.usable for pool in self.all) else WORKER_TTL_SECONDS
        self._ready_at = min(self._ready_at, now + wait)
        return "" if self._ready_at <= now else "no worker is routable yet, or its tokenizer is not loaded"

    def names(self) -> dict[str, Pool]:
        """Every name that a routable worker serves, with its pool; a model without workers by its own name."""
        found: dict[str, Pool] = {}
        for pool in self.all:
            for name in pool.view.models or (pool.name,):
                found.setdefault(name, pool)
        return found

    def not_found(self, model: str, allowed: frozenset[str] | None = None) -> ModelNotFound:
        """The error for a model that does not exist, with the names of those that do.

        allowed: the names that the client may know; None: all.
        """
        names = sorted(name for name in self.names() if allowed is None or name in allowed)
        shown = ", ".join(f"`{name[:NAMED_CHARACTERS]}`" for name in names[:NAMED_MODELS])
        more = f" and {len(names) - NAMED_MODELS} more, which GET /v1/models lists" if names[NAMED_MODELS:] else ""
        told = f"Served are: {shown}{more}." if names else "There is none that this key may use."
        return ModelNotFound(f"The model `{model[:200]}` does not exist here. {told}", "model")

    async def find(self, model: str, allowed: frozenset[str] | None = None) -> Pool:
        """The pool that serves ``model``. Waits for the first reading of the fleet if there was none yet.

        allowed: see ``not_found``. Raises ModelNotFound, FleetUnavailable if that reading does not come, and BadRequest
        if the request names no model though this router serves several.
        """
        self._contacted = self._contacted or self.contacted
        if not self._contacted:
            await self._first_reading()
        pool = self._by_name.get(model)
        if pool is not None:  # a name that the operator gave goes to no other model, whatever workers announce
            return pool
        if not model:
            if len(self.all) == 1:
                return self.all[0]
            raise BadRequest("model is required: this router serves several.", "model")
        found = max(self.all, key=lambda pool: pool.servers_of(model))
        if found.servers_of(model):
            return found
        if not self.contacted:
            raise FleetUnavailable(NOT_READ)
        raise self.not_found(model, allowed)

    async def _first_reading(self) -> None:
        """Wait until every model was read, or until FIRST_READING_S have passed since the first request came."""
        if self._first_reading_until is None:
            self._first_reading_until = asyncio.get_running_loop().time() + FIRST_READING_S
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._first_reading_until):
                for pool in self.all:
                    await pool.read.wait()

    @property
    def contacted(self) -> bool:
        """Whether the fleet of every model was read at least once."""
        return all(pool.contacted for pool in self.all)

    async def each(self, work: Callable[[Pool], Awaitable[object]]) -> None:
        """Do ``work`` for every model, even if it fails for some; then raise the first failure."""
        failures: list[Exception] = []
        for pool in self.all:
            try:
                await work(pool)
            except Exception as error:  # noqa: BLE001  the other models go on first; it is raised below
                failures.append(error)
        if failures:
            raise failures[0]
