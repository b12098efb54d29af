"""Log lines that repeat are folded, those that differ are told, and nothing is lost without being counted."""

from __future__ import annotations

import logging

from warmfleet.logs import folding
from warmfleet.logs.folding import SOME, WINDOW_S, Folding


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
    (told,) = fold.ended()
    assert told.getMessage() == "... 240 more like it in 60 s, the last: engine a is away"
    assert (told.levelno, told.name) == (logging.WARNING, "warmfleet.x")
    assert fold.ended() == []
    assert fold.filter(line("engine %s is away", "a")), "the next minute begins anew"


def test_of_warnings_that_differ_in_their_figures_some_are_told() -> None:
    fold = Folding(Clock())
    told = [fold.filter(line("engine %s is away", number)) for number in range(100)]
    assert told == [True] * SOME + [False] * (100 - SOME)
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
