"""The access log: a line for each request that was answered. While it is off, nothing of it is on a request's way."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from warmfleet.api.application import ServiceApplication
from warmfleet.api.http_request import cleaned_request_id
from warmfleet.routing.client_answer import ClientAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable

    from warmfleet.api.http_request import HttpRequest

logger = logging.getLogger("warmfleet.access")

MAX_PATH = 200  # characters of a path that are told
WORKER = b"x-warmfleet-worker"
CUT = 499  # in place of a status: the client hung up before it was answered, as nginx has it


class NotedAnswer(ClientAnswer):
    """An answer that remembers its status, its worker and when its head was written (``time.perf_counter``)."""

    __slots__ = ("begun_at", "status", "worker")

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.status, self.worker, self.begun_at = CUT, b"", 0.0

    def _set_head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        told = list(headers)
        self.status, self.begun_at = status, time.perf_counter()
        self.worker = next((value for name, value in told if name == WORKER), b"")
        super()._set_head(status, told)


class LoggedApplication(ServiceApplication):
    """An application whose requests are logged. Its connections must make answers of NotedAnswer."""

    def __init__(self, application: ServiceApplication) -> None:
        super().__init__(application.starlette)
        self._application = application

    def serve(self, request: HttpRequest, answer: ClientAnswer, *, engines: bool) -> Coroutine[Any, Any, None]:
        """As ``ServiceApplication.serve``. A request without an id gets an id here, which all its lines tell."""
        told = next((value for name, value in request.headers if name == b"x-request-id"), b"")
        request_id = cleaned_request_id(told)
        if not told:
            request.headers.append((b"x-request-id", request_id.encode()))
        return self._logged(partial(self._application.serve, engines=engines), request, answer, request_id)

    async def _logged(
        self,
        serve: Callable[[HttpRequest, ClientAnswer], Coroutine[Any, Any, None]],
        request: HttpRequest,
        answer: ClientAnswer,
        request_id: str,
    ) -> None:
        """serve: makes the coroutine that answers, here: a task cancelled before its first step never comes here."""
        try:
            await serve(request, answer)
        finally:
            if isinstance(answer, NotedAnswer):
                log(request, answer, request_id)


def log(request: HttpRequest, answer: NotedAnswer, request_id: str) -> None:
    """Write the line of a request, without its query, headers and body."""
    now, began = time.perf_counter(), request.received_at
    path = request.target.partition(b"?")[0][:MAX_PATH].decode("ascii", "backslashreplace")
    method = request.method.decode("ascii", "backslashreplace")
    first_ms = round(1_000 * (answer.begun_at - began), 1) if answer.begun_at else None
    fields = {
        "method": method,
        "path": path,
        "status": answer.status,
        "complete": answer.complete,
        "ms": round(1_000 * (now - began), 1),
        "first_ms": first_ms,
        "worker": answer.worker.decode("ascii", "backslashreplace"),
    }
    text = "%s %s %d in %.1f ms%s%s"
    cut, worker = "" if answer.complete else ", cut off", f" by {fields['worker']}" if answer.worker else ""
    more = {"fields": fields, "request_id": request_id}
    logger.info(text, method, path, answer.status, fields["ms"], worker, cut, extra=more)
