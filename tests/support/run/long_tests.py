"""The long tests: ``python -m tests.support.run.long_tests`` prints what each shows.

``--write`` writes their table in tests/README.md anew.

A long test carries ``@pytest.mark.long(minutes=5, shows="...")``. The table has a row for each
folder, with its files and their minutes. The list names the whole file if the mark is the file's ``pytestmark`` or a
constant in it, or if no other test of the file is long.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
README = ROOT / "tests/README.md"
MARK = "pytest.mark.long"
BEGIN, END = "<!-- begin: python -m tests.support.run.long_tests --write -->\n", "<!-- end -->\n"


@dataclass(frozen=True, slots=True)
class Row:
    """A long test, or the long tests of a file. selects: the arguments of pytest that choose it."""

    selects: str
    minutes: int
    shows: str

    @property
    def folder(self) -> str:
        return self.selects.rpartition("/")[0]

    @property
    def file(self) -> str:
        """The name of its file, without ``test_`` and ``.py``."""
        return self.selects.rpartition("/")[2].partition(".py")[0].removeprefix("test_")


@cache
def rows() -> tuple[Row, ...]:
    """Return the rows of all files, sorted. Raises ValueError for a mark without ``minutes`` or ``shows``."""
    found = (row for path in ROOT.glob("tests/**/*.py") for row in rows_of(path))
    return tuple(sorted(found, key=lambda row: row.selects))


def rows_of(path: Path) -> list[Row]:
    """Return the rows of one file."""
    found = list(marks_in(path))
    return [replace(row, selects=row.selects.partition("::")[0]) for row in found] if len(found) == 1 else found


def marks_in(path: Path) -> Iterator[Row]:
    """Yield a row for each mark in a file."""
    place, text = str(path.relative_to(ROOT)), path.read_text()
    if MARK not in text:  # most files; to parse all of them takes seconds
        return
    tree = ast.parse(text)
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    owners = {call: test.name for test in tests for call in test.decorator_list}
    calls = {node.func: node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and ast.unparse(node) == MARK):
            continue
        call = calls.get(node)
        told = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords} if call else {}
        if call is None or not {"minutes", "shows"} <= set(told):
            raise ValueError(f"{place}:{node.lineno}: pytest.mark.long(minutes=..., shows=...)")
        selects = f"{place}::{owners[call]}" if call in owners else place
        yield Row(**{"selects": selects} | told)


def table() -> str:
    """Return the generated part of the README."""
    folders: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows():
        if row.folder:  # the others are chosen by a mark
            folders[row.folder][row.file] += row.minutes
    lines = [
        f"| `{folder}` | {', '.join(f'{file} {minutes}' for file, minutes in files.items())} |\n"
        for folder, files in folders.items()
    ]
    hours = round(sum(row.minutes for row in rows()) / 60)
    return f"| folder | files of long tests, minutes |\n|---|---|\n{''.join(lines)}\nTogether about {hours} hours.\n"


def with_table(text: str) -> str:
    """Return ``text`` of the README with its generated part written anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    if "--write" in sys.argv:
        README.write_text(with_table(README.read_text()))
    else:
        print("\n".join(f"{row.minutes:3} min  {row.selects}\n         {row.shows}" for row in rows()))
