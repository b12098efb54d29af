"""The tables of lua/README.md: packed records and codes, with the comments beside their declarations."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING

from warmfleet.fleet.codes import Mark
from warmfleet.fleet.layout import LAYOUT
from warmfleet.fleet.rows import Flag, Lease, LoadRow, Stage, numbers_of

if TYPE_CHECKING:
    from collections.abc import Iterable

README = Path(__file__).parents[2] / "lua" / "README.md"
_COMMENT = re.compile(r"^ +(\w+)(?:: \w+)?(?: = \S+)?  # (.+)$", re.MULTILINE)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return (
        "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("| --- ", "|---").replace("--- |\n", "---|\n")
    )


def _numbers(record: type, positions: str = "") -> str:
    said = dict(_COMMENT.findall(inspect.getsource(record)))
    rows = ((name, LAYOUT[f"{positions}{name.upper()}_AT"], said[name]) for name in numbers_of(record))
    return _table(("field", "byte", "meaning"), rows)


def _codes() -> str:
    """The codes that are stored in Redis. The codes of an answer are explained by the header of its script."""
    return _table(
        ("constant", "value", "meaning"),
        (
            (f"`{enum.__name__.upper()}_{name}`", str(enum[name].value), said)
            for enum in (Flag, Stage, Mark)
            for name, said in _COMMENT.findall(inspect.getsource(enum))
        ),
    )


def tables() -> dict[str, str]:
    """The tables by the names of their marks."""
    return {
        "load row": _numbers(LoadRow),
        "lease": _numbers(Lease, "LEASE_"),
        "codes": _codes(),
    }
