"""The load of an engine, as its heartbeat reports it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

LOAD_CHECK_SECONDS = 0.25  # time between two readings of the engine's load
SMALL_TOKENS = 256  # largest change of foreign load that always waits for the next heartbeat
MEAN_SECONDS = 2.0  # time constant of the mean of foreign prefill; 1 and 4 s were measured and are worse
REMEMBERED_WORK_SECONDS = 1.0  # most work of the engine that the mean is, or an idle engine looks saturated
ASSUMED_TPS = 10_000  # tokens per second of an engine that has not been measured yet
LEAST_TOKENS = 32  # least mean of foreign prefill that counts; a smaller one is reported as 0
#: A core that has work makes no step for long also while it compiles a kernel, loads an adapter, exports a profile, or
#: computes a large prompt on a CPU. To leave it too early costs its requests; to leave it late costs only waiting.
STANDSTILL_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Load:
    """The present work of an engine.

    running, waiting: requests. foreign_prefill_tokens: tokens that foreign requests have still to compute.
    foreign_decode_tokens: context tokens of decoding foreign requests. speed_tps: prefill tokens per second, 0 while
    not measured. A foreign request is one that no router of the fleet has sent. steps: how many steps the engine has
    begun or ended; None while it has no request to work on, or where nobody counts. paused: somebody has paused the
    engine or put it to sleep: it takes no new request until that ends. step_us: how long a step takes however little it
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

    Most foreign prompts begin and end between two looks, and more of them will come to this engine, because their
    clients do not ask the fleet. That work cannot go to another engine; the fleet's own requests can, and should.
    """

    def __init__(self) -> None:
        self._mean, self._at = 0.0, -math.inf

    def smooth(self, load: Load, now: float) -> Load:
        """Return the ``load`` of ``now`` (monotonic seconds), its foreign prefill smoothed. Call it at every look."""
        tokens = load.foreign_prefill_tokens
        # After a gap without looks the past keeps the weight of two looks: nothing is known of the gap.
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

        Call it at every look. A gap without looks counts as two: the thread that looks may have had no CPU either.
        """
        passed = min(now - self._at, 2 * LOAD_CHECK_SECONDS)
        stands = load.steps is not None and load.steps == self._steps
        self._seconds = self._seconds + passed if stands else 0.0
        self._steps, self._at = load.steps, now
        return self._seconds >= STANDSTILL_SECONDS
