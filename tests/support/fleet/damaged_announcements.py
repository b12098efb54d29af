"""Makes joins and files of workers with arbitrary values in one of their fields. Equal seeds make equal values."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ODD = (
    *("9" * 5_000, "-" + "9" * 400, "9" * 25, "9" * 24, "9" * 20, "18446744073709551616", "-9223372036854775809"),
    *("1e999", "-1e999", "1e5", "0.1", "-1", "-0", "0", "1" * 300 + ".5", "0." + "1" * 18, "NaN", "-Infinity", "0x10"),
    *("2147483648", '""', '"x"', f'"{"x" * 70_000}"', '"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\\ufffe"', '"é"'),
    *(
        '"\n"',
        '"\\"',
        '"http://["',
        '"http://x:99999999/"',
        '"__class__"',
        '"self"',
        "null",
        "true",
        "false",
        "[]",
        "{}",
    ),
    *(
        "[[]]",
        "[{}]",
        "[1]",
        '[""]',
        "[null]",
        '["x",1]',
        '["x","x"]',
        '{"":1}',
        '{"x":null}',
        '{"x":"y"}',
        '{"x":["y"]}',
    ),
    *('{"x":{"x":{"x":[]}}}', '{"x":1,"x":[1]}', '{"messages":"x","self":"y"}', "[" * 90 + "]" * 90),
    *("[" * 480 + "]" * 480, '{"a":' * 400 + "1" + "}" * 400, "[" * 900 + "]" * 900, "[1,]", "", "/**/1"),
    "[" + "1," * 9_000 + "1]",
)
TEMPLATES = (
    *("{% bogus %}", "{{ messages[0].content.x.y() }}", "{{ 1 / 0 }}", "{% include 'x' %}", "{% extends 'x' %}", "{{"),
    *("{{" + "(" * 3_000 + "x" + ")" * 3_000 + "}}", "{% if x %}" * 900, "{{ self.x() }}", "{% raw %}", "\0"),
    "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
)
MARK = '"@here@"'


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places in ``value`` at which a value can be replaced: its fields and items, at any depth."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*at, key)
        yield from paths(inner, (*at, key))


class Damage:
    """Bends announcements; all of one seed are the same in every run."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def bent(self, told: Any) -> str:
        """JSON text of ``told`` with one field (sometimes two) made odd, left out, or given twice."""
        rng = self.rng
        copy = json.loads(json.dumps(told))
        where = rng.choice(list(paths(copy)))
        inner = copy
        for key in where[:-1]:
            inner = inner[key]
        if rng.random() < 0.05:
            del inner[where[-1]]
        else:
            inner[where[-1]] = "@here@"
        text = json.dumps(copy, separators=(",", ":")).replace(MARK, self.odd())
        if rng.random() < 0.15 and isinstance(told, dict):  # of two equal keys the last one counts
            text = f'{text[:-1]},"{rng.choice(list(told))}":{self.odd()}}}'
        return text

    def odd(self) -> str:
        """A value of ODD, or a small tree of such values."""
        rng = self.rng
        if rng.random() < 0.85:
            return rng.choice(ODD)
        inner = [rng.choice(ODD) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.5:
            return f"[{','.join(inner)}]"
        return "{" + ",".join(f'"{name}":{value}' for name, value in zip("xyz", inner, strict=False)) + "}"

    def content(self, good: bytes) -> bytes:
        """Text that is no such file, or ``good`` with a change at one place."""
        rng = self.rng
        way = rng.randrange(8)
        if way == 0:
            return rng.randbytes(rng.randrange(200))
        if way == 1:
            return self.odd().encode()
        if way == 2:
            return good[: rng.randrange(len(good))] + b"\xff" + good[rng.randrange(len(good)) :]
        if not good.endswith(b"]}}"):
            return rng.choice(TEMPLATES).encode()
        return self.bent(json.loads(good)).encode()
