"""Constants of the scripts: each is declared once, and Python and Lua read the same bytes by their names."""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from warmfleet.fleet import ClientLimits, Lease, LoadRow, constants, new_reservation
from warmfleet.fleet.layout import LAYOUT
from warmfleet.fleet.rows import numbers_of
from warmfleet.fleet.script_loader import CONSTANTS, script_source, with_values
from warmfleet_worker.protocol.wire import CLIENT_TAG_LENGTH, reservation_of

if TYPE_CHECKING:
    import redis.asyncio as aioredis

LUA = Path(__file__).parents[2] / "lua"
FILES = {path.relative_to(LUA).as_posix(): path.read_text() for path in sorted(LUA.rglob("*.lua"))}
SHARED = FILES.pop("parts/layout.lua")


def code(text: str) -> str:
    """A script without its comments."""
    return re.sub(r"--\[\[.*?--\]\]|--[^\n]*", "", text, flags=re.DOTALL)


def number(name: str) -> int:
    """The value of a constant of the layout that is a number or a sum."""
    return sum(int(part) for part in re.findall(r"\d+", LAYOUT[name]))


def test_a_constant_is_declared_once() -> None:
    """A constant is declared in its file, or in the layout if more than one file uses it."""
    declared = Counter(
        name for text in FILES.values() for line in CONSTANTS.finditer(text) for name in line[1].split(", ")
    )
    assert [name for name, count in declared.items() if count > 1] == []
    for file, text in FILES.items():
        bound = re.findall(r"\blocal (?!function)[\w, ]+|\bfunction[ \w.]*\([\w, .]*\)", code(text))
        assert not LAYOUT.keys() & set(re.findall(r"\w+", " ".join(bound))), f"{file} has its own"


def test_every_shared_constant_is_used() -> None:
    used = set(re.findall(r"[A-Z]\w*", " ".join([*map(code, FILES.values()), *re.findall(r"= (.+)", code(SHARED))])))
    assert set(re.findall(r"^local (\w+)", SHARED, re.MULTILINE)) <= used


async def test_a_row_and_a_lease_are_read_by_name(store: aioredis.Redis) -> None:
    """Python and Lua read the same values, both from the whole record and from each number's position."""
    row = LoadRow(1, -2, -3, -4, *range(5, len(numbers_of(LoadRow)) + 1))
    lease = Lease(1, 2, 3, 4, 5, 6, 1, "ab", (b"12345678",))
    for record, packed, numbers, kind, prefix in (
        (row, row.pack("s.0"), numbers_of(LoadRow), "ROW", ""),
        (lease, lease.pack(), numbers_of(Lease), "LEASE", "LEASE_"),
    ):
        told = [f"{{ struct.unpack({kind}, ARGV[1]) }}", f"ARGV[1]:sub({prefix}WORKER_ID_AT)", f"{kind}_BYTES"]
        told += [f"struct.unpack({kind}_{name}, ARGV[1], {prefix}{name}_AT)" for name in map(str.upper, numbers)]
        answer = await cast(
            "Any", store.eval(with_values(f"return {{ {', '.join(f'({it})' for it in told)} }}"), 0, packed)
        )
        wanted = list(astuple(record))[: len(numbers)]
        assert answer[0][: len(wanted)] == wanted
        assert answer[1:] == [packed[answer[2] :], number(f"{kind}_BYTES"), *wanted]


def test_a_span_of_a_row_has_the_fields_from_its_first_to_its_last() -> None:
    assert LAYOUT["ROW_SLOT_TO_SPEED_TPS"] == '(">I4I2I4I4")'
    assert (LAYOUT["FLAGS_AT"], LAYOUT["FLAGS_FIELD"], LAYOUT["FLAG_HOSTILE"]) == ("21", "6", "128")


def test_the_parts_of_a_ticket_follow_each_other() -> None:
    assert number("TICKET_FLOW_AT") == 1 + struct.calcsize(">IIIIB")
    ends = [number(name) for name in ("TICKET_ARRIVAL_AT", "TICKET_PLACE_AT", "TICKET_OWN_AT", "MEMBER_ID_AT")]
    assert ends == [18 + 9, 18 + 9 + 16, 18 + 9 + 16 + 16, 9 + 16 + 1]


def test_the_clients_tag_is_at_the_end_of_an_id() -> None:
    at = number("CLIENT_AT")
    assert len(new_reservation(1)) + 1 == at
    limits = ClientLimits("team-a")
    assert new_reservation(1, client=limits.tag)[at - 1 :] == limits.tag
    assert len(limits.tag) == CLIENT_TAG_LENGTH
    name = new_reservation(1, client=limits.tag)
    assert reservation_of(f"cmpl-{name}.client-0") == (name, 0), "its load is no foreign load"


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


async def test_the_constants_of_a_replica_arrive_under_their_names(store: aioredis.Redis) -> None:
    """Each constant has its own value here, so two that change places, in Python or in Lua, are noticed."""
    weights = constants.Weights(2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5, 1.25, 2.25, 77, 88)
    spans = constants.Spans(lease_ms=101, worker_ttl_ms=102, tombstone_ms=103, ticket_ms=104, linger_ms=105)
    queue, sessions = constants.QueueLimits(9.5, 106, 10.5), constants.SessionLimits(107, 108)
    record = constants.Constants(weights, spans, queue, {7: 16, 8: 32}, {5: 0.5}, sessions).packed
    names = [*constants.FIELDS, "block_sizes"]
    part = script_source("queue")
    part = part[part.index("(function()\n--[[\nshared/constants") :]
    part = part[: part.index("\nend)()") + len("\nend)()")]
    tell = f"local found = ({part})(ARGV[1])\nlocal told = {{}}\n"
    tell += "for i = 2, #ARGV do told[#told + 1] = tostring(found[ARGV[i]]) end\nreturn told"
    told = await cast("Any", store.eval(with_values(tell), 0, record, *names))
    priced = f"local found = ({part})(ARGV[1])\nreturn tostring(found.label_prices[5])"
    assert await cast("Any", store.eval(with_values(priced), 0, record)) == b"0.5"
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
        "decode_price": "1.25",
        "context_price": "2.25",
        "min_match_tokens": "88",
        "paused_max_ms": "107",
        "held_max_ms": "108",
        "queue_max": "106",
        "max_engine_wait_s": "9.5",
        "patience": "10.5",
        "block_sizes": "7=16,8=32",
    }
