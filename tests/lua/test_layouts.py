"""Positions, formats, flags and codes that scripts use are named constants there, and equal those of Python.

A load row and a lease are written by Python in the tests, and read and written by many scripts. Each script has the
positions, formats, flags and codes it needs as constants with names of one form, so that all of them can be compared
here with ``rows``, ``codes`` and ``constants`` of ``warmfleet.fleet``:

- ``<FIELD>_AT`` a byte position in a packed row, ``LEASE_<FIELD>_AT`` in a packed lease; the first byte is 1
- ``<FIELD>_FIELD`` a place in an unpacked row; the first is 1
- ``ROW``, ``ROW_<FIELD>``, ``ROW_<FIELD>_TO_<FIELD>`` a format for a whole row, one field, or several
- ``FLAG_``, ``STAGE_``, ``MODE_``, ``NEXT_``, ``STANDING_``, ``MARK_`` and the name of a member of the Python enum
"""

from __future__ import annotations

import re
import struct
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from warmfleet.fleet import ClientLimits, constants, new_reservation
from warmfleet.fleet.client import script_source
from warmfleet.fleet.codes import Mark, Mode, Next, Standing
from warmfleet.fleet.rows import JUDGED, Flag, Lease, LoadRow, Stage
from warmfleet_worker.protocol.wire import CLIENT_TAG_LENGTH, reservation_of

if TYPE_CHECKING:
    from enum import Enum

    import redis.asyncio as aioredis

LUA = Path(__file__).parents[2] / "lua"
FILES = {path.relative_to(LUA).as_posix(): path.read_text() for path in sorted(LUA.rglob("*.lua"))}

ROW_FIELDS = [field.name.upper() for field in fields(LoadRow)]
TWO_BYTES = {"flags", "busy_share", "evicted"}
LEASE_FIELDS = [field.name.upper() for field in fields(Lease)]
#: Positions that are none of a row or a lease: of a ticket, a chunk, a reservation's id.
OTHER_POSITIONS = {"MEMBER_ID_AT", "CHUNK_HASHES_AT", "MARK_AT", "CLIENT_AT"}
#: Where the parts of a ticket begin: behind its prices, its flow, its arrival, its place.
TICKET_AT = {"FLOW": 18, "ARRIVAL": 27, "PLACE": 43, "OWN": 59}
ENUMS: dict[str, type[Enum]] = {
    "FLAG": Flag,
    "STAGE": Stage,
    "MODE": Mode,
    "NEXT": Next,
    "STANDING": Standing,
    "MARK": Mark,
}


def probe(one: str) -> tuple[int, int, bool]:
    """Where a field is in a packed row: its first byte (from 1), its size, and whether it is signed."""
    zero, name = LoadRow(), one.lower()
    changed = LoadRow(**{name: 0x0101 if name in TWO_BYTES else 0x01010101})
    touched = [at for at, (a, b) in enumerate(zip(zero.pack(""), changed.pack(""), strict=True), 1) if a != b]
    try:
        LoadRow(**{name: -1}).pack("")
    except struct.error:
        return touched[0], len(touched), False
    return touched[0], len(touched), True


ROW = {name: probe(name) for name in ROW_FIELDS}
ROW_BYTES = len(LoadRow().pack(""))


def lease_positions() -> dict[str, int]:
    """The first byte (from 1) of each number of a packed lease, and of the worker id behind them."""
    numbers = [name for name in LEASE_FIELDS if name not in ("WORKER_ID", "CHECKPOINTS", "JUDGED")]
    zero = dict.fromkeys((name.lower() for name in numbers), 0)
    plain = Lease(**cast("dict[str, Any]", zero), worker_id="").pack()
    found = {"WORKER_ID": len(plain) + 1}
    for name in numbers:
        packed = Lease(**cast("dict[str, Any]", zero | {name.lower(): 1}), worker_id="").pack()
        size = 1 if name == "STAGE" else 4
        last = next(at for at, (a, b) in enumerate(zip(plain, packed, strict=True), 1) if a != b)
        found[name] = last - size + 1
    return found


LEASE_AT = lease_positions()


def code(text: str) -> str:
    """A script without its comments."""
    return re.sub(r"--\[\[.*?--\]\]|--[^\n]*", "", text, flags=re.DOTALL)


def split_values(text: str) -> list[str]:
    """The values of an assignment: commas within brackets and texts do not count."""
    values, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == '"'
        depth += 0 if quoted else (letter in "({[") - (letter in ")}]")
        if letter == "," and not depth and not quoted:
            values.append("")
        else:
            values[-1] += letter
    return [value.strip() for value in values]


def constants_of(text: str) -> dict[str, str]:
    """The constants of a file (names in capitals, plain numbers or texts) with their values as written."""
    found: dict[str, str] = {}
    for names, values in re.findall(r"^ *local ([A-Z][A-Z_0-9]*(?:, \w+)*) = (.+)$", code(text), re.MULTILINE):
        found |= dict(zip(names.split(", "), split_values(values), strict=True))
    return {name: value for name, value in found.items() if re.fullmatch(r'-?\d+|"[^"]*"', value)}


CONSTANTS = {name: constants_of(text) for name, text in FILES.items()}
ALL = [(file, name, value) for file, found in CONSTANTS.items() for name, value in found.items()]


def format_of(first: str, last: str) -> list[tuple[int, bool]]:
    """(size, signed) of the fields of a row from ``first`` to ``last``."""
    names = ROW_FIELDS[ROW_FIELDS.index(first) : ROW_FIELDS.index(last) + 1]
    return [ROW[name][1:] for name in names]


def parsed(text: str, wanted: list[tuple[int, bool]]) -> bool:
    """Whether a struct format reads the wanted fields; ``x`` in it leaves out a byte of a field."""
    items = re.findall(r"([iI])(\d)|(x)", text.removeprefix(">"))
    at = 0
    for kind, size, skipped in items:
        if at >= len(wanted):
            return False
        if skipped:
            size_left = wanted[at][0] - 1
            wanted = [*wanted[:at], (size_left, wanted[at][1]), *wanted[at + 1 :]]
            at += size_left == 0
        elif (int(size), kind == "i") != wanted[at]:
            return False
        else:
            at += 1
    return text.startswith(">") and at == len(wanted)


def test_every_named_number_is_compared() -> None:
    """A name of one of the forms is a constant whose value this test can read."""
    form = re.compile(r"\b(?:(?:FLAG|STAGE|MODE|NEXT|STANDING|MARK)_[A-Z_]+|[A-Z_]+_(?:AT|FIELD)|ROW(?:_[A-Z_]+)?)\b")
    for file, text in FILES.items():
        assert set(form.findall(code(text))) - {"ROW_FIELDS", "NEXT_SLOT"} <= CONSTANTS[file].keys(), file


def test_flags_stages_and_codes_are_those_of_python() -> None:
    seen = set()
    for file, name, value in ALL:
        kind, _, member = name.partition("_")
        if kind in ENUMS and name not in OTHER_POSITIONS:
            expected = ENUMS[kind][member].value
            assert value.strip('"') == str(expected), f"{file}: {name}"
            seen.add(kind)
    assert seen == ENUMS.keys()


def test_positions_are_those_of_the_packed_records() -> None:
    count = 0
    for file, name, value in ALL:
        if name.endswith("_AT") and name not in OTHER_POSITIONS:
            stem = name.removesuffix("_AT")
            if stem.startswith("LEASE_"):
                expected = LEASE_AT[stem.removeprefix("LEASE_")]
            elif stem.startswith("TICKET_"):
                expected = TICKET_AT[stem.removeprefix("TICKET_")]
            else:
                expected = ROW_BYTES + 1 if stem == "WORKER_ID" else ROW[stem][0]
            assert int(value) == expected, f"{file}: {name}"
            count += 1
        elif name.endswith("_FIELD"):
            assert int(value) == ROW_FIELDS.index(name.removesuffix("_FIELD")) + 1, f"{file}: {name}"
            count += 1
    assert count > 40


def test_tickets_are_read_as_they_are_written() -> None:
    prices = {value.strip('"') for _, name, value in ALL if name == "TICKET_PRICES"}
    assert prices == {">I4I4I4I4B"}
    assert TICKET_AT["FLOW"] == 1 + struct.calcsize(">IIIIB")
    assert {value.strip('"') for _, name, value in ALL if name == "TICKET_OWN"} == {">I4I4"}
    sizes = {name: int(value) for _, name, value in ALL if name in ("FLOW_BYTES", "PLACE_BYTES", "OWN_BYTES")}
    assert sizes == {"FLOW_BYTES": 9, "PLACE_BYTES": 16, "OWN_BYTES": struct.calcsize(">II")}
    ends = [TICKET_AT["ARRIVAL"], TICKET_AT["PLACE"], TICKET_AT["OWN"]]
    assert ends == [TICKET_AT["FLOW"] + 9, TICKET_AT["FLOW"] + 9 + 16, TICKET_AT["FLOW"] + 9 + 2 * 16]


def test_the_mark_of_a_judged_lease_is_that_of_python() -> None:
    assert {file: int(value) for file, name, value in ALL if name == "JUDGED"} == dict.fromkeys(
        ("decide.lua", "parts/apply/progress.lua", "settle.lua"), JUDGED
    )
    lease = Lease(1, 2, 3, 4, 2**31 - 1, 6, 1, "w.0", (b"12345678",), judged=True)
    assert Lease.unpack(lease.pack()) == lease
    assert not Lease.unpack(replace(lease, judged=False).pack()).judged


def test_the_clients_tag_is_at_the_end_of_an_id() -> None:
    found = [int(value) for _, name, value in ALL if name == "CLIENT_AT"]
    assert len(found) == 6
    assert set(found) == {len(new_reservation(1)) + 1}
    limits = ClientLimits("team-a")
    assert new_reservation(1, client=limits.tag)[found[0] - 1 :] == limits.tag
    assert len(limits.tag) == CLIENT_TAG_LENGTH
    name = new_reservation(1, client=limits.tag)
    assert reservation_of(f"cmpl-{name}.client-0") == (name, 0), "its load is no foreign load"


def test_formats_are_those_of_the_packed_records() -> None:
    count = 0
    for file, name, value in ALL:
        if name == "ROW_FIELDS":
            assert int(value) == len(ROW_FIELDS), file
        elif name == "ROW_BYTES":
            assert int(value) == ROW_BYTES, file
        elif name in ("LEASE", "LEASE_HEAD"):
            assert value == '">I4I4I4I4I4I4BB"', f"{file}: {name}"
        elif name == "LEASE_BYTES":
            assert int(value) == LEASE_AT["WORKER_ID"] - 1, file
        elif name == "ROW" or name.startswith("ROW_"):
            first, _, last = name.removeprefix("ROW").removeprefix("_").partition("_TO_")
            first = first or ROW_FIELDS[0]
            last = ROW_FIELDS[-1] if name == "ROW" else last or first
            assert parsed(value.strip('"'), format_of(first, last)), f"{file}: {name} = {value}"
            count += 1
    assert count > 20


@pytest.mark.parametrize("name", FILES)
def test_a_row_is_read_where_its_format_begins(name: str) -> None:
    """``unpack(ROW_A_TO_B, row, A_AT)``: the position is that of the format's first field."""
    for use in re.findall(r"unpack(?:_from)?\(((?:ROW|LEASE)\w*), ([^()]+(?:\([^()]*\))?[^()]*)\)", code(FILES[name])):
        layout, rest = use
        position = re.search(r", (\w+)$", rest)
        first = layout.removeprefix("ROW").removeprefix("_").partition("_TO_")[0]
        if layout.startswith("LEASE") or first in ("", "EPOCH"):
            assert position is None, f"{use}: it begins with the record"
        else:
            assert position is not None, f"{use}: nothing says where it begins"
            assert position[1] == f"{first}_AT", use


@pytest.mark.parametrize("name", FILES)
def test_no_number_is_a_riddle(name: str) -> None:
    """Formats, positions in records and masks are read by their names, never by a number on the spot."""
    text = code(FILES[name])
    assert not re.findall(r'(?:pack|unpack|unpack_from)\("', text), "a format without a name"
    assert not re.findall(r"unpack(?:_from)?\([^()]*(?:\([^()]*\))?[^()]*, \d+\)", text), "a position without a name"
    assert not re.findall(r"\b(?:band|bor|bxor|bnot)\((?:[^()]|\([^()]*\))*\b[1-9]\d*\b", text), "a mask without a name"
    assert not re.findall(r"\b(?:row|lease|known|rows\[\w\]|all\[k\]):(?:sub|byte)\((?!1,)\d", text), (
        "a position without a name"
    )
    assert not re.findall(r"\bsub\((?:row|lease|known|\w*\.?rows\[\w+\]|all\[k\]), (?!1,)\d", text), (
        "a position without a name"
    )
    assert not re.findall(r"\brow\[\d+\]", text), "a field without a name"
    assert not re.findall(r"\b(?:stage|mode|following|standing) [=~<>]=? \d", text), "a code without a name"


# ---------------------------------------------------------------- the constants of a replica


async def test_the_constants_of_a_replica_arrive_under_their_names(store: aioredis.Redis) -> None:
    """Each with a value of its own: two that change places, in Python or in Lua, arrive under each other's name."""
    weights = constants.Weights(2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 77, 88)
    spans = constants.Spans(lease_ms=101, worker_ttl_ms=102, tombstone_ms=103, ticket_ms=104, linger_ms=105)
    record = constants.packed(weights, spans, constants.QueueLimits(9.5, 106, 10.5), {7: 16, 8: 32})
    names = [*constants.FIELDS, "block_sizes"]
    part = script_source("queue")
    part = part[part.index("(function()\n--[[\nshared/constants") :]
    part = part[: part.index("\nend)()") + len("\nend)()")]
    tell = f"local found = ({part})(ARGV[1])\nlocal told = {{}}\n"
    tell += "for i = 2, #ARGV do told[#told + 1] = tostring(found[ARGV[i]]) end\nreturn told"
    told = await cast("Any", store.eval(tell, 0, record, *names))
    assert dict(zip(names, (value.decode() for value in told), strict=True)) == {
        "lease_ms": "101",
        "ttl_ms": "102",
        "ticket_ms": "104",
        "max_probes": "77",
        "lambda": "2.5",
        "kappa": "3.5",
        "pressure_price": "4.5",
        "decode_s_per_token": "5.5",
        "wait_price": "6.5",
        "stay": "7.5",
        "place": "8.5",
        "min_match_tokens": "88",
        "queue_max": "106",
        "max_engine_wait_s": "9.5",
        "patience": "10.5",
        "block_sizes": "7=16,8=32",
    }


def test_the_scripts_unpack_the_constants_in_the_order_of_python() -> None:
    text = code(FILES["parts/shared/constants.lua"])
    names = re.search(r"local _, ([\w,\s]+), block_sizes_at = struct.unpack", text)
    assert names is not None
    assert tuple(re.findall(r"\w+", names[1])) == constants.FIELDS
    assert f"VERSION, CONSTANTS, CONSTANTS_BYTES = {constants.VERSION}, " in text
    assert str(len(constants.packed(constants.Weights(), constants.Spans(), constants.QueueLimits(), {}))) in text
