"""``warmfleet demo --agents``: a burst of agents at two fleets at once, without and with the ledger of sessions."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.local.engines import EngineOptions
from warmfleet.cli.local.stack import Plan, Stack
from warmfleet.cli.terminal.output import Table, Tone, Toned, redraw, show
from warmfleet.cli.terminal.plot import sparkline, svg
from warmfleet.cli.terminal.progress import Progress

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from warmfleet.cli.local.children import Child
    from warmfleet.cli.terminal.output import Part

SPEED = 6.0  # as many seconds of the agents' time pass in a second
SECONDS, RATE, BURST, BURST_AT = 540.0, 0.36, 40, 100.0  # of the agents' time; sessions a second; sessions at once
#: Engines with the step times of an 8B model on an H100, and caches for about eleven agents each.
FLAGS = ("--time-scale", str(1 / SPEED), "--max-num-batched-tokens", "512")
ENGINES = EngineOptions(blocks=800, step_time="agents-8b", flags=FLAGS)
LEDGER_OFF = {"WARMFLEET_SESSION_WAIT_MAX_S": "0"}
DRAW_S, PLAIN_S = 1.0, 10.0  # between two pictures: at a terminal, elsewhere
BETTER = 1.2  # times as many sessions, with the ledger, are a success


@dataclass
class Side:
    """A fleet with its agents, who write a line of figures every second."""

    name: str
    stack: Stack
    agents: Child

    def lines(self) -> list[dict[str, Any]]:
        """Return the figures so far. Raises CommandError if the agents have failed."""
        ended = not self.agents.alive
        whole = [line for line in self.agents.log.read_text().splitlines(keepends=True) if line.endswith("}\n")]
        if ended and not (whole and '"medians"' in whole[-1]):
            raise CommandError(f"the agents ended ({self.agents.ending}):\n{self.agents.tail()}")
        return [json.loads(line) for line in whole]

    def held(self) -> int:
        """Return how many sessions the ledger holds back now."""
        return sum((model.get("ledger") or {}).get("held", 0) for model in self.stack.fleet())


def run(options: argparse.Namespace) -> int:
    """Run the demo; return 0 if the ledger let more sessions end and their steps begin sooner, else 1.

    Raises CommandError if a process ends.
    """
    with Progress() as progress:
        plans = {"without the ledger": LEDGER_OFF, "with the ledger": {}}
        progress.say(f"{RATE:g} agents begin a second, and {BURST} more at once after {BURST_AT:.0f} s")
        progress.say(f"(an 8B model on an H100, as simulated; {SPEED:g} s pass in a second)")
        without = Stack(Plan(engines=ENGINES, environment=LEDGER_OFF), progress.say, progress.step)
        with without, Stack(Plan(engines=ENGINES), progress.say, progress.step) as with_ledger:
            sides = [_side(name, stack) for name, stack in zip(plans, (without, with_ledger), strict=True)]
            every_s = DRAW_S if sys.stdout.isatty() else PLAIN_S
            redraw(sys.stdout, lambda: picture(sides), every_s, lambda: not any(side.agents.alive for side in sides))
            ends = {side.name: side.lines()[-1] for side in sides}
    if not all("medians" in end for end in ends.values()):
        raise CommandError("stopped before the agents had ended")
    if options.plot:
        try:
            Path(options.plot).write_text(plot(ends))
        except OSError as error:
            raise CommandError(f"no plot: {error}") from error
        show(sys.stdout, [f"plot: {options.plot}"])
    passed, sentence = verdict(*ends.values())
    show(sys.stdout, ["", (Toned("pass", Tone.GOOD) if passed else Toned("FAIL", Tone.BAD), f"  {sentence}")])
    return 0 if passed else 1


def _side(name: str, stack: Stack) -> Side:
    argv = [sys.executable, "-m", "warmfleet_loadtest.agents", "--base-url", stack.address, "--model", stack.names[0]]
    argv += ["--speed", str(SPEED), "--seconds", str(SECONDS), "--rate", str(RATE)]
    argv += ["--burst", str(BURST), "--burst-at", str(BURST_AT)]
    return Side(name, stack, stack.children.start("agents", argv))


def picture(sides: Sequence[Side]) -> list[Part]:
    """Return the figures of both fleets in columns, and the median TTFT over time."""
    lines = [side.lines() for side in sides]
    last = [{**line[-1], "held": side.held()} if line else {} for line, side in zip(lines, sides, strict=True)]
    rows = [
        [text, *(form.format(end[key]) if key in end else "-" for end in last)]
        for text, key, form in (
            ("second", "at_s", "{:.0f}"),
            ("median time to first token", "p50_ttft", "{:.1f} s"),
            ("sessions done", "ended", "{}"),
            ("sessions under way", "open_sessions", "{}"),
            ("steps that wait for a first token", "waiting", "{}"),
            ("sessions held by the ledger", "held", "{}"),
            ("computed again, over the necessary", "recomputed", "{:.1f}"),
        )
    ]
    ttft = [[line["p50_ttft"] for line in found] for found in lines]
    top = max((value for values in ttft for value in values), default=0.0)
    drawn = [f"{side.name:<20}{sparkline(_thinned(values), top)}" for side, values in zip(sides, ttft, strict=True)]
    return [Table(["", *(side.name.upper() for side in sides)], rows), "", f"median TTFT, up to {top:.1f} s", *drawn]


def _thinned(values: Sequence[float], most: int = 50) -> Sequence[float]:
    return values[:: -(-len(values) // most) or 1]


def plot(ends: dict[str, dict[str, Any]]) -> str:
    """Return the median TTFT over time as an .svg file."""
    lines = {name: end["medians"] for name, end in ends.items()}
    title = f"Agents begin {RATE:g} times a second, and {BURST} more at once"
    return svg(title, ("seconds", "median time to first token, s"), SECONDS, lines, (BURST_AT, "burst"))


def verdict(without: dict[str, Any], with_ledger: dict[str, Any]) -> tuple[bool, str]:
    """Return whether the ledger served more sessions and answered sooner, and a sentence about that."""
    times = with_ledger["sessions_per_hour"] / max(1.0, without["sessions_per_hour"])
    sooner = with_ledger["p50_ttft"] < without["p50_ttft"]
    failed = without["failed"] + with_ledger["failed"]
    ttft = f"{without['p50_ttft']:.1f} s without it, {with_ledger['p50_ttft']:.1f} s with it"
    sentence = f"the ledger served {times:.2f} times the sessions; median time to first token {ttft}"
    if failed:
        examples = "; ".join(dict.fromkeys(without["error_examples"] + with_ledger["error_examples"]))
        sentence += f"; {failed} requests failed: {examples}"
    return times >= BETTER and sooner and not failed, sentence
