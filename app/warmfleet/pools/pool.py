"""A pool as this replica sees it: its workers at the last reading, and its own requests."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from warmfleet.fleet import roles_of
from warmfleet.pools.degraded import LastKnown
from warmfleet.pools.engine_lead_time import EngineLeadTime
from warmfleet.pools.fleet_view import View
from warmfleet.pools.idle import Idle
from warmfleet.pools.image_counts import ImageCounts
from warmfleet.pools.open_reservations import OpenReservations
from warmfleet.pools.outliers import Outliers
from warmfleet.pools.policy import PolicyChoice
from warmfleet.pools.recent_decisions import RecentDecisions
from warmfleet.pools.stalled_requests import Tries
from warmfleet.pools.ttft_window import TtftWindow
from warmfleet.prompt.learned_images import LearnedImages
from warmfleet.prompt.popular_prefixes import PopularPrefixes
from warmfleet.timing import Timing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from warmfleet.fleet import Fleet, Role
    from warmfleet.pools.degraded import DegradedMode

logger = logging.getLogger("warmfleet.pools.pool")

Of = TypeVar("Of")
Answer = TypeVar("Answer")

AVOID_S = 3.0  # time for which this replica avoids a worker after a failure
REFUSED_S = 6.0  # time until a name is tried again at a worker that refused it; changed names are announced by then
UNREAD_S = 3.0  # age of the last reading of the fleet above which Redis counts as away
MAX_AVOIDED = 64  # most avoided workers at a time, and most refused names


class Pool:
    """The workers of one model tag, and everything that this replica remembers about requests for them.

    ``view`` is the last reading of the fleet and ``read`` is set after the first one. Of this replica are
    ``reservations``, ``tries`` (requests that wait for an engine), ``outliers`` (verdicts on workers), ``ttft``
    (clients' times to first token), ``lead_time`` (how much prefill engines get in advance), ``uses`` (prefixes that
    prompts share), ``learned`` and ``image_counts`` (images, and their numbers of tokens, that engines reported),
    ``recent`` (last decisions) and ``idle`` (whether no request came lately). ``degraded`` and ``last_known`` choose a
    worker while Redis cannot.
    """

    def __init__(
        self,
        tag: str,
        fleet: Fleet,
        degraded: DegradedMode,
        policy: str = "cost",
        objective_s: float = 0.0,
        timing: Timing = Timing(),
    ) -> None:
        self.tag = tag
        self.preferences: Mapping[str, float] = {}  # seconds by label: WARMFLEET_PREFER
        self.name = tag.partition("#")[0]
        self.draining = False
        self.used_permille = -1  # used part of the memory limit of its Redis, as read last; -1: not known
        self.fleet = fleet
        self.degraded = degraded
        self.policy = PolicyChoice(policy)
        self.view = View()
        self.reservations = OpenReservations()
        self.tries = Tries(timing)
        self.outliers = Outliers()
        self.ttft = TtftWindow(objective_s)
        self.lead_time = EngineLeadTime(fleet, objective_s)
        self.uses = PopularPrefixes()
        self.learned = LearnedImages()
        self.image_counts = ImageCounts()
        self.recent = RecentDecisions()
        self.idle = Idle()
        self.read = asyncio.Event()
        self.last_known = LastKnown(fleet)
        self._avoided_until: dict[str, float] = {}
        #: (worker_id, refused name) -> all names that the worker announced then, and when the name is tried again.
        self._refused: dict[tuple[str, str], tuple[object, float]] = {}

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
    def weight(self) -> int:
        """The pool's weight among the model's pools: the number of its workers, at least 1.

        Workers that are away count, too, so that the restart of an engine moves no conversation to other pools.
        """
        return max(1, len(self.view.workers))

    @property
    def view_age_s(self) -> float:
        """Seconds since the last reading; infinite before the first."""
        return time.monotonic() - self.view.read_at if self.contacted else float("inf")

    @property
    def unread(self) -> bool:
        """Whether Redis counts as away, by the age of the last reading. True before the first."""
        return self.view_age_s > UNREAD_S

    def show(self, view: View) -> None:
        """Use a new reading of the fleet from now on."""
        self.view = self._without_refused(view)
        constants = self.fleet.constants
        block_tokens = {hasher.scheme.scheme_id: hasher.scheme.block_tokens for hasher in view.hashers}
        prices = view.label_prices(self.preferences) if self.preferences else {}
        if block_tokens != constants.block_tokens or prices != constants.label_prices:
            self.fleet.use(block_tokens=block_tokens, label_prices=prices)
        if view.pairing is not None or constants.roles:
            self._use_roles(view)
        self.lead_time.steps(view.step_s)
        if view.images is not None and view.images.made != self.learned.made:
            self.learned = LearnedImages(view.images.made)
            self.fleet.images.begin_anew()
        self.read.set()
        self.last_known.show(view)

    def _use_roles(self, view: View) -> None:
        """Let decisions know the engines' roles. Without a pair to split requests over, roles do not count: an engine
        that only computes prompts for others would be idle.
        """
        roles: Mapping[int, Role] = {}
        if view.pairing is not None and view.splits is not None:
            slots = {worker.worker_id: worker.load.slot for worker in view.workers}
            roles = roles_of(slots, view.pairing.roles, view.splits.pairs)
        before = self.fleet.constants.roles
        if roles != before:
            self.fleet.use(roles=roles)
        if bool(roles) != bool(before):
            level, word = (logging.INFO, "may be split") if roles else (logging.WARNING, "cannot be split")
            logger.log(level, "%s: requests %s over a prefill and a decode engine from now on", self.tag, word)

    def avoid(self, worker_id: str, seconds: float = AVOID_S) -> None:
        """Let decisions avoid this worker for a while, after a request or a health check failed there."""
        until = self._avoided_until
        if worker_id in until or len(until) < MAX_AVOIDED:
            until[worker_id] = max(until.get(worker_id, 0.0), time.monotonic() + seconds)

    def avoided(self) -> tuple[str, ...]:
        """Return the ids of the workers that decisions avoid at this moment."""
        if not self._avoided_until:
            return ()
        now = time.monotonic()
        self._avoided_until = {worker: until for worker, until in self._avoided_until.items() if until > now}
        return tuple(self._avoided_until)

    def refused(self, worker_id: str, model: str) -> bool:
        """Send no request for a name to a worker that refused it, until it announces other names or REFUSED_S passed.

        Returns whether the refusal counts against the worker: only the first refusal since its last announcement does,
        because all its names may change at once while other requests are on their way.
        """
        names, counts = self.view.names, all(worker != worker_id for worker, _ in self._refused)
        if len(self._refused) < MAX_AVOIDED:
            self._refused[worker_id, model] = names.told(worker_id), time.monotonic() + REFUSED_S
        self.view = replace(self.view, names=names.without(worker_id, model))
        return counts

    def _without_refused(self, view: View) -> View:
        """Return the view without the names that workers have refused since they announced them."""
        if not self._refused:
            return view
        now = time.monotonic()
        self._refused = {
            name: (told, until)
            for name, (told, until) in self._refused.items()
            if until > now and told == view.names.told(name[0])
        }
        names = view.names
        for refused in self._refused:
            names = names.without(*refused)
        return view if names is view.names else replace(view, names=names)

    def servers_of(self, model: str) -> int:
        """Return how many workers serve this name now; if none does, how many did at the last usable reading."""
        return self.view.names.counts.get(model) or self.last_known.names.get(model, 0)
