"""The counts of a run for which Locust's own statistics have no column.

Every count belongs to an interval of the run (a slot), so that reports can plot counts over time and leave out the
warm-up. Durations are kept as counts per rounded value. So a tally grows with the length of the run, not with its
requests, and the tallies of several processes can be added up.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from warmfleet_loadtest.users.streaming import Answer

SEPARATOR = "|"
MOST_EVENTS = 1_000  # most broken connections, and most fallbacks, that are kept with their times


@dataclass(frozen=True, slots=True)
class Timing:
    """The times of a request, in seconds from when it was due: to its sending, its first token and its end."""

    late_s: float
    ttft_s: float
    total_s: float


@dataclass(slots=True)
class Tally:
    """Counters for each slot of ``slot_s`` seconds. broken, fallbacks: the first MOST_EVENTS, with their Unix times."""

    slot_s: float = 1.0
    slots: defaultdict[int, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    broken: list[tuple[float, str]] = field(default_factory=list)
    fallbacks: list[float] = field(default_factory=list)

    # ------------------------------------------------ counting

    def slot(self, now: float) -> Counter[str]:
        """Return the counters of the slot that contains a Unix time."""
        return self.slots[int(now // self.slot_s)]

    def sent(self, kind: str, now: float) -> None:
        self.slot(now)[key("sent", kind)] += 1

    def answered(self, kind: str, answer: Answer, timing: Timing, now: float) -> None:
        counts = self.slot(now)
        counts[key("answered", kind)] += 1
        counts[key("prompt", kind)] += answer.prompt_tokens
        counts[key("cached", kind)] += answer.cached_tokens
        counts[key("output", kind)] += answer.output_tokens
        counts[key("ttft", kind, milliseconds(timing.ttft_s, 3))] += 1
        counts[key("total", kind, milliseconds(timing.total_s, 3))] += 1
        counts[key("late", kind, milliseconds(timing.late_s, 2))] += 1
        for gap_s in answer.gaps_s:
            counts[key("gap", kind, milliseconds(gap_s, 2))] += 1
        worker = answer.headers.get("x-warmfleet-worker")
        if worker:
            counts[key("worker", worker)] += 1
            reservation = answer.headers.get("x-warmfleet-reservation", "none")
            counts[key("reservation", reservation)] += 1
            if reservation == "fallback" and len(self.fallbacks) < MOST_EVENTS:
                self.fallbacks.append(now)
        prefill_worker = answer.headers.get("x-warmfleet-prefill-worker")
        if prefill_worker:  # the request was split: this engine computed the prompt, ``worker`` made the answer
            counts[key("prefill", prefill_worker)] += 1
            counts[key("decode", worker)] += 1
            counts[key("split_ttft", kind, milliseconds(timing.ttft_s, 3))] += 1

    def failed(self, kind: str, now: float) -> None:
        self.slot(now)[key("failed", kind)] += 1

    def broke(self, kind: str, now: float) -> None:
        """Count a broken connection. kind: ``retried`` or ``cut`` (see ``streaming.Broken``)."""
        self.slot(now)[key("broken", kind)] += 1
        if len(self.broken) < MOST_EVENTS:
            self.broken.append((now, kind))

    def watched(self, process: str, cpu_s: float, lag_s: float, now: float) -> None:
        """Count a load generator process's CPU time since the last call, and how late its event loop is."""
        counts = self.slot(now)
        counts[key("cpu", process)] += round(1e6 * cpu_s)
        counts[key("lag", process, milliseconds(lag_s, 2))] += 1

    # ------------------------------------------------ adding up

    def clear(self, slot_s: float) -> None:
        """Begin anew, with slots of this length."""
        self.slot_s = slot_s
        self.slots.clear()
        self.broken.clear()
        self.fallbacks.clear()

    def take(self) -> dict[str, Any]:
        """Return all counts since the last ``take``, and begin anew."""
        taken = self.as_json()
        self.clear(self.slot_s)
        return taken

    def as_json(self) -> dict[str, Any]:
        return {
            "slot_s": self.slot_s,
            "slots": {str(number): dict(counts) for number, counts in self.slots.items()},
            "broken": list(self.broken),
            "fallbacks": list(self.fallbacks),
        }

    def add(self, other: dict[str, Any]) -> None:
        """Add the counts of another process."""
        for number, counts in other["slots"].items():
            self.slots[int(number)].update(counts)
        self.broken += [(when, kind) for when, kind in other["broken"][: MOST_EVENTS - len(self.broken)]]
        self.fallbacks += other["fallbacks"][: MOST_EVENTS - len(self.fallbacks)]

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Tally:
        made = cls(found["slot_s"])
        made.add(found)
        return made

    # ------------------------------------------------ figures

    def kinds(self) -> list[str]:
        """Return the kinds of which a request was sent."""
        return sorted({name.split(SEPARATOR)[1] for name in self.total() if name.startswith("sent|")})

    def total(self, since: float = 0.0, until: float = float("inf")) -> Counter[str]:
        """Sum up the counters of all slots that begin between two Unix times."""
        added: Counter[str] = Counter()
        for number, counts in self.slots.items():
            if since <= number * self.slot_s < until:
                added.update(counts)
        return added


def key(*parts: object) -> str:
    return SEPARATOR.join(map(str, parts))


def milliseconds(seconds: float, digits: int) -> str:
    """Write seconds as milliseconds with ``digits`` significant digits."""
    return f"{float(f'{1e3 * max(0.0, seconds):.{digits}g}'):g}"


def count(counts: Counter[str], name: str, kinds: Iterable[str]) -> int:
    """Return the sum of a counter over these kinds."""
    return sum(counts[key(name, kind)] for kind in kinds)


def distribution(counts: Counter[str], name: str, kinds: Iterable[str]) -> list[tuple[float, int]]:
    """Return the values in ms of these kinds, sorted, each with how often it occurred."""
    wanted, found = {(name, kind) for kind in kinds}, Counter[float]()
    for full, times in counts.items():
        parts = full.split(SEPARATOR)
        if len(parts) == 3 and (parts[0], parts[1]) in wanted:
            found[float(parts[2])] += times
    return sorted(found.items())


def quantile(values: Iterable[tuple[float, int]], share: float) -> float:
    """Return the quantile of a sorted distribution; 0 if it is empty."""
    known = list(values)
    left = share * sum(times for _, times in known)
    for value, times in known:
        left -= times
        if left < 0:
            return value
    return known[-1][0] if known else 0.0


def mean(values: Iterable[tuple[float, int]]) -> float:
    """Return the mean of a distribution; 0 if it is empty."""
    known = list(values)
    whole = sum(times for _, times in known)
    return sum(value * times for value, times in known) / whole if whole else 0.0
