"""Makes the scripts' texts for Redis: puts in the included parts, and values in place of the names of constants."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from warmfleet.fleet.layout import LAYOUT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LUA = files("warmfleet") / "lua"

#: Patterns for a script's first lines, which name its KEYS (a key's name and "_key") and its ARGV, except a list of
#: varying length at the end.
_KEYS = re.compile(r"^local ([\w\s,]+?)\s*=\s+unpack\(KEYS\)$", re.MULTILINE)
_ARGS = re.compile(r"^local ([\w, ]+) = (.*\bARGV\[.*)$", re.MULTILINE)
_ARG = re.compile(r"(?:tonumber\()?ARGV\[(\d+)\]\)?")

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
    """Return ``script_source`` with the values of constants in place of their names, as replicas give it to Redis.

    Lua has no constants: a function that uses a local of its script costs an allocation at each call of the script.
    With values in place of its hundred names, decide takes 5 to 10 % less time. Line numbers stay.
    """
    return _with_parts(f"{name}.lua", with_values)


@cache
def script_source(name: str) -> str:
    """Return the text of the command ``lua/<name>.lua``, with the text of its included parts.

    Each ``include "<folder>/<part>"`` is replaced by a call of a function whose body is the text of
    ``lua/parts/<folder>/<part>.lua``. A script in Redis cannot use ``require``. As bodies of functions the parts keep
    their locals (Lua allows 200 in each function) to themselves.
    """
    return _with_parts(f"{name}.lua")


def with_values(text: str) -> str:
    """Put values in place of the names of constants in a Lua file: those of the layout, and those it declares."""
    values = dict(LAYOUT)

    def take(line: re.Match[str]) -> str:
        for name, literal in zip(line[1].split(", "), re.findall(_LITERAL, line[2]), strict=True):
            values[name] = f"({literal})" if literal.startswith('"') or "^" in literal else literal
        return ""

    text = CONSTANTS.sub(take, text)
    return _COMMENT_OR_TEXT_OR_NAME.sub(lambda found: values.get(found[0], found[0]), text)


def _with_parts(path: str, change: Callable[[str], str] = str) -> str:
    text = change((LUA / path).read_text(encoding="utf-8"))
    return INCLUDE.sub(lambda include: f"(function()\n{_with_parts(f'parts/{include[1]}.lua', change)}\nend)()", text)


def _keys(text: str) -> tuple[str, ...]:
    found = _KEYS.search(text)
    return tuple(name.removesuffix("_key") for name in re.findall(r"\w+", found[1])) if found else ()


def _args(text: str) -> tuple[str, ...]:
    found: dict[int, str] = {}
    for names, values in _ARGS.findall(text):
        for name, value in zip(names.split(", "), values.split(", "), strict=True):
            if arg := _ARG.fullmatch(value):
                found[int(arg[1])] = name
    return tuple(found[place] for place in range(1, len(found) + 1))


_COMMANDS = {
    path.name.removesuffix(".lua"): path.read_text(encoding="utf-8")
    for path in LUA.iterdir()
    if path.name.endswith(".lua")
}
#: KEYS of every script, in order, by their names in lua/README.md.
SCRIPT_KEYS: Mapping[str, tuple[str, ...]] = {name: _keys(text) for name, text in _COMMANDS.items()}
#: ARGV of every script, in order and by name.
SCRIPT_ARGS: Mapping[str, tuple[str, ...]] = {name: _args(text) for name, text in _COMMANDS.items()}
