"""The table of long tests in tests/README.md, made from the markers.

``python -m tests.support.run.long_tests`` writes it anew.

A long test carries ``@pytest.mark.long(minutes=5, shows="...")``. Its row names the test. The row names the whole file
if the mark is the file's ``pytestmark`` or a constant in it, or if no other test of the file is long.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
README = ROOT / "tests/README.md"
BEGIN, END = "<!-- begin: python -m tests.support.run.long_tests -->\n", "<!-- end -->\n"


@dataclass(frozen=True, slots=True)
class Row:
    """One long test, or the long tests of one file. selects: the arguments of pytest that choose it."""

    selects: str
    minutes: int
    shows: str

    @property
    def line(self) -> str:
        return f"| `{self.selects}` | {self.shows} | {self.minutes} |\n"


def rows() -> list[Row]:
    """Return the rows of all files, sorted. Raises ValueError for a mark without ``minutes`` or ``shows``."""
    return sorted((row for path in ROOT.glob("tests/**/*.py") for row in rows_of(path)), key=lambda row: row.selects)


def rows_of(path: Path) -> list[Row]:
    """Return the rows of one file."""
    found = list(marks_in(path))
    return [replace(row, selects=row.selects.partition("::")[0]) for row in found] if len(found) == 1 else found


def marks_in(path: Path) -> Iterator[Row]:
    """Yield a row for each mark in a file."""
    place = str(path.relative_to(ROOT))
    tree = ast.parse(path.read_text())
    tests = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    owners = {call: test.name for test in tests for call in test.decorator_list}
    calls = {node.func: node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.long"):
            continue
        call = calls.get(node)
        told = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords} if call else {}
        if call is None or not {"minutes", "shows"} <= set(told):
            raise ValueError(f"{place}:{node.lineno}: pytest.mark.long(minutes=..., shows=...)")
        selects = f"{place}::{owners[call]}" if call in owners else place
        yield Row(**{"selects": selects} | told)


def table() -> str:
    """Return the generated part of the README."""
    found = rows()
    head = "| test | what it shows | minutes |\n|---|---|---|\n"
    hours = round(sum(row.minutes for row in found) / 60)
    return f"{head}{''.join(row.line for row in found)}\nTogether about {hours} hours.\n"


def with_table(text: str) -> str:
    """Return ``text`` of the README with its generated part written anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
