"""Log lines that repeat are folded, those that differ are told, and nothing is lost without being counted."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from warmfleet.logs import folding
from warmfleet.logs.folding import MAX_TEXTS, WINDOW_S, Folding

if TYPE_CHECKING:
    import pytest


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def line(text: str, *args: object, level: int = logging.WARNING, name: str = "warmfleet.x") -> logging.LogRecord:
    return logging.LogRecord(name, level, "", 0, text, args, None)


def test_a_warning_that_repeats_is_told_once_and_counted_once_a_minute() -> None:
    clock = Clock()
    fold = Folding(clock)
    assert [fold.filter(line("engine %s is away", "a")) for _ in range(241)] == [True] + [False] * 240
    assert fold.ended() == []
    clock.now = WINDOW_S
    (summary,) = fold.ended()
    assert summary.getMessage() == "... 240 more like it in 60 s, the last: engine a is away"
    assert (summary.levelno, summary.name) == (logging.WARNING, "warmfleet.x")
    assert fold.ended() == []
    assert fold.filter(line("engine %s is away", "a")), "the next minute begins anew"


def test_of_warnings_that_differ_in_their_figures_some_are_told() -> None:
    fold = Folding(Clock())
    passed = [fold.filter(line("engine %s is away", number)) for number in range(100)]
    assert passed == [True] * MAX_TEXTS + [False] * (100 - MAX_TEXTS)
    assert fold.filter(line("engine %s is away", 1, name="warmfleet.y")), "of another place"
    assert fold.filter(line("engine %s is away", 1, level=logging.ERROR))


def test_lines_of_information_are_folded_only_if_they_are_equal() -> None:
    fold = Folding(Clock())
    assert all(fold.filter(line("engine %s serves", number, level=logging.INFO)) for number in range(100))
    assert not fold.filter(line("engine %s serves", 5, level=logging.INFO))
    assert all(fold.filter(line("detail", level=logging.DEBUG)) for _ in range(5))


def test_the_kinds_that_are_remembered_are_bounded() -> None:
    fold = Folding(Clock())
    for number in range(3 * folding.MAX_KINDS):
        fold.filter(line(f"text {number}"))
    assert len(fold._kinds) == folding.MAX_KINDS


def test_a_kind_that_must_make_room_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "MAX_KINDS", 2)
    clock = Clock()
    fold = Folding(clock)
    for _ in range(5):
        fold.filter(line("the first"))
    clock.now = 3.0
    fold.filter(line("second"))
    fold.filter(line("third"))
    assert [record.getMessage() for record in fold.ended()] == ["... 4 more like it in 3 s, the last: the first"]
    assert fold.ended() == []


def test_at_the_end_all_are_told() -> None:
    fold = Folding(Clock())
    for _ in range(3):
        fold.filter(line("away"))
    assert fold.ended() == []
    assert [record.getMessage() for record in fold.close()] == ["... 2 more like it in 1 s, the last: away"]
    assert fold.close() == []


def test_a_fault_hides_no_other_bug_of_the_same_statement() -> None:
    fold = Folding(Clock())

    def failed(error: Exception) -> bool:
        record = line("request %s failed", "r")
        record.exc_info = (type(error), error, None)
        return fold.filter(record)

    assert [failed(KeyError("a")) for _ in range(20)] == [True] + [False] * 19
    assert failed(ZeroDivisionError())
    last = KeyError("b")
    assert not failed(last)
    (summary,) = fold.close()
    assert summary.exc_info is not None
    assert summary.exc_info[1] is last, "the traceback is logged, too"


def test_a_text_that_is_no_string_is_a_line_as_well() -> None:
    fold = Folding(Clock())
    record = logging.LogRecord("warmfleet.x", logging.WARNING, "", 0, ["a"], None, None)
    assert [fold.filter(record), fold.filter(record)] == [True, False]
