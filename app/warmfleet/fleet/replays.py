"""Repeats choices of a decision log with decide's own code (lua/replay.lua), on any Redis or Valkey.

A replay touches no key.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from itertools import chain
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from warmfleet.errors import BadRequest
from warmfleet.fleet.client import argv, redis_errors
from warmfleet.fleet.constants import Constants, Weights
from warmfleet.fleet.script_loader import script_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import redis.asyncio as aioredis

AT_ONCE = 100  # records that are sent to Redis in one pipeline
SHOWN = 200  # most characters of an error of Redis that are shown
#: Numbers of a record that the script takes as arguments of the same names.
NUMBERS = ("prompt_tokens", "seed", "prefix_tokens", "objective_s", "median_tps", "block_tokens", "now_ms")
#: Weights that a log from before 2026-11-28 does not name. Its decisions were made as if they were 0.
LATER_WEIGHTS = {"decode_price": 0.0, "context_price": 0.0}


@dataclass(frozen=True, slots=True)
class Choice:
    """The worker that a replay chose, why (one word), its predicted cost as text, and the cached tokens it has."""

    worker_id: str
    why: str
    cost_s: str
    matched_tokens: int


class Replays:
    """Makes choices of a decision log again, by EVAL_RO (lua/replay.lua). ``close`` also closes the Redis client."""

    def __init__(self, redis: aioredis.Redis) -> None:
        self._redis = redis
        self._source = script_text("replay")

    async def choices(
        self, records: Sequence[dict[str, Any]], policy: str = "", made: Callable[[int], object] = lambda _count: None
    ) -> list[Choice]:
        """Make the choice again on the state of each record, by ``policy`` (default: the policy of the record).

        made: called after every AT_ONCE choices with the number so far. Raises FleetUnavailable, and BadRequest for a
        record that is malformed or cannot be replayed.
        """
        found: list[Choice] = []
        for start in range(0, len(records), AT_ONCE):
            chunk = records[start : start + AT_ONCE]
            with redis_errors():
                async with self._redis.pipeline(transaction=False) as pipe:
                    for at, record in enumerate(chunk, start):
                        pipe.execute_command("EVAL_RO", self._source, 0, *arguments(record, policy, at))
                    answers = await pipe.execute(raise_on_error=False)
                found += [_choice(record, answer) for record, answer in zip(chunk, answers, strict=True)]
            made(len(found))
        return found

    async def close(self) -> None:
        await self._redis.aclose()


def _choice(record: dict[str, Any], answer: Any) -> Choice:
    """Read the script's answer for a record. Raises BadRequest if the script refuses the record."""
    if isinstance(answer, ResponseError):
        raise BadRequest(f"{record['reservation']} cannot be replayed: {str(answer).splitlines()[0][-SHOWN:]}")
    if isinstance(answer, Exception):
        raise answer
    name, told, cost_s, matched_tokens = answer
    why = told.decode()
    if why == "room" and record.get("why") == "place":  # only the engine of its session had room for it
        why = "place"
    return Choice(name.decode(), why, cost_s.decode(), matched_tokens)


def arguments(record: dict[str, Any], policy: str, turn: int) -> list[Any]:
    """Return the ARGV of lua/replay.lua for a record of a decision log; an empty ``policy`` means the record's own.

    turn: number of earlier decisions by round_robin, used if the record is of another policy. Raises BadRequest.
    """
    try:
        if record.get("ways"):
            raise BadRequest("a choice among engines that hand prompts over cannot be replayed")
        own = policy in ("", record["policy"])
        told = LATER_WEIGHTS | record["weights"]
        weights = {field.name: told[field.name] for field in fields(Weights)}
        numbers = {name: record[name] for name in NUMBERS} | {"turn": record["turn"] if own else turn}
        order = record["order"] if own else record["rings"].get(policy, [])
        # A log from before 2026-11-28 does not tell what had to be loaded from tiers: nothing was known of them.
        candidates = [
            (bytes.fromhex(row), *numbers, *(0, 0)[: 4 - len(numbers)]) for row, *numbers in record["candidates"]
        ]
        texts: dict[str, Any] = {"policy": policy or record["policy"], "order": ",".join(order)}
        prices = {int(slot): float(seconds) for slot, seconds in record.get("label_prices", {}).items()}
        texts["room"] = record.get("room", "")  # logs from before 2026-11-23 have none
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadRequest(f"this is no record of a decision log: {type(error).__name__} {error}") from error
    matches = [number for _, *told in candidates for number in told]
    if not all(type(number) in (int, float) for number in [*weights.values(), *numbers.values(), *matches]):
        raise BadRequest("this is no record of a decision log: a number is of another type")
    if type(texts["policy"]) is not str or type(texts["room"]) is not str:
        raise BadRequest("this is no record of a decision log: its policy or its room is no text")
    try:
        constants = Constants(Weights(**weights), label_prices=prices).packed
    except (struct.error, OverflowError) as error:
        raise BadRequest(f"this is no record of a decision log: {error}") from error
    return argv("replay", chain.from_iterable(candidates), constants=constants, **texts, **numbers)
