"""The contract of each script: the comment at its head, and the lines below it that name KEYS and ARGV."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from warmfleet.fleet import SCRIPT_ARGS, SCRIPT_KEYS
from warmfleet.fleet.script_loader import CONSTANTS, INCLUDE, script_source, with_values
from warmfleet_worker.protocol.wire import SINGLE_KEYS

LUA = Path(__file__).parents[2] / "lua"
COMMANDS = {path.stem: path.read_text() for path in LUA.glob("*.lua")}
PARTS = {
    path.relative_to(LUA / "parts").with_suffix("").as_posix(): path.read_text() for path in LUA.glob("parts/*/*.lua")
}
NAMES = sorted(COMMANDS)
FIELDS = ("Guarantee", "ARGV", "Returns", "Cost")


def parts(name: str) -> tuple[str, str]:
    """Header and body (its parts included, comments removed) of a script."""
    header, _, body = script_source(name).partition("--]]")
    assert header.startswith(f"--[[\n{name}: "), "the header names its script"
    body = re.sub(r"--\[\[.*?--\]\]", "", body, flags=re.DOTALL)
    return header, re.sub(r"--[^\n]*", "", body)


def field(header: str, name: str) -> str:
    """The text of a header field, over its continuation lines."""
    match = re.search(rf"^{name}: (.*(?:\n(?!\w[\w ]*: )(?! *$).*)*)", header, re.MULTILINE)
    assert match, f"no {name} in the header"
    return match[1]


def arguments(text: str) -> list[str]:
    """Names of an ARGV list: parentheses dropped, up to the repeated part."""
    plain = re.sub(r"\([^()]*\)", "", text).replace("\n", " ")
    fixed = re.split(r",? then ", plain)[0]
    return [part.strip() for part in fixed.split(",") if part.strip()]


def test_every_script_is_known_to_python() -> None:
    assert sorted(SCRIPT_KEYS) == NAMES
    for name in NAMES:
        text = script_source(name)
        assert not INCLUDE.search(text)
        assert INCLUDE.search(COMMANDS[name]) or text == COMMANDS[name]


def test_every_part_is_included_by_a_command() -> None:
    """Two commands or more include a shared part; any other part is included by the command that its folder names."""
    users: dict[str, set[str]] = {part: set() for part in PARTS}
    for command, text in COMMANDS.items():
        todo = INCLUDE.findall(text)
        while todo:
            part = todo.pop()
            users[part].add(command)
            todo += INCLUDE.findall(PARTS[part])
    for part, commands in users.items():
        folder = part.partition("/")[0]
        assert len(commands) > 1 if folder == "shared" else commands >= {folder}, part


@pytest.mark.parametrize("name", sorted({**COMMANDS, **PARTS}))
def test_a_constant_has_one_value_in_its_file(name: str) -> None:
    """Replicas put values in place of names: a name must mean the same wherever it stands, and be no field's name."""
    text = {**COMMANDS, **PARTS}[name]
    constants = [constant for line in CONSTANTS.finditer(text) for constant in line[1].split(", ")]
    code = re.sub(r"--\[\[.*?--\]\]|--[^\n]*", "", CONSTANTS.sub("", text), flags=re.DOTALL)
    for constant in constants:
        for bound in (
            rf"\b{constant} *=(?!=)",
            rf"\blocal (?!function)[^=\n]*\b{constant}\b",
            rf"\bfunction[^)\n]*\b{constant}\b",
        ):
            assert not re.search(bound, code), f"{constant} is bound again"
    assert not set(constants) & set(
        re.findall(r"\w+", re.sub(r"\"[^\"\n]*\"|--.*", "", with_values(text).partition("--]]")[2]))
    )


def test_values_stand_for_constants_and_nothing_else_is_changed() -> None:
    text = (
        'local AT, FORM, BIG = 17, ">I4", 2 ^ 32 -- AT of a row\nlocal CAUSE = ARGV[1]\n'
        "-- AT stays here\nlocal at = x.AT + AT, CAUSE, FORM:rep(2), 'AT', \"AT\", BIG, FLAG_URL --[[ AT --]]"
    )
    assert with_values(text) == (
        "\nlocal CAUSE = ARGV[1]\n"
        '-- AT stays here\nlocal at = x.AT + 17, CAUSE, (">I4"):rep(2), \'AT\', "AT", (2 ^ 32), 2 --[[ AT --]]'
    )


def test_no_include_leaves_the_parts() -> None:
    for text in (*COMMANDS.values(), *PARTS.values()):
        code = re.sub(r"--\[\[.*?--\]\]|--[^\n]*", "", text, flags=re.DOTALL)
        assert len(re.findall(r"\binclude\b", code)) == len(INCLUDE.findall(code))
    for name in ("../decide", "shared/../decide", "/etc/hosts", "decide"):
        assert not INCLUDE.search(f'include "{name}"')


@pytest.mark.parametrize("name", sorted(PARTS))
def test_a_part_is_a_function_on_its_own(name: str) -> None:
    """A part uses its arguments only: no KEYS, no locals of the script. Its comment says what it does."""
    text = PARTS[name]
    assert text.startswith(f"--[[\n{name}: ")
    assert re.search(r"\nreturn (function\(|\{ |\w+, \w+\n)", text), "it returns functions"
    assert not re.search(r"\bKEYS\b", text)


@pytest.mark.parametrize("name", NAMES)
def test_the_header_has_all_fields(name: str) -> None:
    header, _ = parts(name)
    for wanted in FIELDS:
        assert field(header, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_keys_are_named_once_and_alike_in_every_script(name: str) -> None:
    text = re.sub(r"--\[\[.*?--\]\]|--[^\n]*", "", COMMANDS[name], flags=re.DOTALL)
    assert len(set(SCRIPT_KEYS[name])) == len(SCRIPT_KEYS[name])
    assert set(SCRIPT_KEYS[name]) <= SINGLE_KEYS
    assert len(re.findall(r"\bKEYS\b", text)) == bool(SCRIPT_KEYS[name]), "no key is read by its number"
    for key in SCRIPT_KEYS[name]:
        assert len(re.findall(rf"\b{key}_key\b", text)) > 1, f"{key}_key is never used"


@pytest.mark.parametrize("name", NAMES)
def test_the_header_explains_the_arguments_in_their_order(name: str) -> None:
    """Arguments are compared by name, so two that change places in the header or in the line below are noticed."""
    header, body = parts(name)
    wanted = SCRIPT_ARGS[name]
    assert tuple(arguments(field(header, "ARGV"))) == wanted
    used = [int(number) for number in re.findall(r"ARGV\[(\d+)\]", body)]
    assert sorted(used) == list(range(1, len(wanted) + 1)), "each is read once, where it gets its name"


@pytest.mark.parametrize("name", NAMES)
def test_data_dependent_keys_are_in_the_header(name: str) -> None:
    header, body = parts(name)
    said = set(re.findall(r"\b(\w+):<", header.partition("Keys that depend on data:")[2]))
    built = set(re.findall(r'prefix \.\. "(\w+):"', body)) | set(
        re.findall(r'"(events|server|command|artifact):"', body)
    )
    assert built <= said, f"not in the header: {built - said}"
