"""The path ``/why``, which explains slow requests by the records of this replica."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse
from starlette.routing import Route

from warmfleet.api.request_facts import started_at
from warmfleet.api.request_reasons import told
from warmfleet.engines.request_headers import safe_request_id
from warmfleet.errors import BadRequest

if TYPE_CHECKING:
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response

    from warmfleet.api.access.operators import Operators
    from warmfleet.tracing.last_requests import LastRequests

ORDERS = ("slowest", "last", "failed")
USUAL_COUNT, MOST = 10, 100
MAX_ID = 512  # most characters of an id to look for, which is a client's id with additions of routers and engines


class WhyRoutes:
    """The handler of ``/why`` for Starlette."""

    def __init__(self, last: LastRequests, replica: str, operators: Operators) -> None:
        """replica: the name of this replica in the fleet."""
        self._last = last
        self._replica = replica
        self._operators = operators

    def routes(self) -> list[Route]:
        """Return every path with its handler."""
        return [Route("/why", self.why)]

    async def why(self, request: HTTPRequest) -> Response:
        """Why requests were slow: those with an id, or the slowest, the last or the failed ones of this replica."""
        self._operators.may_act(request)
        asked = request.query_params.get("id", "").strip()
        order = request.query_params.get("order", ORDERS[0])
        count = request.query_params.get("count", str(USUAL_COUNT))
        if len(asked) > MAX_ID:
            raise BadRequest(f"id may have {MAX_ID} characters.", "id")
        if order not in ORDERS:
            raise BadRequest(f"order must be one of {', '.join(ORDERS)}.", "order")
        if not count.isascii() or not count.isdigit() or len(count) > 3 or not 0 < int(count) <= MOST:
            raise BadRequest(f"count must be a number from 1 to {MOST}.", "count")
        kept = self._last.all()
        if asked:
            found = self._last.found(asked, safe_request_id(asked.encode("utf-8", "replace")))
        else:
            found = {"slowest": self._last.slowest, "last": lambda: kept, "failed": self._last.failed}[order]()
        now = time.perf_counter()
        answer = {
            "replica": self._replica,
            "kept": len(kept),
            "since": round(started_at(kept[-1]), 3) if kept else None,
            "requests": [told(record, now) for record in found[: int(count)]],
        }
        return JSONResponse(answer)
