"""Redis' part in a probe of a worker's identity: notes which of a probe's blocks the worker reports, and the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from warmfleet.fleet.client import redis_errors

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from warmfleet.fleet.client import Scripts

PROBE_EXPIRES_S = 120  # time until the awaited hashes of a probe expire; a probe lasts 40 s at most

Proved = Literal["OK", "DOWNGRADED", "STALE", "TAKEN"]


@dataclass(frozen=True, slots=True)
class Proof:
    """The result of a probe. word: as lua/prove.lua takes it. reason: a sentence. cause: a word for counters.

    probed_ms: time of the last result when this probe began (0: none): a failure counts only if it is still the last;
    None: the result counts in any case. owner: the replica whose warming of the worker this result ends; empty: none.
    """

    word: str
    reason: str
    cause: str = ""
    probed_ms: int | None = None
    owner: str = ""


class Probes:
    """The writes of a replica while it probes a worker, and while it warms a worker whose probe passed."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts = scripts

    async def await_blocks(self, worker_id: str, probe: str, hashes: Sequence[bytes]) -> None:
        """Store these block hashes; lua/apply.lua deletes each when the engine reports it, even if evicted soon after.

        Two probes of one worker do not disturb each other: their prompts are random, so their blocks differ. End with
        ``await_no_blocks``; if this replica dies, the awaited hashes expire. Raises FleetUnavailable.
        """
        key = self._scripts.keys.probe(worker_id)
        with redis_errors():
            async with self._scripts.redis.pipeline(transaction=False) as pipe:
                pipe.sadd(key, probe, *hashes)
                pipe.expire(key, PROBE_EXPIRES_S)
                await pipe.execute()

    async def awaited(self, worker_id: str, probe: str, hashes: Sequence[bytes]) -> list[bool] | None:
        """Return for each block True while the stream has not reported it. None if Redis has lost the awaited hashes.

        Raises FleetUnavailable.
        """
        key = self._scripts.keys.probe(worker_id)
        with redis_errors():
            noted, *left = await cast("Awaitable[list[int]]", self._scripts.redis.smismember(key, [probe, *hashes]))
        return [awaited == 1 for awaited in left] if noted else None

    async def await_no_blocks(self, worker_id: str, probe: str, hashes: Sequence[bytes]) -> None:
        """Stop awaiting these blocks, because the probe is over."""
        with redis_errors():
            await self._scripts.redis.srem(self._scripts.keys.probe(worker_id), probe, *hashes)

    async def prove(self, worker_id: str, nonce: str, proof: Proof) -> Proved:
        """Record the result of a probe.

        Returns STALE if the worker joined anew (with another nonce), or if this is a failure and another result was
        recorded since the probe began; TAKEN if another replica warms the worker, or this owner's lease is over;
        DOWNGRADED if the worker was proven before and is not any more. Raises FleetUnavailable.
        """
        answer = await self._scripts.keep(
            "prove",
            worker_id=worker_id,
            nonce=nonce,
            proof=proof.word,
            cause=proof.cause,
            reason=proof.reason,
            probed="" if proof.probed_ms is None else proof.probed_ms,
            owner=proof.owner,
            lease_ms=0,
        )
        return cast("Proved", answer.decode())

    async def warming(self, worker_id: str, nonce: str, owner: str, lease_ms: int) -> Proved:
        """Let ``owner`` warm this worker, which takes no requests yet, for ``lease_ms``; a further call renews that.

        Returns TAKEN if another owner warms it or has done so. Raises FleetUnavailable.
        """
        answer = await self._scripts.keep(
            "prove",
            worker_id=worker_id,
            nonce=nonce,
            proof="warming",
            cause="",
            reason="",
            probed="",
            owner=owner,
            lease_ms=lease_ms,
        )
        return cast("Proved", answer.decode())
