"""The plan of a run: what the options of Locust's command line, or of its web page, ask for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from warmfleet_loadtest.traces.trace import open_trace
from warmfleet_loadtest.users.arrivals import SHAPES, Arrivals
from warmfleet_loadtest.users.sessions import SESSIONS

if TYPE_CHECKING:
    from argparse import Namespace

TRACE_KIND = "trace"
DEFAULT_MIX = ",".join(f"{kind}={made.share:g}" for kind, made in SESSIONS.items())
DEFAULT_RATE = 4.0  # requests per second
LEAD_S = 1.0  # time from the plan to the first arrival, in which all processes of a run get the plan
MOST_SLOTS = 600  # most intervals of a run for which figures are counted separately


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of a run, the same for all processes.

    mix: share of the requests by kind. rate: requests per second, all kinds and processes together. seconds: how long
    requests arrive; infinite = until stopped. sources: number per kind, one per process. began: Unix time of the begin.
    """

    mix: dict[str, float]
    shape: str
    rate: float
    seconds: float
    seed: str
    sources: int
    began: float

    def arrivals(self, kind: str, source: str) -> Arrivals:
        """Return the arrivals of a source of this kind. source: its name, which no other source has."""
        rate = self.rate * self.mix[kind] / sum(self.mix.values()) / self.sources
        return Arrivals(self.shape, rate, self.seconds, f"{self.seed} {kind} {source}")

    @property
    def slot_s(self) -> float:
        """Length in seconds of the intervals for which figures are counted separately."""
        return max(1.0, math.ceil(self.seconds / MOST_SLOTS)) if math.isfinite(self.seconds) else 10.0


def plan_of(options: Namespace, chosen: set[str] | None = None, sources: int = 1, began: float = 0.0) -> Plan:
    """Make the plan that the options ask for. chosen: kinds to use, None = all. Raises ValueError."""
    mix = {TRACE_KIND: 1.0} if options.trace else mix_of(options.mix)
    kept = {kind: share for kind, share in mix.items() if chosen is None or kind in chosen}
    if not kept:
        raise ValueError(f"none of the chosen users has a share in --mix {options.mix!r}: name one there")
    if options.trace:
        try:
            open_trace(options.trace, 1)  # the first request tells the format; a run opens the whole trace
        except (OSError, ValueError) as error:
            raise ValueError(f"--trace {options.trace!r}: {error}") from error
    if options.arrivals not in SHAPES:
        raise ValueError(f"--arrivals {options.arrivals!r}: choose one of {', '.join(SHAPES)}")
    if not (0 < options.rate < math.inf):
        raise ValueError(f"--rate {options.rate}: a number of requests per second above 0")
    if options.seconds < 0 or options.speed <= 0:
        raise ValueError("--seconds from 0 on (0: until stopped), --speed above 0")
    seconds = options.seconds or math.inf
    return Plan(kept, options.arrivals, options.rate, seconds, str(options.seed), sources, began)


def mix_of(text: str) -> dict[str, float]:
    """Return the shares by kind that a text such as ``chat=4,rag=3`` names, without shares of 0. Raises ValueError."""
    mix: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        kind, _, share = part.partition("=")
        try:
            mix[kind] = float(share or 1)
        except ValueError:
            mix[kind] = -1.0
        if kind not in SESSIONS or not 0 <= mix[kind] < math.inf:
            raise ValueError(f"--mix {part!r}: write KIND=PARTS, such as {DEFAULT_MIX}; kinds: {', '.join(SESSIONS)}")
    kept = {kind: share for kind, share in mix.items() if share}
    if not kept:
        raise ValueError(f"--mix {text!r} names no kind with a part above 0: write for instance {DEFAULT_MIX}")
    return kept
