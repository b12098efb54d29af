"""The names in capitals that every script may use, with their values: layouts of packed records, flags and codes.

Names that routers and scripts share are declared once: rows and leases in ``rows``, codes in ``codes``, the packed
constants of a replica in ``constants``. Names that only scripts use are in ``lua/parts/layout.lua``. ``script_loader``
puts the values in place of the names, which are formed like this:

- ``<FIELD>_AT`` the position of a field in a packed row, ``LEASE_<FIELD>_AT`` in a packed lease; the first byte is 1
- ``AFTER_<FIELD>`` the position behind a field of a row, so that no script names the field that follows
- ``<FIELD>_FIELD`` the index of a field among the numbers of an unpacked row; the first is 1
- ``ROW_<FIELD>`` the format of one field, ``ROW_<FIELD>_TO_<FIELD>`` of a range of fields, ``ROW`` of all
- ``ROW_BYTES``, ``LEASE_BYTES`` the bytes of a record's numbers, ``ROW_FIELDS`` the number of a row's fields
- ``POLICIES`` the set of the policies in ``settings``
- ``SESSION``, ``SESSION_BYTES`` the format and the bytes of the numbers of a session's record
- the name of an enum in ENUMS, like ``FLAG_``, and the name of a member: its number or letter
"""

from __future__ import annotations

import re
from importlib.resources import files
from struct import calcsize
from typing import TYPE_CHECKING

from warmfleet.fleet.codes import Hint, Mark, Mode, Next, Standing
from warmfleet.fleet.constants import RECORD, VERSION
from warmfleet.fleet.rows import (
    JUDGED,
    Flag,
    Kind,
    Lease,
    LoadRow,
    Place,
    SessionRecord,
    Stage,
    Trait,
    numbers_of,
)
from warmfleet.settings import POLICIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from enum import Enum

ENUMS: tuple[type[Enum], ...] = (Flag, Stage, Mode, Next, Standing, Mark, Hint, Place, Kind, Trait)
#: The letter of a number in the formats of Python's ``struct``, and in those of the scripts' ``struct``.
_LETTERS = {"I": "I4", "i": "i4", "H": "I2", "B": "B", "d": "d"}
_DECLARED = re.compile(r"^local ([A-Z][A-Z0-9_]*) = (.+?)(?: *--.*)?$", re.MULTILINE)
_NAME_OR_TEXT = re.compile(r"""[A-Z][A-Z0-9_]*|"[^"]*"|'[^']*'""")


def _format(letters: str) -> str:
    """Return the struct format of consecutive numbers, as a Lua literal."""
    return '(">' + "".join(_LETTERS[letter] for letter in letters) + '")'


def _record(record: str, numbers: Mapping[str, str], positions: str = "") -> Iterator[tuple[str, str]]:
    """Yield the Lua constants of a packed record: formats ``<record>_<field>``, positions ``<positions><field>_AT``."""
    names, letters = [name.upper() for name in numbers], "".join(numbers.values())
    for first, name in enumerate(names):
        yield f"{positions}{name}_AT", str(1 + calcsize(">" + letters[:first]))
        for last in range(first, len(names)):
            span = name if first == last else f"{name}_TO_{names[last]}"
            yield f"{record}_{span}", _format(letters[first : last + 1])
    yield record, _format(letters)
    yield f"{positions}WORKER_ID_AT", str(1 + calcsize(">" + letters))
    yield f"{record}_BYTES", str(calcsize(">" + letters))


def _of_routers() -> Iterator[tuple[str, str]]:
    """Yield name and value of each Lua constant that is made from a declaration in Python."""
    yield from _record("ROW", numbers_of(LoadRow))
    letters = ">"
    for place, (name, letter) in enumerate(numbers_of(LoadRow).items(), 1):
        letters += letter
        yield f"{name.upper()}_FIELD", str(place)
        yield f"AFTER_{name.upper()}", str(1 + calcsize(letters))
    yield "ROW_FIELDS", str(len(numbers_of(LoadRow)))
    yield from _record("LEASE", numbers_of(Lease) | {"length": "B"}, "LEASE_")
    yield "JUDGED", str(JUDGED)
    letters = "".join(numbers_of(SessionRecord).values())
    yield "SESSION", _format(letters)
    yield "SESSION_BYTES", str(calcsize(">" + letters))
    for enum in ENUMS:
        for name, member in enum.__members__.items():
            value = member.value
            yield f"{enum.__name__.upper()}_{name}", f'("{value}")' if isinstance(value, str) else str(value)
    letters = re.sub(r"(\d+)(\w)", lambda several: int(several[1]) * several[2], RECORD.format[1:])
    yield "CONSTANTS", _format(letters)
    yield "CONSTANTS_BYTES", str(RECORD.size)
    yield "CONSTANTS_VERSION", str(VERSION)
    yield "POLICIES", "({ " + ", ".join(f"{name} = 1" for name in POLICIES) + " })"


def declared(text: str, known: Mapping[str, str]) -> dict[str, str]:
    """Return ``known`` and the constants that a Lua text declares, one a line. A value may use earlier constants."""
    values = dict(known)
    for name, value in _DECLARED.findall(text):
        value = _NAME_OR_TEXT.sub(lambda found: values.get(found[0], found[0]), value)
        values[name] = value if value.isdecimal() else f"({value})"
    return values


LAYOUT: Mapping[str, str] = declared(
    (files("warmfleet") / "lua/parts/layout.lua").read_text(encoding="utf-8"), dict(_of_routers())
)
