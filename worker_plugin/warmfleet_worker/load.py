"""The load of an engine, as its heartbeat reports it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

LOAD_CHECK_SECONDS = 0.25  # time between two readings of the engine's load
SMALL_TOKENS = 256  # a change of foreign load (not sent by routers) up to this waits for the next heartbeat
MEAN_SECONDS = 2.0  # time constant of the mean of foreign prefill tokens; 1 s and 4 s did worse in measurements
REMEMBERED_WORK_SECONDS = 1.0  # cap of the mean, in seconds of prefill; without it an idle engine would look saturated
ASSUMED_TPS = 10_000  # prefill speed assumed of an engine that has not been measured yet, tokens per second
LEAST_TOKENS = 32  # a mean of foreign prefill below this is reported as 0
#: Time without a step after which an engine with work counts as standing still. A healthy one also takes long for a
#: step in which it compiles a kernel, loads an adapter, exports a profile, or computes a large prompt on a CPU.
STANDSTILL_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """The present work of an engine.

    A foreign request is one that no router of the fleet has sent. running, waiting: numbers of requests.
    foreign_prefill_tokens: prompt tokens of foreign requests that are still to compute. foreign_decode_tokens: context
    tokens of decoding foreign requests. speed_tps: prefill tokens per second, 0 while not measured. steps: steps begun
    plus steps ended; None while the engine has no request to work on, or where its steps are not counted. paused: the
    engine is paused or asleep, and takes no new request. step_us: microseconds that a step takes however little it
    computes, 0 while not measured.
    """

    running: int = 0
    waiting: int = 0
    foreign_prefill_tokens: int = 0
    foreign_decode_tokens: int = 0
    speed_tps: int = 0
    steps: int | None = None
    paused: bool = False
    step_us: int = 0

    def differs_from(self, reported: Load) -> bool:
        """Tell whether the engine was paused or resumed since this was ``reported``, or its foreign load has moved.

        Foreign load has moved if it changed by a tenth or more, and by more than SMALL_TOKENS.
        """
        if self.paused != reported.paused:
            return True
        pairs = (
            (reported.foreign_prefill_tokens, self.foreign_prefill_tokens),
            (reported.foreign_decode_tokens, self.foreign_decode_tokens),
        )
        return any(abs(now - before) > max(before // 10, SMALL_TOKENS) for before, now in pairs)


class SmoothedLoad:
    """Raises foreign prefill to its recent mean, where that is more than the present amount.

    Most foreign prompts begin and end between two checks of the load, and more will come to this engine, because their
    clients do not ask the fleet. Foreign work cannot go to another engine; the fleet's own requests can, and should.
    """

    def __init__(self) -> None:
        self._mean, self._at = 0.0, -math.inf

    def smooth(self, load: Load, now: float) -> Load:
        """Return the ``load`` of ``now`` (monotonic seconds), its foreign prefill smoothed. Call it at every check."""
        tokens = load.foreign_prefill_tokens
        # At most two checks' time counts as passed, because in a longer gap the load is unknown.
        kept = math.exp(-min(now - self._at, 2 * LOAD_CHECK_SECONDS) / MEAN_SECONDS)
        most = REMEMBERED_WORK_SECONDS * (load.speed_tps or ASSUMED_TPS)
        self._mean, self._at = min(kept * self._mean + (1 - kept) * tokens, most), now
        mean = int(self._mean) if self._mean >= LEAST_TOKENS else 0
        return replace(load, foreign_prefill_tokens=max(tokens, mean))


class Standstill:
    """Notices that an engine has work and does nothing: its process lives, but a device or a lock holds it up."""

    def __init__(self) -> None:
        self._steps: int | None = None
        self._seconds, self._at = 0.0, -math.inf

    def look(self, load: Load, now: float) -> bool:
        """Tell whether no step began or ended for STANDSTILL_SECONDS, by ``load`` as it is ``now`` (monotonic seconds).

        Call it at every check of the load. At most two checks' time counts as passed: perhaps the caller had no CPU.
        """
        passed = min(now - self._at, 2 * LOAD_CHECK_SECONDS)
        stands = load.steps is not None and load.steps == self._steps
        self._seconds = self._seconds + passed if stands else 0.0
        self._steps, self._at = load.steps, now
        return self._seconds >= STANDSTILL_SECONDS
