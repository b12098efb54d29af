"""``warmfleet replicas``: lists the router replicas of a running fleet, as one replica knows them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from warmfleet.cli.client import ask
from warmfleet.cli.terminal.output import Part, Table, Tone, Toned, print_answer

if TYPE_CHECKING:
    import argparse

HEADER = ("REPLICA", "STATE", "VERSION", "UP", "POLICY", "IN FLIGHT", "WAITING", "DECISIONS", "HIT RATIO", "OPERATORS")
LEGEND = """\
IN FLIGHT: requests at engines; WAITING: requests that wait for their turn. DECISIONS, HIT RATIO (of prompt tokens): of
the last minute. OPERATORS: the address for the other commands, as --url.
"""
TONES = {"serving": Tone.GOOD, "draining": Tone.MIND, "silent": Tone.BAD}


def run(options: argparse.Namespace) -> int:
    """Print the table; returns 1 if a replica is silent. Raises CommandError."""
    answer = ask("GET", options.url, "/replicas")
    print_answer(answer, lambda: parts_of(answer, time.time()), as_json=options.json)
    return 1 if any(row["state"] == "silent" for row in answer["replicas"]) else 0


def parts_of(answer: dict[str, Any], now: float) -> list[Part]:
    """Make the table of replicas, and a line about each silent one. now: Unix time."""
    rows = answer["replicas"]
    parts: list[Part] = []
    if not answer["fresh"]:
        parts.append(Toned("Redis does not answer: the replicas of some models are not known", Tone.BAD))
    if not rows:
        return [*parts, "no replica has reported itself yet: each does so every 3 s"]
    parts += [Table(HEADER, [_row(row, now) for row in rows]), LEGEND]
    return parts + [
        (
            f"{row['replica']}: ",
            Toned("silent", Tone.BAD),
            f": it was last heard {row['heard_s']:.0f} s ago; killed, hung, or cut off from Redis",
        )
        for row in rows
        if row["state"] == "silent"
    ]


def _row(row: dict[str, Any], now: float) -> tuple[object, ...]:
    policies = ", ".join(dict.fromkeys(row["pools"].values()))
    ratio = f"{100 * row['matched_tokens'] / row['prompt_tokens']:.0f}%" if row["prompt_tokens"] else "-"
    state = Toned(row["state"], TONES[row["state"]])
    load = (row["in_flight"], row["waiting"], row["decided"], ratio)
    return row["replica"], state, row["version"], _span(now - row["started"]), policies, *load, row["url"] or "-"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7_200 else f"{seconds / 3_600:.0f} h"
