"""Makes the texts of the scripts that Redis gets: with their parts, and values in place of the names of constants."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from warmfleet.fleet.layout import LAYOUT

if TYPE_CHECKING:
    from collections.abc import Callable

#: A part is named by its folder and its file, in words of a-z and _: an include cannot leave ``lua/parts``.
INCLUDE = re.compile(r'\binclude "([a-z_]+/[a-z_]+)"')

#: A line of a script that declares constants of its own: names in capitals, each with a number, a power or a text.
_LITERAL = r'(?:\d+ \^ \d+|\d+(?:\.\d+)?(?:e-?\d+)?|"[^"\\\n]*")'
CONSTANTS = re.compile(
    rf"^local ([A-Z][A-Z0-9_]*(?:, [A-Z][A-Z0-9_]*)*) = ({_LITERAL}(?:, {_LITERAL})*)(?: *--[^\n]*)?$", re.MULTILINE
)
_COMMENT_OR_TEXT_OR_NAME = re.compile(
    r"""--\[\[.*?--\]\]|--[^\n]*|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|(?<![\w.:])[A-Z]\w*""", re.DOTALL
)


@cache
def script_text(name: str) -> str:
    """``script_source`` with the values of constants in place of their names, as replicas give it to Redis.

    Lua knows no constants. A name that a function uses from outside costs an allocation at each call of the script, and
    decide has a hundred: without them it takes 5 to 10 % less of Redis. Line numbers stay.
    """
    return _with_parts(f"{name}.lua", with_values)


@cache
def script_source(name: str) -> str:
    """The text of the command ``lua/<name>.lua``, with the text of its included parts.

    Each ``include "<folder>/<part>"`` is replaced by a call of a function whose body is the text of
    ``lua/parts/<folder>/<part>.lua``. A script in Redis cannot use ``require``. As bodies of functions the parts keep
    their locals (Lua allows 200 in each function) to themselves.
    """
    return _with_parts(f"{name}.lua")


def with_values(text: str) -> str:
    """One file of ``lua/``, with values in place of the names of the layout and of the constants that it declares."""
    values = dict(LAYOUT)

    def take(line: re.Match[str]) -> str:
        for name, literal in zip(line[1].split(", "), re.findall(_LITERAL, line[2]), strict=True):
            values[name] = f"({literal})" if literal.startswith('"') or "^" in literal else literal
        return ""

    text = CONSTANTS.sub(take, text)
    return _COMMENT_OR_TEXT_OR_NAME.sub(lambda found: values.get(found[0], found[0]), text)


def _with_parts(path: str, change: Callable[[str], str] = str) -> str:
    text = change((files("warmfleet") / "lua" / path).read_text(encoding="utf-8"))
    return INCLUDE.sub(lambda include: f"(function()\n{_with_parts(f'parts/{include[1]}.lua', change)}\nend)()", text)
