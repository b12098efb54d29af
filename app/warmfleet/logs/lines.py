"""Formats a log record as a line: text for people, or one JSON object for collectors, without content of prompts."""

from __future__ import annotations

import asyncio
import logging
import time
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

if TYPE_CHECKING:
    from collections.abc import Mapping

#: The ``id`` of the task that serves a request, the request's id and its trace's. Tasks started by that task inherit
#: the values, but have another ``id``, so their lines get no request id: they may outlive the request.
_SERVED: ContextVar[tuple[int, str, str]] = ContextVar("served", default=(0, "", ""))


class Line(NamedTuple):
    """A line made without a LogRecord, to save time. at: Unix time. fields: more fields, for JsonLines."""

    at: float
    level: str
    logger: str
    message: str
    request_id: str
    trace_id: str
    fields: Mapping[str, Any]


def log_request_id(request_id: str, trace_id: str = "") -> None:
    """Put this X-Request-Id, and in JSON the trace, into each line that the current task logs from now on."""
    _SERVED.set((id(asyncio.current_task()), request_id, trace_id))


def _request_of_task() -> tuple[str, str]:
    task, request_id, trace_id = _SERVED.get()
    try:
        return (request_id, trace_id) if task and task == id(asyncio.current_task()) else ("", "")
    except RuntimeError:  # another thread, where no loop runs
        return "", ""


def prepared(record: logging.LogRecord) -> logging.LogRecord:
    """Prepare the record for another thread by making its text, so that it keeps no argument of the call alive."""
    record.msg, record.args = record.getMessage(), None
    if record.exc_info:
        record.exc_text = logging.Formatter().formatException(record.exc_info)
        record.exc_info = None
    request_id, trace_id = _request_of_task()
    if not hasattr(record, "request_id"):
        record.request_id = request_id
    if not hasattr(record, "trace_id"):
        record.trace_id = trace_id
    return record


def in_ascii(record: logging.LogRecord) -> logging.LogRecord:
    """Return a copy in ASCII of a prepared record that a formatter cannot write: text, time and code line."""
    text = ascii(record.getMessage())
    plain = logging.LogRecord(record.name, record.levelno, record.pathname, record.lineno, text, None, None)
    plain.created, plain.msecs = record.created, record.msecs
    plain.exc_text = ascii(record.exc_text) if record.exc_text else None
    return plain


class TextLines(logging.Formatter):
    """Lines of time, level, place and text. The request id follows the text if there is one."""

    def __init__(self, replica: str) -> None:
        """replica: the name of this process among the replicas on one port; empty if it is alone."""
        self._name = f"replica-{replica} " if replica else ""
        self._second, self._shown = 0, ""
        super().__init__(f"%(asctime)s %(levelname)s {self._name}%(name)s %(message)s")

    def line(self, content: Line) -> str:
        """Make the text that ``format`` makes, of a line without a LogRecord."""
        second = int(content.at)
        if second != self._second:
            self._second, self._shown = second, time.strftime(self.default_time_format, self.converter(second))
        head = f"{self._shown},{int(1_000 * (content.at - second)):03d} {content.level} {self._name}{content.logger}"
        return f"{head} {content.message} [request {content.request_id}]"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the library's name
        line = super().formatMessage(record)
        found = getattr(record, "request_id", "")
        return f"{line} [request {found}]" if found and found not in line else line


class JsonLines(logging.Formatter):
    """Lines of one JSON object: time (UTC), level, logger, message; if known request_id, trace_id, replica, exception.

    The ``fields`` of a ``Line`` are added to the object.
    """

    def __init__(self, replica: str) -> None:
        """replica: as in TextLines."""
        super().__init__()
        self._replica = replica
        self._second, self._shown = 0, ""

    def line(self, content: Line) -> str:
        """Make the JSON that ``format`` makes, of a line without a LogRecord."""
        second = int(content.at)
        if second != self._second:
            self._second, self._shown = second, datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        line: dict[str, Any] = {
            "time": f"{self._shown}.{int(1_000 * (content.at - second)):03d}+00:00",
            "level": content.level.lower(),
            "logger": content.logger,
            "message": content.message,
            "request_id": content.request_id,
        }
        if content.trace_id:
            line["trace_id"] = content.trace_id
        if self._replica:
            line["replica"] = self._replica
        line.update(content.fields)
        return orjson.dumps(line).decode()

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        found = {name: getattr(record, name, "") for name in ("request_id", "trace_id")} | {"replica": self._replica}
        line |= {name: value for name, value in found.items() if value}
        if record.exc_text:
            line["exception"] = record.exc_text
        return orjson.dumps(line, default=str).decode()
