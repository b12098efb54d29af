"""The lines of a process: text or JSON, written by a thread that delays nobody, dropped and counted beyond a bound."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from warmfleet.logs import output
from warmfleet.logs.lines import Line, log_request_id
from warmfleet.logs.output import LogOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

logger = logging.getLogger("warmfleet.tests")


def logged(form: str, work: Callable[[], object], level: str = "info", replica: str = "") -> list[str]:
    stream = io.StringIO()
    with LogOutput(level, form, replica, stream):
        work()
    return stream.getvalue().splitlines()


async def serve_badly() -> None:
    async def other_work() -> None:
        logger.warning("work of another task")

    log_request_id("abc", "trace-1")
    try:
        _ = dict[str, int]()["a bug"]
    except KeyError:
        logger.exception("a request failed")
    await asyncio.create_task(other_work())


def fail() -> None:
    asyncio.run(serve_badly())


def test_text_and_json_tell_the_same() -> None:
    first, *others = logged("text", fail)
    assert first.endswith(" ERROR warmfleet.tests a request failed [request abc]")
    assert others[0].startswith("Traceback")
    assert others[-2] == "KeyError: 'a bug'"
    assert others[-1].endswith("work of another task"), "another task may go on after the request, and belongs to none"
    line, other = map(json.loads, logged("json", fail, replica="1"))
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

    found = {level: [line.split()[-1] for line in logged("text", say, level)] for level in ("debug", "info", "warning")}
    assert found == {"debug": ["d", "i", "w"], "info": ["i", "w"], "warning": ["w"]}


def test_what_was_before_comes_back() -> None:
    root = logging.getLogger()
    before = (root.level, root.handlers[:])
    logged("json", lambda: logger.info("x"), "debug")
    assert (root.level, root.handlers) == before


def answered(status: object) -> Line:
    return Line(1_700_000_000.25, "INFO", "warmfleet.access", "GET /", "id-1", "", {"status": status})


def test_repeated_lines_are_folded_but_never_those_of_the_access_log() -> None:
    stream = io.StringIO()
    with LogOutput("info", "json", stream=stream) as log:
        for _ in range(50):
            logger.warning("the same")
            log.later(answered, 200)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["message"] for line in lines].count("the same") == 1
    found = [line for line in lines if line.get("status") == 200 and line["request_id"] == "id-1"]
    assert len(found) == 50
    assert (found[0]["time"], found[0]["logger"]) == ("2023-11-14T22:13:20.250+00:00", "warmfleet.access")


def test_a_line_that_the_thread_makes_looks_like_any_other() -> None:
    for form in ("text", "json"):
        stream = io.StringIO()
        with LogOutput("info", form, "2", stream) as log:
            record = logging.LogRecord("warmfleet.access", logging.INFO, "", 0, "GET /", None, None)
            record.created, record.msecs = 1_700_000_000.25, 250.0
            record.request_id = "id-1"
            logger.handle(record)
            log.flush()
            log.later(answered, 200)
        first, second = stream.getvalue().splitlines()
        if form == "text":
            assert first == second
        else:
            assert json.loads(first) | {"status": 200} == json.loads(second)


def test_many_lines_at_once_wake_the_thread_seldom_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    written: list[str] = []
    monkeypatch.setattr(stream, "write", written.append)
    monkeypatch.setattr(output, "MAX_WAITING", 100)
    drops: list[int] = []
    with LogOutput("info", "text", stream=stream) as log:
        log.on_drop = partial(drops.append, 1)
        for _ in range(150):
            log.later(answered, 200)
    lines = "".join(written).splitlines()
    assert len(lines) + len(drops) == 150 + lines[-1].endswith("the reader of this log is too slow")
    assert len(drops) == 50
    assert len(written) <= 4


def test_lines_that_come_while_as_many_as_may_wait_are_made_are_written_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_WAITING", 100)
    stream = io.StringIO()

    def made_while_another_request_ends(status: object) -> Line:
        log.later(answered, 201)
        return answered(status)

    with LogOutput("info", "json", stream=stream) as log:
        log.later(made_while_another_request_ends, 200)
        for _ in range(99):
            log.later(answered, 200)
        ends_at = time.monotonic() + 5
        while "201" not in stream.getvalue():
            assert time.monotonic() < ends_at, "no line is written any more"
            time.sleep(0.01)


def test_a_line_that_cannot_be_made_ends_nothing() -> None:
    stream, drops = io.StringIO(), list[int]()
    with LogOutput("info", "json", stream=stream) as log:
        log.on_drop = partial(drops.append, 1)
        log.later(answered, 2**70)  # no JSON of ours has such a number
        log.later(lambda subject: 1 / subject, 0)
        log.later(answered, 200)
    first, last = map(json.loads, stream.getvalue().splitlines())
    assert (first["status"], last["message"].partition(" ")[0], len(drops)) == (200, "2", 2)


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


def test_a_line_that_no_format_holds_ends_nothing() -> None:
    for form in ("text", "json"):
        stream = io.StringIO()
        drops: list[int] = []
        with LogOutput("info", form, stream=stream) as log:
            log.on_drop = partial(drops.append, 1)
            logger.info("half a character: \ud800")
            logger.info("the next line")
        lines = stream.getvalue().splitlines()
        assert len(lines) == 2
        assert lines[-1].endswith("the next line") or json.loads(lines[-1])["message"] == "the next line"
        assert len(drops) == (1 if form == "json" else 0)
    first, _ = map(json.loads, lines)
    assert first["message"] == r"'half a character: \ud800'"
    assert (first["logger"], first["level"]) == ("warmfleet.tests", "info")


def test_an_output_of_another_kind_of_error_ends_nothing() -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            if "bad" in text:
                raise RuntimeError(text)
            return super().write(text)

    stream, drops = Broken(), []
    with LogOutput("info", "text", stream=stream) as log:
        log.on_drop = lambda: drops.append(1)
        logger.info("bad")
        logger.info("good")
    assert "good" in stream.getvalue()
    assert len(drops) == 1


def test_a_wrong_call_costs_its_line_and_raises_nothing() -> None:
    def say() -> None:
        for _ in range(50):
            logger.warning("%d engines", "secret of a client")
            logger.info("%d of %d", 1, extra={"fields": {}})
        logger.warning("goes on")

    lines = [json.loads(line) for line in logged("json", say)]
    wrong = [line["message"] for line in lines if line["logger"] == "warmfleet.logs"]
    assert wrong[0].endswith("cannot be made: TypeError")
    assert "test_output.py:" in wrong[0]
    assert len(wrong) == 3, "two statements, and their number at the end"
    assert "98 more like it" in wrong[-1]
    assert "secret" not in str(lines)
    assert "goes on" in [line["message"] for line in lines]


def test_what_was_folded_is_told_at_the_end_with_its_exception() -> None:
    def say() -> None:
        for number in range(20):
            try:
                raise KeyError(number)  # noqa: TRY301  the exception is what is logged
            except KeyError:
                logger.exception("a request failed")

    first, last = (json.loads(line) for line in logged("json", say))
    assert first["exception"].endswith("KeyError: 0")
    assert last["message"].startswith("... 19 more like it in 1 s")
    assert last["exception"].endswith("KeyError: 19")
