"""``warmfleet replay``: repeats the decisions of a decision log, by the logged policy or by others."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmfleet.cli.command_error import CommandError
from warmfleet.cli.terminal.output import Part, Table, Tone, Toned, print_answer
from warmfleet.cli.terminal.progress import Progress
from warmfleet.errors import BadRequest
from warmfleet.fleet import connect
from warmfleet.fleet.replays import Choice, Replays, arguments
from warmfleet.protocol.redis_address import RedisAddressError, with_ca
from warmfleet.settings import POLICIES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

HEADER = ("POLICY", "SAME WORKER", "MATCHED", "PREDICTED COST", "BUSIEST WORKER")
TIMEOUT_S = 10.0
SHOWN = 5
AS_IT_WAS = "(as it was)"


def run(options: argparse.Namespace) -> int:
    """Print how many repeated decisions agree with the log; return 0 if all lines can be read and agree, else 1."""
    records, damaged = read(options.file)
    if damaged:
        lines = ", ".join(map(str, damaged[:SHOWN])) + (", …" if len(damaged) > SHOWN else "")
        print(f"left out: {len(damaged)} lines that are not records of a decision log: {lines}", file=sys.stderr)
    wanted = POLICIES if "all" in options.policy else options.policy
    if wrong := [name for name in wanted if name not in POLICIES]:
        raise CommandError(f"{wrong[0]!r} is no policy; known are {', '.join(POLICIES)}, and all")
    try:
        client = connect(with_ca(options.redis, os.environ.get("WARMFLEET_REDIS_CA", "")), timeout_s=TIMEOUT_S)
    except RedisAddressError as error:
        raise CommandError(str(error)) from error
    again = asyncio.run(_again(Replays(client), records, ["", *wanted]))
    changed = [(record, made) for record, made in zip(records, again[""], strict=True) if not same(record, made)]
    rows = [_row(name or AS_IT_WAS, records, choices) for name, choices in again.items()] if wanted else []
    figures = {"decisions": len(records), "same": len(records) - len(changed), "damaged_lines": damaged}
    answer = figures | {"policies": [asdict(row) for row in rows]}
    print_answer(answer, lambda: _parts(len(records), changed, rows), as_json=options.json)
    return int(bool(changed or damaged))


async def _again(
    replays: Replays, records: Sequence[dict[str, Any]], policies: Sequence[str]
) -> dict[str, list[Choice]]:
    """Repeat the logged decisions by each of these policies; "" is the policy that a record names."""
    found = {}
    try:
        with Progress() as progress:
            for name in policies:
                text = f"making decisions again{f', by {name}' if name else ''}"
                progress.step(text)
                found[name] = await replays.choices(records, name, partial(progress.step, text, of=len(records)))
    finally:
        await replays.close()
    return found


def _parts(count: int, wrong: Sequence[tuple[dict[str, Any], Choice]], rows: Sequence[Row]) -> list[Part]:
    tone = Tone.BAD if wrong else Tone.GOOD
    parts: list[Part] = [Toned(f"{count - len(wrong)} of {count} decisions came out exactly as they were", tone)]
    for record, new in wrong[:SHOWN]:
        was = f"{record['worker_id']} ({record['why']}, {record['cost_s']} s)"
        parts.append(f"  {record['reservation']}: {was} is {new.worker_id} ({new.why}, {new.cost_s} s) now")
    return [*parts, Table(HEADER, [row.cells() for row in rows])] if rows else parts


def same(record: dict[str, Any], new: Choice) -> bool:
    """Tell whether the logged decision and the new one agree on worker, reason and cost."""
    return (record["worker_id"], record["why"], record["cost_s"]) == (new.worker_id, new.why, new.cost_s)


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of a policy over single decisions, each repeated in its logged state: none depends on an earlier choice.

    same_worker: share of decisions with the logged worker. matched: share of prompt tokens that were matched. cost_s:
    mean predicted cost. busiest_worker: share of decisions for the worker that was chosen most.
    """

    policy: str
    same_worker: float
    matched: float
    cost_s: float
    busiest_worker: float

    def cells(self) -> tuple[object, ...]:
        shares = f"{self.same_worker:.1%}", f"{self.matched:.1%}"
        return self.policy, *shares, f"{self.cost_s:.4f} s", f"{self.busiest_worker:.1%}"


def _row(name: str, records: Sequence[dict[str, Any]], choices: Sequence[Choice]) -> Row:
    count, chosen = max(1, len(choices)), [choice.worker_id for choice in choices]
    agreed = sum(record["worker_id"] == worker for record, worker in zip(records, chosen, strict=True))
    prompt = max(1, sum(record["prompt_tokens"] for record in records))
    busiest = max((chosen.count(worker) for worker in set(chosen)), default=0)
    matched, cost_s = sum(choice.matched_tokens for choice in choices), sum(float(choice.cost_s) for choice in choices)
    return Row(name, agreed / count, matched / prompt, cost_s / count, busiest / count)


def read(name: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Read a decision log: return its records, and the line numbers of damaged lines, left by a crash or a full disk.

    Raises CommandError if there is no record at all.
    """
    try:
        lines = Path(name).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise CommandError(f"{name} cannot be read: {error.strerror}") from error
    records, damaged = [], []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            arguments(record, "", 0)
            records.append(
                {**record, **{field: str(record[field]) for field in ("worker_id", "why", "cost_s", "reservation")}}
            )
        except (ValueError, KeyError, TypeError, RecursionError, BadRequest):
            damaged.append(number)
    if not records:
        raise CommandError(f"{name} has no record of a decision log")
    return records, damaged
