"""How much prefill engines are given ahead: enough that they never idle, and that their steps are worth their time.

An engine idles if the next prompt is still on its way when it has computed what it was sent. The way is a decision,
HTTP, and the engine's own work before it begins to compute. A request that finds an engine with nothing to do shows it:
it is what its first byte takes longer than its prefill does at the engine's speed. The median of the last ones counts:
steps of running answers and a busy machine delay some of them, and an engine that is short of work waits as long.

An engine computes all prompts that wait in one step, and each step takes some time however little it computes. With
one small prompt in each step, that time is a large share of all. Engines measure it and tell the fleet. The more work
waits, the more of it may be in a step: whoever waits long loses little by waiting in the engine.
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

SAMPLES = 32  # the last so many requests are looked at
LOOK_EACH = 8  # requests, from one look at them to the next
LONGEST_PREFILL_S = 0.2  # of a longer one a wrong speed tells more than the way
WAYS = 2  # a request that is on its way counts as ahead, too: while the engine computes another one
STEPS = 16  # of the least duration: what is in a step then takes so many times as long as the step itself
MOST_STEPS, WAITING_SHARE = 64, 0.5  # while much waits: up to so many, and so large a part of the work that waits
MARGIN_S = 0.01  # from the moment in which it is a request's turn until its replica has asked for it
STEP_S = 0.01  # in which the limit changes, so that it does not follow every sample
MOST_S = 0.5  # of way or steps: a longer way is an engine in trouble, and more ahead would leave no order


class EngineLeadTime:
    """The prefill that engines of one model get ahead, by what this replica's requests show and by the engines' steps.

    Raises ``max_engine_wait_s`` of its fleet while that is too little, but not above ``objective_s`` (0: none).
    """

    def __init__(self, fleet: Fleet, objective_s: float) -> None:
        self._fleet = fleet
        self._most_s = min(MOST_S, objective_s or math.inf)
        self._set_s: float | None = None  # the limit as the operator set it, once it was raised
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._seen = 0
        self._way_s = self._step_s = self._waiting_s = 0.0

    def first_byte(self, decision: Decision, speed_tps: int, took_s: float) -> None:
        """A stream's first byte came. took_s: since its decision was asked for. speed_tps: 0 if it is not known."""
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
        """A reading tells how long the engines' steps take at least; 0: nobody knows it."""
        if step_s != self._step_s:
            self._step_s = step_s
            self._set_limit()

    def waiting(self, work_s: float) -> None:
        """A look at the queue tells how many seconds the whole fleet needs for the prompts that wait."""
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
