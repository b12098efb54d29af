"""Sets how much prefill may be booked at an engine in advance: enough that engines never idle or compute tiny steps.

An engine idles if it has computed all its prompts while the next prompt is still on its way there. The latency of that
way is the time for a decision, for HTTP, and for the engine's own work before it computes. A request to an idle engine
measures it: the time until its first byte, less the time of its prefill at the engine's speed. The median of the last
samples counts, because steps of running answers and a busy machine delay some requests.

An engine computes all waiting prompts in one step, and each step has a least duration however little it computes. With
one small prompt in each step, that duration is a large share of the time. Engines measure and report the duration. The
more work waits, the more may be in a step, because a request that waits long loses little if it waits in the engine.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warmfleet.fleet import Decision, Fleet

logger = logging.getLogger("warmfleet.pools.engine_lead_time")

SAMPLES = 32  # number of the last latency samples that count
LOOK_EACH = 8  # number of samples after which the limit is computed again
LONGEST_PREFILL_S = 0.2  # longest prefill of a sample: with a longer one an error of the speed outweighs the latency
WAYS = 2  # least limit, in latencies from router to engine: an engine computes one prefill while the next request comes
STEPS = 16  # and at least this many least durations of an engine step, so that full steps make it a small share
MOST_STEPS, WAITING_SHARE = 64, 0.5  # and at least half of the queue's work, or 64 such durations if that is less
MARGIN_S = 0.01  # time from a ticket's turn until its replica asks for the decision
STEP_S = 0.01  # unit in which the limit changes, so that it does not follow every sample
MOST_S = 0.5  # highest limit: a longer latency means an engine in trouble; a higher limit would undo the queue's order


class EngineLeadTime:
    """Computes how many seconds of prefill may be booked at an engine, by this replica's latency and engine step times.

    While ``max_engine_wait_s`` of the fleet is too low, this sets it higher, to ``objective_s`` at most (0: no bound).
    """

    def __init__(self, fleet: Fleet, objective_s: float) -> None:
        self._fleet = fleet
        self._most_s = min(MOST_S, objective_s or math.inf)
        self._set_s: float | None = None  # the limit that the operator set; None until it was raised
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._seen = 0
        self._way_s = self._step_s = self._waiting_s = 0.0

    def first_byte(self, decision: Decision, speed_tps: int, took_s: float) -> None:
        """Take a latency sample. took_s: from the request for a decision to the first byte. speed_tps: 0: not known."""
        if decision.wait_tokens or decision.flagged or decision.approximate or not speed_tps:
            return
        prefill_s = decision.prefill_tokens / speed_tps
        if prefill_s > LONGEST_PREFILL_S:
            return
        self._samples.append(max(0.0, took_s - prefill_s))
        self._seen += 1
        if self._seen % LOOK_EACH == 0:
            self._way_s = statistics.median(self._samples)
            self._set_limit()

    def steps(self, step_s: float) -> None:
        """Take the least duration of the engines' steps, from a reading of the fleet; 0: not known."""
        if step_s != self._step_s:
            self._step_s = step_s
            self._set_limit()

    def waiting(self, work_s: float) -> None:
        """Take the seconds that the whole fleet needs for the prompts in the queue."""
        if self._step_s and work_s != self._waiting_s:
            self._waiting_s = work_s
            self._set_limit()

    def _set_limit(self) -> None:
        limits = self._fleet.constants.limits
        if not limits.max_engine_wait_s:
            return  # there is no queue
        set_s = limits.max_engine_wait_s if self._set_s is None else self._set_s
        step_s = self._step_s
        needed_s = max(
            WAYS * self._way_s + MARGIN_S, STEPS * step_s, min(WAITING_SHARE * self._waiting_s, MOST_STEPS * step_s)
        )
        wanted_s = max(set_s, min(STEP_S * math.ceil(needed_s / STEP_S), self._most_s))
        if wanted_s == limits.max_engine_wait_s:
            return
        self._set_s = set_s
        self._fleet.use(limits=replace(limits, max_engine_wait_s=wanted_s))
        logger.debug(
            "%s: requests need %.0f ms to engines, whose steps take at least %.0f ms; %.2f s of prefill are ahead",
            self._fleet.keys.tag, 1e3 * self._way_s, 1e3 * self._step_s, wanted_s,
        )  # fmt: skip
