"""Runs of a bench that share speeds: each case is played at the speed that keeps its engines busy as its load says.

The jobs of one place share a speed.
"""

from __future__ import annotations

import json
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tests.bench.virtual_plots import drawn

from warmfleet.errors import WarmfleetError
from warmfleet_loadtest.measuring.figures import markdown
from warmfleet_loadtest.measuring.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
    from pathlib import Path


class Job(Protocol):
    """A run, as plain values (a dataclass) that another process can read. speed: 0 while it is not known."""

    @property
    def place(self) -> Hashable: ...

    @property
    def speed(self) -> float: ...

    def find_speed(self) -> float:
        """Return the speed of its place."""

    def run(self) -> dict[str, float]:
        """Return the figures of this run at its speed."""


J = TypeVar("J", bound=Job)
P = TypeVar("P", bound="Hashable")
R = TypeVar("R")


def run_all(wanted: Sequence[J], processes: int, kept: Path | None = None) -> list[tuple[J, dict[str, float]]]:
    """Find the speed of each place, then run the jobs; return each with its speed, and its figures.

    kept: a file of runs, a line of JSON each. Jobs that it has are not run; others are added as they end.
    """
    of_place: dict[Hashable, J] = {}
    for job in wanted:
        of_place.setdefault(job.place, job)
    with ProcessPoolExecutor(processes) as pool:
        spread: Callable[..., Iterable[Any]] = map if processes == 1 else pool.map
        found = _ticked("speeds", len(of_place), spread(_find_speed, of_place.values()))
        speeds = dict(zip(of_place, found, strict=True))
        jobs: list[J] = [replace(job, speed=speeds[job.place]) for job in wanted]  # type: ignore[type-var]
        known = dict(map(json.loads, kept.read_text().splitlines())) if kept and kept.exists() else {}
        todo = [job for job in jobs if repr(job) not in known]
        for job, figures in zip(todo, _ticked("runs", len(todo), spread(_run, todo)), strict=True):
            known[repr(job)] = figures
            if kept:
                with kept.open("a") as file:
                    file.write(json.dumps([repr(job), figures]) + "\n")
        return [(job, known[repr(job)]) for job in jobs]


def means(
    wanted: Sequence[J], processes: int, place: Callable[[J], P], kept: Path | None = None
) -> list[tuple[P, dict[str, float]]]:
    """Run the jobs; return the figures of each place in the bench's table, as means over its seeds."""
    found: dict[P, list[dict[str, float]]] = {}
    for job, result in run_all(wanted, processes, kept):
        found.setdefault(place(job), []).append(result)
    return [
        (where, {name: round(statistics.fmean(run[name] for run in runs), 4) for name in runs[0]})
        for where, runs in found.items()
    ]


def table(heads: Sequence[str], names: Sequence[str], rows: Iterable[tuple[Sequence[str], Mapping[str, float]]]) -> str:
    """Return a Markdown table of rows. heads: of the cells that tell the place. names: of the figures behind them."""
    cells = [(*where, *(f"{figures[name]:.3f}" for name in names)) for where, figures in rows]
    return markdown((*heads, *names), cells)


def report(
    measured: Callable[[], Sequence[R]],
    table: Callable[[Sequence[R]], str],
    told: Callable[[Sequence[R]], Any],
    draw: Callable[[Sequence[R]], None] | None = None,
) -> int:
    """Print the table of what is measured, and the JSON object that is told of it; draw it if asked.

    Returns the exit code: 0 done, 1 no trace, nothing to draw, or a script that fails.
    """
    try:
        rows = measured()
    except (OSError, ValueError, WarmfleetError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(rows), file=sys.stderr, flush=True)
    print(json.dumps(told(rows)), flush=True)
    return drawn(lambda: draw(rows)) if draw else 0


def _find_speed(job: Job) -> float:
    return job.find_speed()


def _run(job: Job) -> dict[str, float]:
    return job.run()


def _ticked(label: str, total: int, answers: Iterable[Any]) -> Iterable[Any]:
    progress = Progress(label, total)
    for answer in answers:
        progress.tick(failed=False)
        yield answer
