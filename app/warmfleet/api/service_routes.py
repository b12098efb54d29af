"""The paths that this replica answers itself: models, health, version, metrics, workers, explain."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from warmfleet.api import fleet_status
from warmfleet.api.access.operators import without_requests
from warmfleet.api.client_hints import operators_hints
from warmfleet.api.model_listing import entries
from warmfleet.errors import BadRequest
from warmfleet.prompt import request as requests
from warmfleet.prompt.dialects import bodies
from warmfleet.prompt.engine_paths import KNOWN
from warmfleet.prompt.request import PATHS

if TYPE_CHECKING:
    from starlette.requests import Request as HTTPRequest

    from warmfleet.api.access.client_keys import ClientKeys
    from warmfleet.api.access.operators import Operators
    from warmfleet.metrics import Metrics
    from warmfleet.routing.router import Router
    from warmfleet.settings import Settings


class Health:
    """Holds whether this replica drains (``draining``), which a stop signal sets."""

    draining = False


class ServiceRoutes:
    """Handlers for Starlette. ``operators`` guards the paths that tell about requests of all clients."""

    def __init__(
        self,
        router: Router,
        keys: ClientKeys,
        settings: Settings,
        metrics: Metrics,
        health: Health,
        operators: Operators,
    ) -> None:
        self._keys = keys
        self._operators = operators
        self._tenancy = router.tenancy
        self._pools = router.pools
        self._settings = settings
        self._metrics = metrics
        self._health = health
        self._since = int(time.time())

    def for_clients(self) -> list[Route]:
        """Return the paths that clients use, with their handlers."""
        return [Route("/v1/models", self.models), Route("/v1/models/{model:path}", self.model)]

    def for_operators(self) -> list[Route]:
        """Return the paths that tell about requests of all clients, with their handlers."""
        return [
            Route("/metrics", self.metrics),
            Route("/workers", self.workers),
            Route("/replicas", self.replicas),
            Route("/explain", self.explain, methods=["POST"]),
        ]

    def for_everybody(self) -> list[Route]:
        """Return the paths that balancers and browsers ask for, with their handlers."""
        return [
            Route("/health", self.readyz),
            Route("/ping", self.readyz, methods=["GET", "POST"]),
            Route("/version", self.version),
            Route("/livez", self.livez),
            Route("/readyz", self.readyz),
            Route("/favicon.ico", self.favicon),
        ]

    async def models(self, request: HTTPRequest) -> Response:
        """All models that this client may use, in the form of OpenAI's API."""
        return JSONResponse({"object": "list", "data": self._models(request)})

    async def model(self, request: HTTPRequest) -> Response:
        """The model of this name, which may have slashes."""
        name = request.path_params["model"]
        for entry in self._models(request):
            if entry["id"] == name:
                return JSONResponse(entry)
        raise self._pools.not_found(name, self._keys.client(request.headers.raw).models)

    def _models(self, request: HTTPRequest) -> list[dict[str, Any]]:
        """Return the models that this client may use. Raises Unauthorized."""
        client = self._keys.client(request.headers.raw)
        return [entry for entry in entries(self._pools, self._since) if client.may_use(entry["id"])]

    async def version(self, _request: HTTPRequest) -> Response:
        """The version of most engines, in vLLM's own field for it, and the number of engines by version."""
        return JSONResponse(fleet_status.versions(self._pools))

    async def livez(self, _request: HTTPRequest) -> Response:
        """200 while the event loop runs."""
        return JSONResponse({"status": "alive"})

    async def readyz(self, _request: HTTPRequest) -> Response:
        """200 once requests can be served, and from then on until this replica drains; else 503 with the reason."""
        reason = "draining" if self._health.draining else self._pools.unready()
        return JSONResponse({"status": reason or "ready"}, status_code=503 if reason else 200)

    async def metrics(self, request: HTTPRequest) -> Response:
        """All metrics, for Prometheus."""
        self._operators.may_read_sums(request)
        fleet_status.gauges(self._pools, self._metrics)
        page = list[bytes]()
        for family in self._metrics.families():
            page.append(family)
            await asyncio.sleep(0)  # lets other requests run between two metrics
        return Response(b"".join(page), headers={"content-type": self._metrics.content_type})

    async def workers(self, request: HTTPRequest) -> Response:
        """Every worker of every model."""
        self._operators.may_read_sums(request)
        models = [await fleet_status.workers(pool, self._pools) for pool in self._pools.all]
        if not self._operators.sees_requests(request):
            models = [without_requests(model) for model in models]
        return JSONResponse({"models": models})

    async def replicas(self, request: HTTPRequest) -> Response:
        """Every replica of the fleet, by its announcement in Redis."""
        self._operators.may_read_sums(request)
        return JSONResponse(await fleet_status.replicas(self._pools))

    async def explain(self, request: HTTPRequest) -> Response:
        """The worker that a request would get now, and why.

        The body is the request. It may have two more fields: ``endpoint``, the path that the request would be sent to
        (by default the path that its ``messages`` or ``prompt`` belong to), and ``tenant``, a value of the tenant
        header.
        """
        self._operators.may_act(request)
        body = requests.in_utf8(await request.body())
        data = requests.decoded(body)
        tenant = data.pop("tenant", None)
        if not isinstance(tenant, str | None):
            raise BadRequest("tenant must be a string: a value of the tenant header.", "tenant")
        path = data.pop("endpoint", PATHS["chat" if "messages" in data else "completions"])
        known = KNOWN.get(path) if isinstance(path, str) else None
        if known is None or known.form in ("unknown", "none"):
            read = ", ".join(path.path for path in KNOWN.values() if path.form not in ("unknown", "none"))
            raise BadRequest(f"endpoint must be one of {read}.", "endpoint")
        asked = bodies.from_dict(known, data, self._settings.allowed_fields, len(body))
        requests.note_inexact(asked, data, body)
        raw = request.headers.raw
        hints = operators_hints(raw)
        asked.labels = hints.labels
        named, tenancy = None if tenant is None else tenant.encode("utf-8", "replace"), self._tenancy
        owner, flow = tenancy.of(raw) if named is None else (named, tenancy.flow_of(named))
        asked.salt = tenancy.salt(owner, asked.salt)
        asked.media_id = tenancy.media_names(owner)
        pool = await self._pools.find(asked.model)
        model = self._pools.served[pool.name]
        priority = requests.priority(asked) if self._settings.queue_priority else 0
        has_ledger = self._settings.session_wait_max_s > 0
        inquiry = fleet_status.Inquiry(known.form, asked, hints, flow, priority, has_ledger=has_ledger)
        return JSONResponse(await fleet_status.explain(model, pool, inquiry))

    async def favicon(self, _request: HTTPRequest) -> Response:
        """An empty answer, so that browsers cause no 404."""
        return Response(status_code=204)
