"""The begin and the end of a run with Locust, and the sum of the counts of its processes.

With ``--processes N`` the master only sums and shows counts: N workers send the requests, each 1/N of the rate.
"""

from __future__ import annotations

import logging
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gevent
import orjson
import psutil
from flask import request
from locust import LoadTestShape
from locust.runners import MasterRunner, WorkerRunner

from warmfleet_loadtest.traces.trace import open_trace
from warmfleet_loadtest.users.arrivals import SHAPES
from warmfleet_loadtest.users.plan import DEFAULT_MIX, DEFAULT_RATE, LEAD_S, plan_of
from warmfleet_loadtest.users.report_figures import figures
from warmfleet_loadtest.users.sources import Run

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from warmfleet_loadtest.users.plan import Plan

SUMMARY_S = 2.0  # time between two writings of the summary
WATCH_S = 0.25  # time between two measurements of a process's CPU time and event loop lag
FINISH = "warmfleet-finish"  # name of the message by which the master tells its workers to begin no further request
TAB = "warmfleet"
COLUMNS = {
    "kind": "Requests",
    "sent": "Sent",
    "failed": "Failed",
    "hit": "Prompt tokens from caches, %",
    "ttft50": "TTFT p50, ms",
    "ttft90": "TTFT p90, ms",
    "ttft99": "TTFT p99, ms",
    "gap50": "Inter-token gap p50, ms",
    "gap99": "Inter-token gap p99, ms",
}

log = logging.getLogger("warmfleet.loadtest")


class OpenLoop(LoadTestShape):
    """Starts one Locust user of each kind in every process, and ends the run when the last request is answered."""

    def tick(self) -> tuple[int, float, list[Any]] | None:
        """Return the number and classes of users that should run; None ends the run. Locust asks every second."""
        runner: Any = self.runner
        if runner.shape_last_tick is None:  # the first call in this run
            return self._begin(runner)
        users: tuple[int, float, list[Any]] = runner.shape_last_tick
        return users if runner.environment.conductor.busy else None

    def _begin(self, runner: Any) -> tuple[int, float, list[Any]] | None:
        environment, options = runner.environment, runner.environment.parsed_options
        options.plan_sources = runner.worker_count if isinstance(runner, MasterRunner) else 1
        options.plan_began = time.time() + LEAD_S
        try:
            plan = environment.conductor.plan()
        except ValueError as error:  # of the web page's options; ``prepare`` checks those of the command line
            log.error("%s", error)  # noqa: TRY400  # the sentence says all
            return None
        classes = [user for user in environment.user_classes if user.kind in plan.mix]
        users = len(classes) * options.plan_sources
        return users, users, classes


class Conductor:
    """Conducts the run in one process: Locust's master, a worker, or the only one. The environment keeps the ``Run``.

    Raises ValueError if the options make no sense, or if their trace cannot be read to its end.
    """

    def __init__(self, environment: Any) -> None:
        self._environment, options = environment, environment.parsed_options
        self._runner = environment.runner
        self._busy_workers: dict[str, bool] = {}
        environment.conductor = self
        environment.warmfleet = Run(self.plan())
        if options.trace:
            open_trace(options.trace, options.rows or None)  # a source that cannot read the trace would never end
        events = environment.events
        events.test_start.add_listener(self._begin)
        gevent.spawn(self._watch)
        if isinstance(self._runner, WorkerRunner):
            events.report_to_master.add_listener(self._report)
            self._runner.register_message(FINISH, self._finish)
            return
        if isinstance(self._runner, MasterRunner):
            events.worker_report.add_listener(self._reported)
        events.quitting.add_listener(self._write)
        gevent.spawn(self._keep_writing)
        gevent.signal_handler(signal.SIGUSR1, self._finish)
        if environment.web_ui is not None:
            self._extend(environment.web_ui)

    def plan(self) -> Plan:
        """Return the plan that the options ask for now. Raises ValueError."""
        options, kinds = self._environment.parsed_options, {user.kind for user in self._environment.user_classes}
        sources, began = getattr(options, "plan_sources", 1), getattr(options, "plan_began", 0.0)
        return plan_of(options, kinds, sources, began or time.time())

    @property
    def run(self) -> Run:
        """The present run."""
        found: Run = self._environment.warmfleet
        return found

    @property
    def busy(self) -> bool:
        """True if any process has requests to send or to finish."""
        if not isinstance(self._runner, MasterRunner):
            return self.run.busy
        return any(self._busy_workers.get(client.id, True) for client in self._runner.clients.all)

    def _begin(self, **_: object) -> None:
        plan = self.plan()
        self._environment.warmfleet = Run(plan)
        self.run.tally.clear(plan.slot_s)
        self._busy_workers.clear()

    def _finish(self, **_: object) -> None:
        """Begin no further request, here and in all workers."""
        self.run.ended = True
        if isinstance(self._runner, MasterRunner):
            self._runner.send_message(FINISH)

    # ------------------------------------------------ between the processes

    def _report(self, client_id: str, data: dict[str, Any]) -> None:  # noqa: ARG002  # Locust's signature
        data["tally"] = self.run.tally.take()
        data["busy"] = self.run.busy

    def _reported(self, client_id: str, data: dict[str, Any]) -> None:
        self.run.tally.add(data["tally"])
        self._busy_workers[client_id] = data["busy"]

    # ------------------------------------------------ watching and writing

    def _watch(self) -> None:
        """Count this process's CPU time, and how late its event loop is."""
        process = psutil.Process()
        used = sum(process.cpu_times()[:2])
        while True:
            before = time.perf_counter()
            gevent.sleep(WATCH_S)
            late, now_used = time.perf_counter() - before - WATCH_S, sum(process.cpu_times()[:2])
            self.run.tally.watched(self._name(), now_used - used, late, time.time())
            used = now_used

    def _name(self) -> str:
        """Return the name of this process; a worker learns its number from the master."""
        if isinstance(self._runner, WorkerRunner):
            return f"worker {self._runner.worker_index + 1}"
        return "master" if isinstance(self._runner, MasterRunner) else "locust"

    def _keep_writing(self) -> None:
        while True:
            gevent.sleep(SUMMARY_S)
            self._write()

    def _write(self, **_: object) -> None:
        """Write the summary: the plan, all counts, and the errors."""
        target = self._environment.parsed_options.summary
        if not target:
            return
        errors = self._environment.stats.errors.values()
        found = {
            "plan": asdict(self.run.plan),
            "tally": self.run.tally.as_json(),
            "errors": [f"{error.occurrences} x {error.name}: {error.error}" for error in errors],
        }
        path = Path(target)
        part = path.with_suffix(".part")
        part.write_bytes(orjson.dumps(found))
        part.replace(path)  # a reader never sees half a summary

    def _extend(self, web_ui: Any) -> None:
        """Add a page of our own to Locust's web pages, for the figures that its statistics lack."""
        structure = [{"key": name, "title": title} for name, title in COLUMNS.items()]
        web_ui.template_args |= {
            "extended_tabs": [{"title": "Cache and tokens", "key": TAB}],
            "extended_tables": [{"key": TAB, "structure": structure}],
        }

        def add_rows(response: Any) -> Any:
            if request.path.endswith("/stats/requests") and response.is_json:
                rows = [{"key": TAB, "data": table(figures(self.run.tally, 0.0))}]
                response.set_data(orjson.dumps({**response.json, "extended_stats": rows}))
            return response

        web_ui.app.after_request(add_rows)


def table(found: dict[str, dict[str, float]]) -> list[dict[str, object]]:
    """Return the rows of the page "Cache and tokens", by the keys of COLUMNS."""
    return [
        {
            "kind": kind,
            "sent": row["sent"],
            "failed": row["failed"],
            "hit": round(100 * row["hit_ratio"], 1),
            "ttft50": row["ttft_p50"],
            "ttft90": row["ttft_p90"],
            "ttft99": row["ttft_p99"],
            "gap50": row["gap_p50"],
            "gap99": row["gap_p99"],
        }
        for kind, row in found.items()
    ]


def prepare(environment: Any, **_: object) -> None:
    """Make this process ready for runs. Ends it with status 2 if the options make no sense."""
    try:
        Conductor(environment)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def listen(events: Any) -> None:
    """Let this module take part in Locust's run."""
    events.init_command_line_parser.add_listener(add_options)
    events.init.add_listener(prepare)


def add_options(parser: ArgumentParser | Any) -> None:
    """Add our options to Locust's command line; all but the summary are on its web page, too."""
    shapes = "; ".join(f"{name}: {text}" for name, text in SHAPES.items())
    add = parser.add_argument
    add(
        "--rate", type=float, default=DEFAULT_RATE,
        help="requests per second of all kinds and processes, whether or not earlier ones are answered (%(default)s)",
    )  # fmt: skip
    add("--arrivals", choices=list(SHAPES), default="poisson", help=f"when they arrive (%(default)s). {shapes}")
    add("--seconds", type=float, default=60.0, help="of arrivals; 0 = until stopped (%(default)s)")
    add("--mix", default=DEFAULT_MIX, help="parts of the requests by kind (%(default)s)")
    add("--seed", default="1", help="equal seeds give equal arrivals and texts (%(default)s)")
    add("--trace", default="", help="play a trace instead of the mix: conversation, agents or a file")
    add("--speed", type=float, default=6.0, help="of the trace: its seconds per second (%(default)s)")
    add("--rows", type=int, default=0, help="of the trace: play only the first ones; 0 = all (%(default)s)")
    add(
        "--summary", default="", include_in_web_ui=False,
        help="a JSON file that gets all counts, every few seconds and at the end",
    )  # fmt: skip
