"""The paths of the status page: its files, which are open to all, and its data, for operators (``Operators``).

While no page is open, only a point of the history is computed every few seconds. While pages are open, one snapshot a
second is made for all of them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response
from starlette.routing import Route

from warmfleet.api.access.operators import NOT_SHOWN, without_requests
from warmfleet.api.request_reasons import told as told_of
from warmfleet.api.status_page import snapshot
from warmfleet.api.status_page.snapshot import RUNGS
from warmfleet.background.supervisor import stop

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request as HTTPRequest

    from warmfleet.api.access.operators import Operators
    from warmfleet.api.service_routes import Health
    from warmfleet.api.status_page.history import History
    from warmfleet.pools.pool import Pool
    from warmfleet.pools.served_models import Pools
    from warmfleet.tracing.last_requests import LastRequests

SLOW = 10  # most slow requests shown: the slowest of the last hour, over all models
DATA = "/status.json"
#: Path -> file in the folder ``page`` and its type. tests/contract/test_status_page.py compares this with the folder.
FILES = {
    "/status": ("page.html", "text/html; charset=utf-8"),
    "/status/page.css": ("page.css", "text/css; charset=utf-8"),
    "/status/dom.js": ("dom.js", "text/javascript; charset=utf-8"),
    "/status/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/status/plots.js": ("plots.js", "text/javascript; charset=utf-8"),
    "/status/tables.js": ("tables.js", "text/javascript; charset=utf-8"),
}
FOLDER = Path(__file__).with_name("page")
#: Headers by which the page may run only its own files and ask only its own replica, and no other page may frame it.
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class StatusPage:
    """Handlers for Starlette, and the snapshot that all open pages share."""

    def __init__(
        self,
        pools: Pools,
        history: History,
        last: LastRequests,
        operators: Operators,
        health: Health,
        snapshot_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """snapshot_s: time for which one snapshot answers all requests for the data."""
        self._pools = pools
        self._history = history
        self._last = last
        self._operators = operators
        self._health = health
        self._snapshot_s = snapshot_s
        self._clock = clock
        self._began = clock()
        self._made_at = float("-inf")
        self._snapshot = self._sums = b""
        self._rows: dict[str, dict[int, dict[str, Any]]] = {}  # last decisions: model -> number -> row
        self._making: asyncio.Task[None] | None = None

    def routes(self) -> list[Route]:
        """Return the paths of the page, its files, and its data, with their handlers."""
        return [Route(DATA, self.data), *(Route(path, self._file(*named)) for path, named in FILES.items())]

    async def data(self, request: HTTPRequest) -> Response:
        """The data of the status page, at most one second old."""
        self._operators.may_read_sums(request)
        if self._clock() - self._made_at >= self._snapshot_s:
            if self._making is None or self._making.done():
                self._making = asyncio.create_task(self._make())
            await asyncio.shield(self._making)
        shown = self._snapshot if self._operators.sees_requests(request) else self._sums
        return Response(shown, media_type="application/json", headers={"cache-control": "no-store"})

    async def close(self) -> None:
        """End the snapshot that is being made."""
        if self._making is not None:
            await stop([self._making])

    def _file(self, name: str, kind: str) -> Callable[[HTTPRequest], Awaitable[Response]]:
        content = (FOLDER / name).read_bytes()

        async def file(_request: HTTPRequest) -> Response:
            """The status page, or a file of it."""
            return Response(content, headers=HEADERS | {"content-type": kind})

        return file

    async def _make(self) -> None:
        models = await asyncio.gather(*map(self._model, self._pools.all))
        replica = {
            "name": f"{socket.gethostname()}, process {os.getpid()}",
            "up_s": round(self._clock() - self._began),
            "draining": self._health.draining,
        }
        now = time.perf_counter()
        slow = [snapshot.slow_row(told_of(record, now)) for record in self._last.slowest()[:SLOW]]
        told = {"at": time.time(), "replica": replica, "rungs": RUNGS, "models": models, "slow": slow, "hidden": ""}
        self._snapshot = orjson.dumps(told)
        if self._operators.hides:
            sums = [without_requests(model) for model in models]
            self._sums = orjson.dumps(told | {"models": sums, "slow": [], "hidden": NOT_SHOWN})
        self._made_at = self._clock()

    async def _model(self, pool: Pool) -> dict[str, Any]:
        found = await snapshot.read(pool)
        pool.recent.wanted = True  # the next decision returns all candidates, for the next snapshot
        lately, history = self._history.lately(pool), self._history.columns(pool)
        rows = snapshot.decision_rows(pool.recent.newest(), self._rows.get(pool.tag, {}))
        self._rows[pool.tag] = rows
        past = {"lately": lately, "history": history, "decisions": [*rows.values()]}
        return snapshot.figures(pool, self._pools, found) | past
