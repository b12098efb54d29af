"""The output of commands: aligned text for everybody, colour for a person at a terminal, and pictures in place."""

from __future__ import annotations

import io
import re
import sys
from typing import TYPE_CHECKING

import pytest

from warmfleet.cli.terminal.output import Table, Tone, Toned, plain, redraw, show, text_for

if TYPE_CHECKING:
    from warmfleet.cli.terminal.output import Part

TABLE = Table(
    ("NAME", "STATE", "FILLED", "AGE"), [("a", Toned("proven", Tone.GOOD), "7%", "1.5 s"), ("bb", "x", "10%", "never")]
)
ALIGNED = "NAME  STATE   FILLED    AGE\na     proven      7%  1.5 s\nbb    x          10%  never"


class Terminal(io.StringIO):
    """A text that says that a person reads it."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def colourful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")


def test_a_table_aligns_words_to_the_left_and_numbers_to_the_right() -> None:
    assert str(Table(("A", "N"), [("x", 1), ("yy", 22)])) == "A    N\nx    1\nyy  22"
    assert str(TABLE) == ALIGNED
    assert str(Table(("A", "N"), [("x", ""), ("yy", "")])) == "A   N\nx\nyy", "an empty column holds no numbers"


def test_a_pipe_gets_plain_lines() -> None:
    out = io.StringIO()
    show(out, [Toned("demo", Tone.HEAD), ("a ", Toned("b", Tone.BAD)), TABLE])
    assert out.getvalue() == f"demo\na b\n{ALIGNED}\n"


def test_a_terminal_gets_colour_and_the_same_words() -> None:
    parts: list[Part] = [Toned("demo", Tone.HEAD), ("a ", Toned("b", Tone.BAD)), "x" * 99, TABLE]
    coloured = text_for(Terminal(), parts)
    assert "\x1b[32mproven" in coloured
    words = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert "x" * 99 in words, "no line is cut or wrapped: the terminal does that"
    lines = [line.rstrip() for line in words.splitlines() if "─" not in line]
    assert lines == plain(parts).splitlines(), "as wide as plain text, under a rule"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_who_wants_no_colour_gets_none(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert text_for(Terminal(), [TABLE]) == ALIGNED


def test_without_rich_a_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert text_for(Terminal(), [TABLE]) == ALIGNED


@pytest.mark.parametrize("out", [io.StringIO(), Terminal()])
def test_nothing_that_a_worker_wrote_steers_the_terminal(out: io.StringIO) -> None:
    worker = "eng\x1b[2J\x07"
    text = text_for(out, [worker, (worker, Toned(worker, Tone.BAD)), Table((worker,), [(worker,)])])
    assert text.count("eng\\x1b[2J\\x07") == 5
    assert "\x1b[2J" not in text
    assert "\x07" not in text


def drawn(out: io.StringIO, pictures: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The output of ``redraw`` for these pictures, after which somebody presses Ctrl-C."""
    waits = iter(pictures[1:])

    def wait(seconds: float) -> None:
        assert seconds == 2
        if next(waits, None) is None:
            raise KeyboardInterrupt

    monkeypatch.setattr("warmfleet.cli.terminal.output.time.sleep", wait)
    left = iter(pictures)
    redraw(out, lambda: [next(left)], 2)
    return out.getvalue()


def test_pictures_take_each_others_place_and_the_last_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LINES", "4")
    text = drawn(Terminal(), ["one", "two", "1\n2\n3\n4\n5"], monkeypatch)
    assert text.startswith("\x1b[?1049h\x1b[?25l\x1b[Hone\x1b[K\n\x1b[J\x1b[Htwo")
    assert "\x1b[H1\x1b[K\n2\x1b[K\n... and 3 more lines" in text
    assert text.endswith("\x1b[?25h\x1b[?1049l1\n2\n3\n4\n5\n"), "the cursor, the screen of before, the last picture"


def test_elsewhere_pictures_follow_each_other_with_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    text = drawn(io.StringIO(), ["one", "two"], monkeypatch)
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(rf"{time}\none\n\n{time}\ntwo\n\n", text)


def test_a_failing_picture_leaves_the_terminal_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    out = Terminal()
    with pytest.raises(ZeroDivisionError):
        redraw(out, lambda: [str(1 // 0)], 1)
    assert out.getvalue().endswith("\x1b[?25h\x1b[?1049l\n")
