"""Output of commands for people: tables and coloured words at a terminal, plain aligned lines everywhere else.

Colour needs the package rich (extra ``cli``). Without rich, in a pipe, with NO_COLOR, and on a terminal without colour
(TERM is ``dumb``), the same text is plain, so that no program that reads the output depends on rich.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console, RenderableType

MOST_NAMED = 8  # most names in a sentence or a cell
#: A cell that is a number, perhaps with a unit, or means "no number". A column of such cells is aligned to the right.
_NUMBER = re.compile(r"(([+-]?\d[\d,.]*)( ?[%a-zA-Z]{1,3})?|-|never|)\Z")
_PICTURE, _NO_PICTURE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # other screen, cursor hidden; undo both
_HOME, _LINE_END, _REST = "\x1b[H", "\x1b[K\n", "\x1b[J"  # to the first line; clear rest of line; of screen


class Tone(StrEnum):
    """The meaning of a coloured text; the value is rich's style. Without colour the text alone must say the same."""

    GOOD = "green"
    MIND = "yellow"
    BAD = "bold red"
    HEAD = "bold"
    FAINT = "dim"


@dataclass(frozen=True, slots=True)
class Toned:
    """A text with its tone."""

    text: str
    tone: Tone

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under column heads. As text its columns are aligned, those of numbers to the right."""

    header: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __str__(self) -> str:
        lines = [self.header, *[[str(cell) for cell in row] for row in self.rows]]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        return "\n".join("  ".join(map(_aligned, line, widths, self.right)).rstrip() for line in lines)

    @property
    def right(self) -> list[bool]:
        """Whether the cells are numbers, for each column."""
        columns = [[str(row[column]) for row in self.rows] for column in range(len(self.header))]
        return [all(map(_NUMBER.match, cells)) and any(map(str.strip, cells)) for cells in columns]


#: A part of what a command prints: a table, a text, or a line made of texts.
Part = str | Toned | Table | tuple[str | Toned, ...]


def plain(parts: Sequence[Part]) -> str:
    """Return the parts as text without colour, each on lines of its own."""
    return printable("\n".join("".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in parts))


def printable(text: str) -> str:
    """Escape control characters in ``text``, because workers send much of it, and must not steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def in_short(names: Sequence[str]) -> str:
    """List the first MOST_NAMED names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def text_for(out: TextIO, parts: Sequence[Part]) -> str:
    """Return the parts as text for ``out``, with colour if ``out`` is a terminal that shows colour."""
    text = plain(parts)
    if not out.isatty() or "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb":
        return text
    console = _console(max(map(len, text.splitlines()), default=0))
    if console is None:
        return text
    for part in parts:
        console.print(_renderable(part), soft_wrap=not isinstance(part, Table))
    assert isinstance(console.file, io.StringIO)  # noqa: S101  as ``_console`` makes it
    return console.file.getvalue().rstrip("\n")


def show(out: TextIO, parts: Sequence[Part]) -> None:
    """Print the parts at once."""
    print(text_for(out, parts), file=out, flush=True)


def print_answer(value: object, parts: Callable[[], Sequence[Part]], *, as_json: bool) -> None:
    """Print the answer of a command on standard output: the value as JSON, or the parts for people."""
    if as_json:
        print(json.dumps(value, indent=2))
    else:
        show(sys.stdout, parts())


def redraw(
    out: TextIO, picture: Callable[[], Sequence[Part]], every_s: float, done: Callable[[], bool] = lambda: False
) -> None:
    """Print ``picture()`` every ``every_s`` seconds until Ctrl-C, or until ``done()``.

    Then restore the terminal and print the last picture.

    At a terminal each picture takes the place of the one before, cut to the height of the screen. Elsewhere pictures
    follow each other, each under a line with the time.
    """
    in_place, last = out.isatty(), ""
    try:
        if in_place:
            print(end=_PICTURE, file=out)
        ended = False
        while not ended:
            ended = done()  # before the picture, which then is the last one
            last = text_for(out, picture())
            if in_place:
                lines = _cut(last.splitlines(), shutil.get_terminal_size().lines - 1)
                print(end=_HOME + _LINE_END.join([*lines, ""]) + _REST, file=out, flush=True)
            else:
                print(time.strftime("%Y-%m-%d %H:%M:%S"), last, "", sep="\n", file=out, flush=True)
            time.sleep(0.0 if ended else every_s)
    except KeyboardInterrupt:
        return
    finally:
        if in_place:
            print(_NO_PICTURE + last, file=out, flush=True)


def _aligned(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def _cut(lines: list[str], height: int) -> list[str]:
    if len(lines) <= height:
        return lines
    return [*lines[: height - 1], f"... and {len(lines) - height + 1} more lines: the screen is too low for them"]


def _console(width: int) -> Console | None:
    """Make a console of rich that writes into a text, as wide as the widest line; the terminal wraps long lines."""
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return None
    columns = max(width + 4, shutil.get_terminal_size().columns)
    return Console(file=io.StringIO(), force_terminal=True, width=columns, highlight=False, markup=False, emoji=False)


def _renderable(part: Part) -> RenderableType:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    if not isinstance(part, Table):
        pieces = part if isinstance(part, tuple) else (part,)
        return Text.assemble(*[_text(piece) for piece in pieces])
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="bold")
    for head, right in zip(part.header, part.right, strict=True):
        table.add_column(printable(head), justify="right" if right else "left", no_wrap=True)
    for row in part.rows:
        table.add_row(*[Text.assemble(_text(cell)) for cell in row])
    return table


def _text(piece: object) -> str | tuple[str, str]:
    text = printable(str(piece))
    return (text, piece.tone.value) if isinstance(piece, Toned) else text
