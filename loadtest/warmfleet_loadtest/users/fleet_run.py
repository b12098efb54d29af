"""The run of a fleet: its counts, the processes that came and went, and whether its figures may be believed."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from warmfleet_loadtest.users.report_figures import ALL, by_name, figures, generator, split_figures
from warmfleet_loadtest.users.tally import Tally

WARM_UP = 0.1  # first share of the run, whose requests count only in sent, answered and failed
# Largest share of fallbacks: requests that a router sent on its own, because Redis did not answer in time. A run with
# more has failed, because it says little about decisions in Redis. On a crowded 2-core machine runs had 0 to 6 %, as
# Redis waited for a CPU longer than the routers wait for Redis.
FALLBACK_SHARE = 0.2
KILL_WINDOW_S = 3.0  # time after a kill in which connections may break: two health checks of 1 s, and retries
STOP_WINDOW_S = 6.0  # the same after a stop; a stopping engine gives its open requests some seconds
BUSY_SHARE = 0.8  # CPU share (of a core for one-thread programs, else of all cores) above which figures are doubtful


@dataclass(frozen=True, slots=True)
class Mark:
    """A process that was added or taken away. at_s: seconds from the begin. action: ``kill``, ``stop`` or ``add``."""

    at_s: float
    action: str
    name: str

    @property
    def text(self) -> str:
        return f"{self.name} {({'kill': 'killed', 'stop': 'stopped', 'add': 'added'})[self.action]}"

    @property
    def window_s(self) -> float:
        """The seconds after the event in which connections may break."""
        return {"kill": KILL_WINDOW_S, "stop": STOP_WINDOW_S}.get(self.action, 0.0)


@dataclass(frozen=True)
class FleetRun:
    """The results of a run against one fleet.

    summary: as Locust's process wrote it. sessions: connections per server behind haproxy. cpu_s: CPU seconds by kind
    of process. locust_status: Locust's exit status; 1 = requests failed. seconds: how long requests arrived. roles: of
    engines by name; empty without prefill engines. transfers: what these engines count of the blocks that they move.
    """

    fleet: str
    seconds: float
    summary: dict[str, Any]
    marks: tuple[Mark, ...] = ()
    sessions: dict[str, int] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    locust_status: int = 0
    roles: dict[str, str] = field(default_factory=dict)
    transfers: dict[str, float] = field(default_factory=dict)

    @cached_property
    def tally(self) -> Tally:
        return Tally.from_json(self.summary["tally"])

    @property
    def began(self) -> float:
        """Unix time of the begin."""
        return float(self.summary["plan"]["began"])

    @cached_property
    def figures(self) -> dict[str, dict[str, float]]:
        """Figures by kind of request, without the warm-up; ``sent``, ``answered``, ``failed``: of the whole run."""
        found = figures(self.tally, self.began + WARM_UP * self.seconds, self.began + self.seconds)
        whole = figures(self.tally, 0.0)
        return {
            kind: row | {name: whole[kind][name] for name in ("sent", "answered", "failed")}
            for kind, row in found.items()
        }

    @cached_property
    def split(self) -> dict[str, Any]:
        """Figures of split requests, without the warm-up in times; empty in a fleet without roles."""
        if not self.roles:
            return {}
        found = split_figures(self.tally, self.roles, self.began + WARM_UP * self.seconds, self.began + self.seconds)
        return found | {"transfers": self.transfers}

    @cached_property
    def generator(self) -> dict[str, Any]:
        return generator(self.tally, self.seconds)


def verdict(run: FleetRun) -> list[str]:
    """Return the reasons why this run has failed; empty if it has passed."""
    tally, total = run.tally, run.figures[ALL]
    problems = [f"request failed: {error}" for error in run.summary["errors"]]
    if total["failed"]:
        problems.append(f"{total['failed']} failures")
    if not total["answered"]:
        problems.append("no requests were answered")
    strays = [when - run.began for when, _ in tally.broken if not _excused(run, when - run.began)]
    if strays:
        seconds = ", ".join(f"{at:.1f}" for at in strays[:10])
        problems.append(f"{len(strays)} connections broke while nothing was taken away (second {seconds})")
    reservations = by_name(tally, "reservation")
    fallbacks, decided = reservations.get("fallback", 0), sum(reservations.values())
    if fallbacks > FALLBACK_SHARE * decided:
        problems.append(f"{fallbacks} of {decided} requests were routed without a decision (fallback)")
    added = [mark.name for mark in run.marks if mark.action == "add" and mark.name in run.sessions]
    problems += [f"the added {name} got no traffic" for name in added if not run.sessions[name]]
    wrong, violations = run.transfers.get("wrong_answers", 0), run.transfers.get("violations", 0)
    if wrong or violations:
        problems.append(
            f"split requests: {wrong:g} answers from wrong blocks, {violations:g} transfers asked for wrongly"
        )
    if run.locust_status != 0 and not problems:
        problems.append(f"Locust ended with {run.locust_status}")
    return problems


def _excused(run: FleetRun, at_s: float) -> bool:
    return any(mark.at_s <= at_s <= mark.at_s + mark.window_s for mark in run.marks)


def warnings(run: FleetRun) -> list[str]:
    """Return the reasons that make the figures doubtful, without failing the run."""
    found = []
    own = run.generator
    if own["was_busy"]:
        busy = f"its busiest process used {own['busiest_share']:.0%} of a core"
        found.append(f"the load generator was the limit: {busy}. Use --processes, or a lower --rate")
    elif own["was_late"]:
        late = f"requests were sent up to {own['late_p99_ms']:g} ms late (p99), which TTFT contains"
        found.append(f"{late}: other work kept the load generator from a core, of which it needed little")
    share = {kind: used / run.seconds for kind, used in run.cpu_s.items()}
    found += [
        f"{kind} was the limit: it used {share[kind]:.0%} of a core"
        for kind in ("haproxy", "store")  # each has a single thread, or nearly so
        if share.get(kind, 0.0) > BUSY_SHARE
    ]
    cores = os.cpu_count() or 1
    if sum(share.values()) > BUSY_SHARE * cores:
        found.append(f"the machine was the limit: {sum(share.values()):.2f} of {cores} cores were used by this test")
    if run.tally.fallbacks:
        seconds = ", ".join(f"{when - run.began:.0f}" for when in run.tally.fallbacks[:20])
        found.append(f"{len(run.tally.fallbacks)} answers without a decision (fallback), in second {seconds}")
    return found


HEAD = ("requests", "sent", "failed", "hit ratio", "TTFT mean", "p50", "p90", "p99", "gap p50", "p99")


def rows(run: FleetRun) -> list[tuple[str, ...]]:
    """Return a row of cells for each kind of request, with the columns of HEAD. Times are in ms."""
    ttft, gap = ("ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99"), ("gap_p50", "gap_p99")
    return [
        (
            *(kind, f"{row['sent']}", f"{row['failed']}", f"{row['hit_ratio']:.1%}"),
            *(f"{row[name]:.0f}" for name in ttft),
            *(f"{row[name]:g}" for name in gap),
        )
        for kind, row in run.figures.items()
    ]


def facts(run: FleetRun) -> list[tuple[str, str]]:
    """Return (name, text) of the facts that the table of figures leaves out."""
    tally, own = run.tally, run.generator
    breaks = by_name(tally, "broken")
    used = {kind: f"{kind} {seconds / run.seconds:.2f}" for kind, seconds in sorted(run.cpu_s.items())}
    late = f"requests sent late p50 {own['late_p50_ms']:g} ms, p99 {own['late_p99_ms']:g} ms"
    found = [
        ("rate", f"{run.figures[ALL]['sent'] / run.seconds:.2f} requests/s for {run.seconds:.0f} s"),
        ("servers", f"{_counts(run.sessions)} (connections; health checks not counted)"),
        (
            "broken",
            f"{breaks.get('retried', 0)} before an answer, {breaks.get('cut', 0)} in mid-stream; all sent again",
        ),
        ("cpu", f"{', '.join(used.values())} (cores)"),
        (
            "client",
            f"busiest process {own['busiest_share']:.0%} of a core, loop late p99 {own['lag_p99_ms']:g} ms, {late}",
        ),
    ]
    workers = by_name(tally, "worker")
    if workers:
        found.append(("workers", _counts(workers)))
        found.append(("decisions", _counts(by_name(tally, "reservation"))))
    found += _split_facts(run)
    if run.marks:
        found.append(("events", ", ".join(f"{mark.text} at {mark.at_s:.0f} s" for mark in run.marks)))
    return found


def _split_facts(run: FleetRun) -> list[tuple[str, str]]:
    """Return the facts about requests that two engines served; none in a fleet without roles."""
    if not run.roles:
        return []
    found = run.split
    ttft = {name: f"TTFT p50 {row['p50']:g} ms, p99 {row['p99']:g} ms" for name, row in found["ttft"].items()}
    engines: dict[str, dict[str, Any]] = found["engines"]
    steps = {
        part: {name: row[part] for name, row in engines.items() if part in (row["role"], "alone")}
        for part in ("prefill", "decode", "alone")
    }
    return [
        ("split", f"{found['split']} of {found['answered']} requests ({found['share']:.1%}), {ttft['split']}"),
        ("prefill", f"{_counts(steps['prefill'])} (first steps of split requests)"),
        ("decode", f"{_counts(steps['decode'])} (second steps)"),
        ("alone", f"{_counts(steps['alone'])} (requests not split), {ttft['alone']}"),
        ("transfers", _moved(run.transfers)),
    ]


def _moved(counts: dict[str, float]) -> str:
    """Return the text about blocks that engines moved. counts: those of the engines that ran at the end."""
    number = counts.get("transfers", 0)
    if not number:
        return "none"
    each = f"{counts['bytes'] / number / 1e6:.0f} MB and {1e3 * counts['seconds'] / number:.0f} ms each"
    return f"{number:g}, {each}; {counts['failed_transfers']:g} failed, {counts['recomputed']:g} prompts computed again"


def describe(run: FleetRun) -> str:
    """Return a summary of the run in a few lines."""
    table = [HEAD, *rows(run)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEAD))]
    lines = [f"{run.fleet} (times in ms; the first {WARM_UP:.0%} left out)"]
    for kind, *cells in table:
        lines.append("  ".join([kind.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]))
    return "\n".join([*lines, *(f"{name:<10}{text}" for name, text in facts(run))])


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{name} {times}" for name, times in found.items())
