"""Runs of a bench that share speeds: each case is played at the speed that keeps its engines busy as its load says.

The jobs of one place share a speed.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from warmfleet_loadtest.measuring.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence


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


def run_all(wanted: Sequence[J], processes: int) -> list[tuple[J, dict[str, float]]]:
    """Find the speed of each place, then run the jobs; return each with its speed, and its figures."""
    of_place: dict[Hashable, J] = {}
    for job in wanted:
        of_place.setdefault(job.place, job)
    with ProcessPoolExecutor(processes) as pool:
        spread: Callable[..., Iterable[Any]] = map if processes == 1 else pool.map
        found = _ticked("speeds", len(of_place), spread(_find_speed, of_place.values()))
        speeds = dict(zip(of_place, found, strict=True))
        jobs: list[J] = [replace(job, speed=speeds[job.place]) for job in wanted]  # type: ignore[type-var]
        return list(zip(jobs, _ticked("runs", len(jobs), spread(_run, jobs)), strict=True))


def _find_speed(job: Job) -> float:
    return job.find_speed()


def _run(job: Job) -> dict[str, float]:
    return job.run()


def _ticked(label: str, total: int, answers: Iterable[Any]) -> Iterable[Any]:
    progress = Progress(label, total)
    for answer in answers:
        progress.tick(failed=False)
        yield answer
