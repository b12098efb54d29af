"""The access log: a line for each request that was answered, where the operator wants it.

The thread that writes the log also formats each line. No line has the query, the headers or the body of a request, nor
anything of an answer.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from warmfleet.api.request_facts import HUNG_UP_STATUS, facts, ms, started_at
from warmfleet.logs.lines import Line

if TYPE_CHECKING:
    from warmfleet.api.http_request import HttpRequest
    from warmfleet.logs.output import LogOutput
    from warmfleet.routing.client_answer import ClientAnswer
    from warmfleet.tracing.request_record import RequestRecord

LOGGER = "warmfleet.access"
MAX_PATH = 200  # most characters of a path that a line shows


class AccessLog:
    """Logs answered requests. ``engines``: requests sent to engines; ``own``: requests that this replica answered."""

    def __init__(self, output: LogOutput) -> None:
        self._later = output.later

    def engines(self, record: RequestRecord) -> None:
        """Log the end of a request to engines."""
        self._later(line_of, record)

    def own(self, request: HttpRequest, answer: ClientAnswer, request_id: str) -> None:
        """Log a request that this replica answered itself, or refused before its path was known."""
        now = time.perf_counter()
        fields: dict[str, Any] = {
            "method": request.method.decode("ascii", "backslashreplace"),
            "path": request.target.partition(b"?")[0][:MAX_PATH].decode("ascii", "backslashreplace"),
            "status": answer.status or HUNG_UP_STATUS,
            "complete": answer.complete,
            "ms": ms(now - request.received_at),
        }
        self._later(line_of_own, (time.time(), request_id, fields))


def line_of(record: RequestRecord) -> Line:
    """Format the line of a request to engines."""
    told = facts(record)
    at = started_at(record) + (record.ended_at - record.began_at)
    return Line(at, "INFO", LOGGER, text_of(told), record.request_id, record.trace_id, told)


def line_of_own(answered: tuple[float, str, dict[str, Any]]) -> Line:
    """Format the line of a request that this replica answered itself. answered: Unix time, request id, fields."""
    at, request_id, told = answered
    return Line(at, "INFO", LOGGER, text_of(told), request_id, "", told)


def text_of(told: dict[str, Any]) -> str:
    """Format the fields of a line as text, without fields that are unknown or have their usual value."""
    worker, tokens = told.get("worker"), told.get("prompt_tokens")
    text = f"{told['method']} {told['path']} {told['status']} in {told['ms']} ms"
    if not told["complete"]:
        text += ", cut off"
    if told.get("error"):
        text += f", {told['error']}"
    if worker is None or tokens is None:
        return text
    held = f"held {told['held_ms']} ms ({told['held']}, {told['ahead']} ahead), " if "held" in told else ""
    first_ms, predicted_ms, cached = told["first_ms"], told["predicted_ms"], told["cached_tokens"]
    text = (
        f"{text} by {worker}: {held}queue {told['queue_ms']} ms, decide {told['decide_ms']} ms, "
        f"engine {told['engine_ms']} ms (predicted {predicted_ms}), first byte {first_ms} ms, "
        f"cached {cached} of {told['matched_tokens']} expected of {tokens}, "
        f"{told['tokens']} tokens in {told['chunks']} chunks, longest gap {told['gap_ms']} ms"
    )
    return text if told["tries"] == 1 else f"{text}, {told['tries']} tries"
