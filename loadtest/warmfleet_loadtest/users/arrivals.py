"""The arrivals of requests in an open loop, in five shapes.

In an open loop a request arrives when it is due, whether or not earlier ones are answered, as the requests of many
people do. In a closed loop a user waits for an answer before the next request, so a server that slows down gets fewer
requests, and its queue never shows.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BURST_PERIOD_S, BURST_S, BURST_FACTOR = 60.0, 10.0, 3.0  # each minute has ten s of three times the mean rate
RAMP_FROM, RAMP_TO = 0.2, 1.8  # first and last rate of a ramp, as multiples of the mean rate
DIURNAL_SWING = 0.8  # swing of the rate around its mean: from 0.2 to 1.8 times the mean and back, once in a run
ENDLESS_DAY_S = 600.0  # length of the "day" (and of the ramp) in a run without an end

#: Each shape in a few words, for ``--help``.
SHAPES = {
    "constant": "evenly spaced",
    "poisson": "independent of each other, so that some come close together; as from many people",
    "burst": f"poisson, with {BURST_FACTOR:.0f}x the rate for {BURST_S:.0f} s in every {BURST_PERIOD_S:.0f} s",
    "ramp": f"poisson, from {RAMP_FROM}x to {RAMP_TO}x the rate over the run",
    "diurnal": f"poisson, from {RAMP_FROM}x to {RAMP_TO}x the rate and back, as over a day",
}


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrivals of one source. rate: requests per second, the mean over the run. seconds: of the run; may be infinite.

    Equal seeds give equal times.
    """

    shape: str
    rate: float
    seconds: float
    seed: str = ""

    def times(self) -> Iterator[float]:
        """Yield seconds from the begin of the run, in order. Ends with the run."""
        source = random.Random(f"{self.seed} {self.shape} arrivals")
        gap = 1 / self.rate
        if self.shape == "constant":
            at = gap * source.random()  # so that several sources do not send at the same moments
            while at < self.seconds:
                yield at
                at += gap
            return
        factor, most = self._factor()
        at = 0.0
        while True:  # thinning: make arrivals at the highest rate, and keep each with probability rate / highest rate
            at += source.expovariate(most * self.rate)
            if at >= self.seconds:
                return
            if most * source.random() < factor(at):
                yield at

    def _factor(self) -> tuple[Callable[[float], float], float]:
        """Return (a function of the time: rate then / mean rate; the largest value of this function)."""
        day = self.seconds if math.isfinite(self.seconds) else ENDLESS_DAY_S
        if self.shape == "burst":
            between = (BURST_PERIOD_S - BURST_FACTOR * BURST_S) / (BURST_PERIOD_S - BURST_S)
            begin = (BURST_PERIOD_S - BURST_S) / 2
            return lambda at: BURST_FACTOR if begin <= at % BURST_PERIOD_S < begin + BURST_S else between, BURST_FACTOR
        if self.shape == "ramp":
            return lambda at: RAMP_FROM + (RAMP_TO - RAMP_FROM) * min(1.0, at / day), RAMP_TO
        if self.shape == "diurnal":
            return lambda at: 1 - DIURNAL_SWING * math.cos(2 * math.pi * at / day), 1 + DIURNAL_SWING
        return lambda _at: 1.0, 1.0
