"""The lines of a process: text or JSON, written by a thread that delays nobody, dropped and counted beyond a bound."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from typing import TYPE_CHECKING

from warmfleet.logs import output
from warmfleet.logs.lines import tell_request
from warmfleet.logs.output import LogOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

logger = logging.getLogger("warmfleet.tests")


def told(form: str, work: Callable[[], object], level: str = "info", replica: str = "") -> list[str]:
    stream = io.StringIO()
    with LogOutput(level, form, replica, stream):
        work()
    return stream.getvalue().splitlines()


async def serve_badly() -> None:
    async def other_work() -> None:
        logger.warning("work of another task")

    tell_request("abc", "trace-1")
    try:
        _ = dict[str, int]()["a bug"]
    except KeyError:
        logger.exception("a request failed")
    await asyncio.create_task(other_work())


def fail() -> None:
    asyncio.run(serve_badly())


def test_text_and_json_tell_the_same() -> None:
    first, *rest = told("text", fail)
    assert first.endswith(" ERROR warmfleet.tests a request failed [request abc]")
    assert rest[0].startswith("Traceback")
    assert rest[-2] == "KeyError: 'a bug'"
    assert rest[-1].endswith("work of another task"), "which may go on after the request, and belongs to none"
    line, other = map(json.loads, told("json", fail, replica="1"))
    assert {name: line[name] for name in ("level", "logger", "message", "request_id", "trace_id", "replica")} == {
        "level": "error",
        "logger": "warmfleet.tests",
        "message": "a request failed",
        "request_id": "abc",
        "trace_id": "trace-1",
        "replica": "1",
    }
    assert not {"request_id", "trace_id"} & other.keys()
    assert line["exception"].endswith("KeyError: 'a bug'")
    assert line["time"].endswith("+00:00")


def test_levels() -> None:
    def say() -> None:
        logger.debug("d")
        logger.info("i")
        logger.warning("w")
        logging.getLogger("redis").debug("of a library")

    found = {level: [line.split()[-1] for line in told("text", say, level)] for level in ("debug", "info", "warning")}
    assert found == {"debug": ["d", "i", "w"], "info": ["i", "w"], "warning": ["w"]}


def test_what_was_before_comes_back() -> None:
    root = logging.getLogger()
    before = (root.level, root.handlers[:])
    told("json", lambda: logger.info("x"), "debug")
    assert (root.level, root.handlers) == before


def test_repeated_lines_are_folded_but_never_those_of_the_access_log() -> None:
    def say() -> None:
        for _ in range(50):
            logger.warning("the same")
            logger.info("GET /", extra={"fields": {"status": 200}, "request_id": "r"})

    lines = [json.loads(line) for line in told("json", say)]
    assert [line["message"] for line in lines].count("the same") == 1
    assert len([line for line in lines if line.get("status") == 200 and line["request_id"] == "r"]) == 50


class Stuck(io.StringIO):
    """A stream whose reader reads nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = threading.Event()

    def write(self, text: str) -> int:
        self.reads.wait(20)
        return super().write(text)


def test_a_reader_that_stands_still_costs_lines_and_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_WAITING", 100)
    monkeypatch.setattr(output, "FOLDED_LOOK_S", 0.0)
    stream, drops = Stuck(), []
    with LogOutput("info", "text", stream=stream) as log:
        log.on_drop = lambda: drops.append(1)
        for number in range(300):
            logger.info("line %d", number)  # returns at once
        stream.reads.set()
    lines = stream.getvalue().splitlines()
    assert len([line for line in lines if " line " in line]) == 300 - len(drops)
    assert 190 <= len(drops) <= 200
    assert [line for line in lines if f"{len(drops)} log lines were dropped" in line]


def test_what_waits_can_be_waited_for() -> None:
    stream = io.StringIO()
    with LogOutput("info", "text", stream=stream) as log:
        for number in range(2_000):
            logger.info("line %d", number)
        log.flush()
        assert len(stream.getvalue().splitlines()) == 2_000


def test_an_output_that_is_gone_ends_nothing() -> None:
    stream = io.StringIO()
    with LogOutput("info", "text", stream=stream) as log:
        stream.close()
        logger.info("x")
    assert log._dropped == 1
