"""``demo --agents``: the figures of two fleets side by side, their plot, and the verdict."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

from warmfleet.cli.agents_demo import Side, picture, plot, verdict
from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.engines import EngineOptions, engine_command
from warmfleet.cli.terminal.output import plain, redraw
from warmfleet.cli.terminal.plot import sparkline

if TYPE_CHECKING:
    from pathlib import Path

LINE = {"at_s": 6.0, "p50_ttft": 2.04, "ended": 3, "open_sessions": 9, "waiting": 4, "recomputed": 1.26}
END = {**LINE, "sessions_per_hour": 900.0, "failed": 0, "error_examples": [], "medians": [0.2] * 12 + [8.0] * 12}


def side(folder: Path, name: str, *lines: dict[str, Any], code: int | None = None) -> Side:
    log = folder / f"{name}.log"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"half')
    process = SimpleNamespace(returncode=code)
    child = SimpleNamespace(log=log, alive=code is None, process=process, ending="exit code 1", tail=lambda: "why")
    stack = SimpleNamespace(fleet=lambda: [{"ledger": {"held": 2}}, {"ledger": None}, {}])
    return Side(name, stack, child)  # type: ignore[arg-type]


def test_two_fleets_stand_side_by_side(tmp_path: Path) -> None:
    text = plain(picture([side(tmp_path, "without the ledger", LINE, LINE), side(tmp_path, "with the ledger")]))
    assert text.splitlines()[0].split("  ")[-2:] == ["WITHOUT THE LEDGER", "WITH THE LEDGER"]
    assert "median time to first token                       2.0 s                -" in text
    assert "sessions held by the ledger                          2                -" in text
    assert "without the ledger  ██" in text
    with pytest.raises(CommandError, match="the agents ended"):
        side(tmp_path, "without the ledger", code=2).lines()


def test_the_plot_has_a_line_for_each_fleet_and_the_burst() -> None:
    drawn = ET.fromstring(plot({"without the ledger": END, "with & <it>": END}))
    space = "{http://www.w3.org/2000/svg}"
    lines = drawn.findall(f"{space}polyline")
    assert len(lines) == 2
    heights = [float(point.split(",")[1]) for point in lines[0].attrib["points"].split()]
    assert len(heights) == 24
    assert heights[0] > heights[-1] > 0, "more is higher"
    assert {"burst", "with & <it>"} <= {text.text for text in drawn.findall(f"{space}text")}


def test_a_sparkline_has_a_character_for_each_value() -> None:
    assert sparkline([0.0, 4.0, 8.0, 9.0], 8.0) == " ▄██"
    assert sparkline([0.0], 0.0) == " "


def test_the_ledger_must_serve_more_sessions_sooner_and_without_failures() -> None:
    good = END | {"sessions_per_hour": 1_800.0, "p50_ttft": 0.4}
    assert verdict(END, good) == (
        True,
        "the ledger served 2.00 times the sessions; median time to first token 2.0 s without it, 0.4 s with it",
    )
    assert not verdict(END, END)[0]
    assert not verdict(END, good | {"p50_ttft": 3.0})[0]
    assert verdict(END, good | {"failed": 2, "error_examples": ["503 x"]})[1].endswith("; 2 requests failed: 503 x")


def test_a_picture_that_is_redrawn_ends_when_its_subject_does() -> None:
    out, left = io.StringIO(), iter("ab")
    states = iter([False, True])
    redraw(out, lambda: [next(left)], 0.0, lambda: next(states))
    assert out.getvalue().split("\n")[1::3] == ["a", "b"]


def test_simulated_engines_take_flags() -> None:
    argv, _environment = engine_command(EngineOptions(flags=("--time-scale", "0.5")), "sim-1", 18_000, "redis://h")
    assert argv[-2:] == ["--time-scale", "0.5"]
