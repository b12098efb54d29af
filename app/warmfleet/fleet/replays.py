"""Choices of a decision log, made again by the very text that made them (lua/replay.lua), on any Redis or Valkey."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from warmfleet.errors import BadRequest
from warmfleet.fleet.client import redis_errors, script_source

if TYPE_CHECKING:
    from collections.abc import Sequence

    import redis.asyncio as aioredis

AT_ONCE = 100
ORDER = 9  # numbers before it
SHOWN = 200  # characters of what Redis says


@dataclass(frozen=True, slots=True)
class Choice:
    worker_id: str
    why: str
    cost_s: str
    matched_tokens: int


class Replays:
    """Runs by EVAL_RO and touches no key. Closing it closes the client that it was given."""

    def __init__(self, redis: aioredis.Redis) -> None:
        self._redis = redis
        self._source = script_source("replay")

    async def choices(self, records: Sequence[dict[str, Any]], policy: str = "") -> list[Choice]:
        """What is chosen on the state of each record, by ``policy`` (default: its own).

        Raises FleetUnavailable, BadRequest for what is no record.
        """
        found: list[Choice] = []
        for start in range(0, len(records), AT_ONCE):
            chunk = records[start : start + AT_ONCE]
            with redis_errors():
                async with self._redis.pipeline(transaction=False) as pipe:
                    for at, one in enumerate(chunk, start):
                        pipe.execute_command("EVAL_RO", self._source, 0, *arguments(one, policy, at))
                    answers = await pipe.execute(raise_on_error=False)
                found += [_choice(one, answer) for one, answer in zip(chunk, answers, strict=True)]
        return found

    async def close(self) -> None:
        await self._redis.aclose()


def _choice(one: dict[str, Any], answer: Any) -> Choice:
    """Raises BadRequest where the script refuses a record."""
    if isinstance(answer, ResponseError):
        raise BadRequest(f"{one['reservation']} cannot be replayed: {str(answer).splitlines()[0][-SHOWN:]}")
    if isinstance(answer, Exception):
        raise answer
    name, why, cost_s, matched_tokens = answer
    return Choice(name.decode(), why.decode(), cost_s.decode(), matched_tokens)


def arguments(one: dict[str, Any], policy: str, turn: int) -> list[Any]:
    """ARGV of lua/replay.lua. turn: of a round robin that was not the record's own policy. Raises BadRequest."""
    try:
        weights, own = one["weights"], policy in ("", one["policy"])
        order = one["order"] if own else one["rings"].get(policy, [])
        numbers = [
            one["prompt_tokens"],
            one["seed"],
            weights["lambda_"],
            weights["kappa"],
            weights["pressure_price"],
            weights["decode_s_per_token"],
            weights["wait_price"],
            one["prefix_tokens"],
            weights["min_match_tokens"],
            one["objective_s"],
            one["median_tps"],
            one["block_tokens"],
            one["turn"] if own else turn,
            one["now_ms"],
        ]
        candidates = [(bytes.fromhex(row), matched, making) for row, matched, making in one["candidates"]]
        told: list[Any] = [policy or one["policy"], *numbers[:ORDER], ",".join(order), *numbers[ORDER:]]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadRequest(f"this is no record of a decision log: {type(error).__name__} {error}") from error
    numbers += [number for _, *two in candidates for number in two]
    if not all(type(number) in (int, float) for number in numbers) or type(told[0]) is not str:
        raise BadRequest("this is no record of a decision log: a number is of another type")
    return [*told, *chain.from_iterable(candidates)]
