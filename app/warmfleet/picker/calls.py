"""The state that a picker's calls share: memory for bodies, records, subsets, time limits."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

from warmfleet.errors import EngineTimeout, TooLarge
from warmfleet.picker import messages
from warmfleet.picker.memory import BODIES, Memory
from warmfleet.picker.messages import MessageError
from warmfleet.tracing.request_record import RequestRecord

if TYPE_CHECKING:
    from warmfleet.api.completions import Noting
    from warmfleet.errors import WarmfleetError
    from warmfleet.metrics import Metrics
    from warmfleet.picker.client_request import Asked, ClientRequests
    from warmfleet.picker.messages import Metadata
    from warmfleet.prompt.engine_paths import EnginePath
    from warmfleet.routing.picking import Picking
    from warmfleet.settings import Settings

logger = logging.getLogger("warmfleet.picker.calls")

LOOK_S = 1.0  # time between two looks for calls over a limit
#: Time without a message after which a call ends, where no limit is set for requests: no answer takes as long. So a
#: gateway that keeps a call open in silence holds load, and a place of the port, for a bounded time.
SILENT_MAX_S = 3_600.0
MAX_SUBSETS = 64  # most subsets that are remembered by their bytes; gateways send the same ones again and again
KEPT_METADATA_BYTES = 8_192  # longest metadata that are remembered
LATER_S = 5.0  # added to the longest wait in the queue when a gateway is asked to wait: for the decision itself


SUBSET_NAMESPACE, SUBSET_KEY = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
MAX_SUBSET = 8_192  # most endpoints in a subset


class Call(Protocol):
    """An open call. ``held``: bytes of a body in memory. ``began_at``, ``heard_at``: times of its begin and of the
    gateway's last message.
    """

    held: int
    began_at: float
    heard_at: float

    @property
    def over(self) -> bool:
        """Whether its request is settled."""

    def give_up_body(self, error: WarmfleetError) -> None:
        """Refuse the request, whose body takes more memory than any other."""

    def forget(self) -> None:
        """Give the reservation back, because the gateway has been silent for too long; then the request is settled."""

    def expire(self, error: EngineTimeout) -> None:
        """End the call: it is over a time limit. The client of a request that is settled is not told."""

    def stop(self) -> None:
        """End the call: the replica stops."""


class Calls:
    """The state that all calls share. ``open``: all of them. ``longest_wait_s``: of a request in the queue. ``leaves``:
    calls end behind the request where nothing is lost by that.
    """

    def __init__(
        self, picking: Picking, requests: ClientRequests, settings: Settings, metrics: Metrics, noting: Noting
    ) -> None:
        self.picking = picking
        self.requests = requests
        self.body_max_bytes = settings.body_max_bytes
        self.longest_wait_s = settings.queue_timeout_s + LATER_S
        self.leaves = settings.epp_leaves
        self.open: dict[Call, None] = {}
        self.memory = Memory(BODIES * settings.body_max_bytes)
        self._request_max_s = settings.request_max_s
        self._metrics = metrics
        self._last, _, self._access_log = noting
        self._subsets: dict[bytes, frozenset[str] | None] = {}

    # ------------------------------------------------ bodies

    def hold(self, call: Call, size: int) -> None:
        """Count bytes of a body. Raises UploadsFull if there is no memory for them, and this body is the largest."""
        self.memory.hold(call, size)

    def free(self, call: Call) -> None:
        """Give back the memory of a call's body."""
        self.memory.free(call, call.held)

    def too_large(self) -> TooLarge:
        return TooLarge(f"The body has more than {self.body_max_bytes} bytes.")

    def subset(self, metadata: bytes) -> frozenset[str] | None:
        """Return the endpoints in a message's metadata; None if it sets no limit. Raises MessageError."""
        if metadata in self._subsets:
            return self._subsets[metadata]
        places = subset_of(messages.read_metadata(metadata))
        if len(metadata) <= KEPT_METADATA_BYTES:
            if len(self._subsets) >= MAX_SUBSETS:
                self._subsets.clear()
            self._subsets[metadata] = places
        return places

    # ------------------------------------------------ records

    def begun(self, asked: Asked, path: EnginePath) -> RequestRecord:
        """Begin the record of a request."""
        record = RequestRecord(asked.request_id, path, asked.method, time.perf_counter())
        self._last.begun(record)
        self._metrics.in_flight.inc()
        return record

    def refused(self, record: RequestRecord, error: WarmfleetError) -> None:
        """Note the error that a client got."""
        record.refused(error)
        self._metrics.requests.labels(record.path.name, str(error.status), "none", "").inc()

    def ended(self, record: RequestRecord, status: int, *, complete: bool) -> None:
        """Pass the finished request's record to those that keep it."""
        self._metrics.in_flight.dec()
        record.end(status, complete=complete)
        self._last.ended(record)
        if self._access_log is not None:
            self._access_log.engines(record)

    # ------------------------------------------------ rounds

    def look(self) -> None:
        """End the calls that are over a time limit."""
        now = time.perf_counter()
        for call in [*self.open]:
            if 0 < self._request_max_s <= now - call.began_at:
                self._metrics.time_limits.labels("request_max").inc()
                call.expire(EngineTimeout(f"The request took longer than {self._request_max_s:g} s."))
            elif now - call.heard_at >= SILENT_MAX_S:
                if not call.over:
                    logger.warning("a gateway was silent about a request for %d s: its call ends", SILENT_MAX_S)
                    call.forget()
                call.expire(EngineTimeout(f"The gateway was silent for {SILENT_MAX_S:g} s."))

    def close(self) -> None:
        """Settle what is still open when the replica stops."""
        for call in [*self.open]:
            call.stop()


def subset_of(metadata: Metadata) -> frozenset[str] | None:
    """Return the endpoints to which the gateway limits a request; None if it sets no limit.

    Raises MessageError if there are too many.
    """
    told = metadata.get(SUBSET_NAMESPACE, {}).get(SUBSET_KEY)
    if told is None:
        return None
    texts = told if isinstance(told, list) else [told]
    places = {place.strip() for text in texts if isinstance(text, str) for place in text.split(",")} - {""}
    if len(places) > MAX_SUBSET:
        raise MessageError("a subset has too many endpoints")
    return frozenset(places)
