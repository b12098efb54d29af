"""The line of progress: redrawn at a terminal, now and then elsewhere, and never in the way of what is printed."""

from __future__ import annotations

import io
import threading

import pytest
from tests.app.cli.terminal.test_output import Terminal

from warmfleet.cli.terminal.progress import Progress


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_terminal_shows_what_is_done_how_far_and_for_how_long(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = Terminal()
    progress = Progress(out, clock=clock)
    progress.step("waiting for workers", 1, 4)
    progress.tick()
    assert not out.getvalue(), "what is quick needs no line"
    clock.now += 14
    progress.step("waiting for workers", 2, 4, "; sim-1: loading")
    progress.tick()
    assert out.getvalue() == "\r\x1b[Kwaiting for workers ... [############............] 2 of 4, 14 s; sim-1: loading"
    progress.step("stopping")
    clock.now += 1
    progress.tick()
    assert out.getvalue().endswith("\r\x1b[Kstopping ... 1 s"), "the seconds count from the new step on"
    progress.step("")
    progress.tick()
    assert out.getvalue().endswith("1 s\r\x1b[K"), "nothing is left of it"


def test_a_narrow_terminal_gets_one_line(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    out = Terminal()
    progress = Progress(out, clock=clock)
    progress.step("x" * 100)
    clock.now += 1
    progress.tick()
    assert out.getvalue() == "\r\x1b[K" + "x" * 19


def test_elsewhere_a_line_comes_at_times(clock: Clock) -> None:
    out = io.StringIO()
    progress = Progress(out, clock=clock, plain_s=10)
    progress.step("waiting")
    for _ in range(25):
        clock.now += 1
        progress.tick()
    assert out.getvalue() == "waiting ... 10 s\nwaiting ... 20 s\n"


def test_what_is_printed_stands_above_the_line(clock: Clock) -> None:
    both = Terminal()
    progress = Progress(both, clock=clock)
    progress.step("waiting")
    clock.now += 1
    progress.tick()
    progress.say("one is ready", both)
    progress.tick()
    assert both.getvalue() == "\r\x1b[Kwaiting ... 1 s\r\x1b[Kone is ready\n\r\x1b[Kwaiting ... 1 s"


def test_it_draws_while_the_command_waits_and_ends_with_it() -> None:
    drawn = threading.Event()

    class Watched(io.StringIO):
        def write(self, text: str) -> int:
            drawn.set()
            return super().write(text)

    with Progress(Watched(), plain_s=0.0) as progress:
        progress.step("waiting")
        assert drawn.wait(20)
    assert "progress" not in [thread.name for thread in threading.enumerate()]
