"""The paths for gateways that forward requests by themselves: they ask for a worker and report the outcome."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any, get_args

from starlette.responses import JSONResponse
from starlette.routing import Route

from warmfleet.api.client_hints import operators_hints, patience_s
from warmfleet.api.http_request import request_id
from warmfleet.errors import BadRequest, WarmfleetError
from warmfleet.fleet.bookings import Outcome
from warmfleet.prompt import request as requests
from warmfleet.prompt.request import PATHS
from warmfleet.protocol.wire import RESERVATION
from warmfleet.routing.call import Call
from warmfleet.routing.gateway import Ending, Handover
from warmfleet.tracing.request_record import RequestRecord

if TYPE_CHECKING:
    from starlette.requests import Request as HTTPRequest
    from starlette.responses import Response

    from warmfleet.api.access.client_keys import ClientKeys
    from warmfleet.api.access.operators import Operators
    from warmfleet.prompt.engine_paths import EnginePath, EnginePaths
    from warmfleet.routing.gateway import Gateway, Placement
    from warmfleet.routing.tenants import Tenancy
    from warmfleet.settings import Settings
    from warmfleet.tracing.last_requests import LastRequests

TENANT, KEY = b"x-warmfleet-tenant", b"idempotency-key"
MAX_KEY_BYTES = 256
MAX_OUTPUT_TOKENS = 100_000_000  # most tokens of an answer that a gateway may report; no answer has as many
MAX_EXCLUDED = 64  # most ids of workers that a gateway may exclude, because they failed this request
OUTCOMES = get_args(Outcome)
_RESERVATION = re.compile(RESERVATION)


class GatewayRoutes:
    """Handlers for Starlette. Gateways need the same rights as operators."""

    def __init__(
        self,
        gateway: Gateway,
        tenancy: Tenancy,
        paths: EnginePaths,
        keys: ClientKeys,
        settings: Settings,
        operators: Operators,
        last: LastRequests,
    ) -> None:
        self._gateway = gateway
        self._tenancy = tenancy
        self._last = last
        self._keys = keys
        self._paths = paths
        self._operators = operators
        self._keys_required = keys.required
        self._tenant_header = settings.tenant_header.lower().encode("latin-1")

    def routes(self) -> list[Route]:
        """Return every path with its handler."""
        return [
            Route("/route", self.route, methods=["POST"]),
            Route("/settle", self.settle, methods=["POST"]),
            Route("/renew", self.renew, methods=["POST"]),
        ]

    async def route(self, request: HTTPRequest) -> Response:
        """The worker for the request in the body, with a reservation, which the gateway settles."""
        self._operators.may_act(request)
        raw = request.headers.raw
        body, given = await request.body(), dict(raw)
        client = given.get(TENANT, b"").decode("latin-1") if self._keys_required else ""
        if TENANT in given:
            raw = [*(field for field in raw if field[0] != self._tenant_header), (self._tenant_header, given[TENANT])]
        key = given.get(KEY, b"")
        if len(key) > MAX_KEY_BYTES:
            raise BadRequest(f"Idempotency-Key may have {MAX_KEY_BYTES} bytes.", "Idempotency-Key")
        tenant, flow = self._tenancy.of(raw, client)
        record = RequestRecord(request_id(raw), self._path(request), "POST", time.perf_counter())
        call = Call(
            record.path,
            body,
            record,
            b"",
            tenant,
            flow,
            patience_s(given.get(b"x-request-timeout-ms")),
            record.began_at,
            operators_hints(raw),
            limits=self._keys.limits_of(client),
            content_type=given.get(b"content-type", b""),
            named=b"x-request-id" in given,
        )
        handover = Handover(b"%d:%b%b" % (len(tenant), tenant, key) if key else b"", _excluded(request))
        return JSONResponse((await self._place(call, handover, record))._asdict())

    async def _place(self, call: Call, handover: Handover, record: RequestRecord) -> Placement:
        """Place the call, and keep its record, which gets the outcome when the gateway reports it."""
        self._last.begun(record)
        record.placed = True
        try:
            return await self._gateway.place(call, handover)
        except WarmfleetError as error:
            record.refused(error)
            raise
        finally:
            record.end(record.error_status, complete=not record.error_status)
            self._last.ended(record)

    async def settle(self, request: HTTPRequest) -> Response:
        """Take the outcome of a reservation; the call is safe to repeat."""
        model, reservation, data = await self._reservation(request)
        return JSONResponse({"result": await self._gateway.settle(model, reservation, _ending(data))})

    async def renew(self, request: HTTPRequest) -> Response:
        """Let a reservation live on while its answer runs."""
        model, reservation, _ = await self._reservation(request)
        return JSONResponse({"expires_in_s": await self._gateway.renew(model, reservation)})

    async def _reservation(self, request: HTTPRequest) -> tuple[str, str, dict[str, Any]]:
        """Read the model, the reservation and the whole body. Raises BadRequest, Unauthorized, Forbidden."""
        self._operators.may_act(request)
        data = requests.decoded(await request.body())
        model, reservation = data.get("model"), data.get("reservation")
        if model is None:
            model = ""
        if not isinstance(model, str):
            raise BadRequest("model must be a string.", "model")
        if not isinstance(reservation, str) or not _RESERVATION.fullmatch(reservation):
            raise BadRequest("reservation must be one that /route answered.", "reservation")
        return model, reservation, data

    def _path(self, request: HTTPRequest) -> EnginePath:
        path = self._paths.find(request.query_params.get("endpoint", PATHS["chat"]))
        if path is None:
            raise BadRequest("endpoint must be a path of engines, such as /v1/chat/completions.", "endpoint")
        return path


def _excluded(request: HTTPRequest) -> tuple[str, ...]:
    workers = tuple(name for name in request.query_params.get("exclude", "").split(",") if name)
    if len(workers) > MAX_EXCLUDED:
        raise BadRequest(f"exclude may name {MAX_EXCLUDED} workers.", "exclude")
    return workers


def _ending(data: dict[str, Any]) -> Ending:
    """Read the outcome of a request from a gateway's report. Raises BadRequest."""
    outcome: Any = data.get("outcome")
    if outcome not in OUTCOMES:
        raise BadRequest(f"outcome must be one of {', '.join(OUTCOMES)}.", "outcome")
    status = data.get("status")
    if type(status) is float and status.is_integer():  # JSON does not distinguish 200.0 from 200
        status = int(status)
    if status is not None and (type(status) is not int or not 100 <= status < 600):
        raise BadRequest("status must be the status of the engine's answer, 100 to 599.", "status")
    failed = data.get("failed_workers")
    failed = [] if failed is None else failed
    if not isinstance(failed, list) or len(failed) > MAX_EXCLUDED or {*map(type, failed)} - {str}:
        raise BadRequest(f"failed_workers must be a list of up to {MAX_EXCLUDED} ids of workers.", "failed_workers")
    tokens = data.get("output_tokens", 0)
    if type(tokens) is float and tokens.is_integer():
        tokens = int(tokens)
    if type(tokens) is not int or not 0 <= tokens <= MAX_OUTPUT_TOKENS:
        raise BadRequest(f"output_tokens must be an integer from 0 to {MAX_OUTPUT_TOKENS}.", "output_tokens")
    return Ending(outcome, status, tuple(failed), tokens)
