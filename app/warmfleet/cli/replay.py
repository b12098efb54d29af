"""``warmfleet replay``: makes the choices of a decision log again, also by other policies."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warmfleet.cli.client import table
from warmfleet.cli.command_error import CommandError
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


def run(options: argparse.Namespace) -> int:
    """Print how many decisions come out as they were; returns 0 if every line does, else 1."""
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
    return asyncio.run(_run(Replays(client), records, wanted)) or int(bool(damaged))


async def _run(replays: Replays, records: Sequence[dict[str, Any]], wanted: Sequence[str]) -> int:
    try:
        again = await replays.choices(records)
        wrong = [(record, new) for record, new in zip(records, again, strict=True) if not same(record, new)]
        print(f"{len(records) - len(wrong)} of {len(records)} decisions came out exactly as they were")
        for record, new in wrong[:SHOWN]:
            was = f"{record['worker_id']} ({record['why']}, {record['cost_s']} s)"
            print(f"  {record['reservation']}: {was} is {new.worker_id} ({new.why}, {new.cost_s} s) now")
        if wanted:
            found = {"(as it was)": again} | {name: await replays.choices(records, name) for name in wanted}
            print(table(HEADER, [_row(name, records, choices) for name, choices in found.items()]))
    finally:
        await replays.close()
    return 1 if wrong else 0


def same(record: dict[str, Any], new: Choice) -> bool:
    """The logged decision and the new one agree on worker, reason and cost."""
    return (record["worker_id"], record["why"], record["cost_s"]) == (new.worker_id, new.why, new.cost_s)


def _row(name: str, records: Sequence[dict[str, Any]], choices: Sequence[Choice]) -> tuple[object, ...]:
    """The policy's row: figures over single choices, each on its logged state. A fleet under it would differ."""
    count, chosen = max(1, len(choices)), [choice.worker_id for choice in choices]
    agreed = sum(record["worker_id"] == worker for record, worker in zip(records, chosen, strict=True))
    prompt = max(1, sum(record["prompt_tokens"] for record in records))
    busiest = max((chosen.count(worker) for worker in set(chosen)), default=0)
    return (
        name,
        f"{agreed / count:.1%}",
        f"{sum(choice.matched_tokens for choice in choices) / prompt:.1%}",
        f"{sum(float(choice.cost_s) for choice in choices) / count:.4f} s",
        f"{busiest / count:.1%}",
    )


def read(name: str) -> tuple[list[dict[str, Any]], list[int]]:
    """The records, and the numbers of damaged lines, which a crash or a full disk may have left.

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
