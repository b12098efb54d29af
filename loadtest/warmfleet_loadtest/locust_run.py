"""`make loadtest`: a local fleet under open-loop load by Locust, while replicas and engines come and go.

    make loadtest                                                      # 2 minutes: 3 replicas, 8 simulated engines
    make loadtest ARGS="--compare"                                     # and the same with session affinity, no router
    make loadtest ARGS="--compare --duration 300 --rate 8"             # the run whose figures loadtest/README.md has
    make loadtest ARGS="--arrivals burst --rate 6"                     # constant, poisson, burst, ramp, diurnal
    make loadtest ARGS="--mix chat=1 --events none"                    # conversations only, and nothing comes or goes
    make loadtest ARGS="--trace agents --duration 120"                 # a trace instead of generated sessions
    make loadtest ARGS="--prefill 2"                                   # two of the engines compute prompts of others
    make loadtest ARGS="--web"                                         # Locust's web page instead of a timed run
    make loadtest ARGS="--rate 100 --processes 2 --step-time fast"     # Locust in two processes

It starts a store, simulated engines, replicas of the router and haproxy, all on this machine, drives them with
loadtest/locustfile.py (which also runs against any other address), and stops everything at the end. By default a
replica is killed and another one is started, and an engine joins and another one is stopped. The folder --out gets
report.html (figures, and plots in which these events are marked), the plots, Locust's own reports and figures.json.

A SIGKILL cuts the streams that ran through the killed replica. A TCP balancer cannot mend that, so clients send such a
request again, as the OpenAI clients do. The run passes if no request failed, if connections broke only within
KILL_WINDOW_S after something was taken away, if the added replica was used, and if few answers were routed without a
shared decision. Exit codes: 0 passed, 1 failed, 2 the run could not be made.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from warmfleet_loadtest.stacks.locust_stack import AFFINITY, WARMFLEET, LocustStack, Size
from warmfleet_loadtest.stacks.processes import StackError, answers, end_on_signals, free_ports
from warmfleet_loadtest.users.arrivals import SHAPES
from warmfleet_loadtest.users.fleet_run import KILL_WINDOW_S, FleetRun, Mark, describe, verdict, warnings
from warmfleet_loadtest.users.html_report import save_report
from warmfleet_loadtest.users.plan import DEFAULT_MIX, DEFAULT_RATE, plan_of
from warmfleet_loadtest.users.report_figures import ALL, figures
from warmfleet_loadtest.users.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Sequence

LOCUSTFILE = Path(__file__).parents[1] / "locustfile.py"
EVENTS = "20:add engine,35:kill replica,50:add replica,70:stop engine"
ACTIONS = ("add", "kill", "stop")
KINDS = ("replica", "engine")
FINISH_S = 200.0  # longest time for Locust's last requests and its report; a request has three tries of 60 s
LATE_S = 60.0  # longest time by which a run goes on until each added process has had its first request
POLL_S = 0.2
LOOK_S, TERMINAL_LOOK_S = 10.0, 1.0  # times between progress lines, in a file and on a terminal


@dataclass(frozen=True, slots=True)
class Event:
    """A process that comes or goes. share: of the run's duration, 0 to 1. action: of ACTIONS. kind: of KINDS."""

    share: float
    action: str
    kind: str


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 passed, 1 failed, 2 the run could not be made."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        events = events_of(options.events)
        _check_roles(options)
        plan_of(_locust_options(options))
    except ValueError as error:
        parser.error(str(error))
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        if options.web:
            return _web(options)
        runs = [_run(fleet, options, events) for fleet in ((WARMFLEET, AFFINITY) if options.compare else (WARMFLEET,))]
        page = save_report(options.out, runs)
    except (StackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for run in runs:
        print(describe(run))
        for problem in verdict(run):
            print(f"FAILED    {problem}")
        for warning in warnings(run):
            print(f"WARNING   {warning}")
        print()
    print(f"report    {page}")
    failed = any(verdict(run) for run in runs)
    print("failed" if failed else "passed")
    return 1 if failed else 0


def _run(fleet: str, options: argparse.Namespace, events: Sequence[Event]) -> FleetRun:
    """Return the run of a fleet, from the start of its processes to their end. Raises StackError."""
    chosen = [event for event in events if fleet == WARMFLEET or event.kind == "engine"]
    with (
        tempfile.TemporaryDirectory(prefix="wf-load-") as folder,
        LocustStack(Path(folder), fleet, _size(options, chosen)) as stack,
    ):
        _start(stack)
        print(f"{fleet}: {options.duration:g} s of load at {stack.url}", flush=True)
        return drive(stack, options, chosen)


def _start(stack: LocustStack) -> None:
    before = "" if stack.fleet == AFFINITY else f"a store, {stack.size.replicas} router replicas, "
    roles = f" ({stack.size.prefill} for prefill)" if stack.size.prefill else ""
    print(f"{stack.fleet}: starting {before}{stack.size.engines} simulated engines{roles} and haproxy ...", flush=True)
    stack.start()


def drive(stack: LocustStack, options: argparse.Namespace, events: Sequence[Event]) -> FleetRun:
    """Run Locust against the stack, and start and end processes meanwhile. Raises StackError if Locust breaks."""
    target = stack.folder / "summary.json"
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", stack.url, "--headless"]
    command += [*_locust_arguments(options), "--summary", str(target), "--only-summary", "--loglevel", "WARNING"]
    command += ["--html", str(options.out / f"locust-{stack.fleet}.html")]
    used = stack.cpu_s()
    locust = stack.spawn("client", "locust", command)
    stack.wait("locust", lambda: _sent(target))  # Locust's imports take seconds
    began = float(_read(target)["plan"]["began"])
    zero = time.monotonic() + began - time.time()
    live, marks = Live(stack.fleet, target, options.duration), []
    for event in sorted(events, key=lambda event: event.share):
        stack.sleep_until(zero + event.share * options.duration, live.look)
        at_s = time.time() - began
        marks.append(Mark(at_s, event.action, _happen(stack, event)))
        live.say(f"{marks[-1].text} at {marks[-1].at_s:.0f} s")
    stack.sleep_until(zero + options.duration, live.look)
    added = [mark.name for mark in marks if mark.action == "add"]
    latest = time.monotonic() + LATE_S
    while not all(stack.sessions().get(name, 1) for name in added) and time.monotonic() < latest:
        stack.sleep_until(time.monotonic() + POLL_S, live.look)
    spent = {kind: seconds - used.get(kind, 0.0) for kind, seconds in stack.cpu_s().items()}
    sessions, lasted = stack.sessions(), time.time() - began
    locust.send_signal(signal.SIGUSR1)
    live.say("arrivals are over; waiting for the last answers")
    try:
        status = locust.wait(timeout=FINISH_S)
    except subprocess.TimeoutExpired as error:
        raise StackError(f"Locust did not end:\n{stack.tail('locust')}") from error
    ended = FleetRun(stack.fleet, lasted, _read(target), tuple(marks), sessions, spent, status)
    return replace(ended, roles=stack.roles(), transfers=stack.transfers())


def _happen(stack: LocustStack, event: Event) -> str:
    """Start or end the event's process; return its name. Raises StackError if no process or place is left."""
    places = stack.replicas if event.kind == "replica" else stack.engines
    name = stack.spare(places) if event.action == "add" else stack.first(places)
    if event.action == "kill":
        stack.kill(name)
    elif event.action == "stop":
        stack.terminate(name)
    elif event.kind == "replica":
        stack.start_replica(name)
    else:
        stack.start_engine(name)
    return name


def _sent(target: Path) -> bool:
    """Return whether Locust's summary counts at least one request."""
    return target.exists() and bool(Tally.from_json(_read(target)["tally"]).kinds())


def _read(target: Path) -> dict[str, Any]:
    """Return the summary that Locust wrote. Raises StackError."""
    try:
        return dict(orjson.loads(target.read_bytes()))
    except (OSError, ValueError) as error:
        raise StackError(f"Locust wrote no summary: {error}") from error


class Live:
    """Progress of a run on standard error: a line that is redrawn on a terminal, else a line every LOOK_S seconds."""

    def __init__(self, fleet: str, target: Path, duration: float) -> None:
        self._fleet, self._target, self._duration = fleet, target, duration
        self._terminal = sys.stderr.isatty()
        self._next = 0.0

    def look(self) -> None:
        """Print the progress, if the next line is due."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + (TERMINAL_LOOK_S if self._terminal else LOOK_S)
        begin, end = ("\r", "") if self._terminal else ("", "\n")
        print(f"{begin}{self.text()}", end=end, file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print a line of its own."""
        begin = "\n" if self._terminal else ""
        print(f"{begin}{self._fleet}: {text}", file=sys.stderr, flush=True)

    def text(self) -> str:
        summary = _read(self._target)
        total = figures(Tally.from_json(summary["tally"]), 0.0)[ALL]
        since = max(1e-9, time.time() - float(summary["plan"]["began"]))
        return (
            f"{self._fleet}: {min(since, self._duration):3.0f}/{self._duration:.0f} s, {total['sent']} requests "
            f"({total['sent'] / since:.1f}/s), failed {total['failed']}, hit ratio {total['hit_ratio']:.0%}, "
            f"TTFT p50 {total['ttft_p50']:g} ms, p90 {total['ttft_p90']:g} ms "
        )


def _web(options: argparse.Namespace) -> int:
    """Serve Locust's web page against a fleet, until Ctrl-C."""
    with (
        tempfile.TemporaryDirectory(prefix="wf-load-") as folder,
        LocustStack(Path(folder), WARMFLEET, _size(options, ())) as stack,
    ):
        _start(stack)
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", stack.url]
        command += [*_locust_arguments(options), "--web-host", "127.0.0.1", "--web-port", str(port)]
        stack.spawn("client", "locust", command)
        stack.wait("locust", lambda: answers(f"http://127.0.0.1:{port}/"))
        print(f"open http://127.0.0.1:{port} and start a run there; Ctrl-C ends everything", flush=True)
        while True:
            stack.sleep_until(time.monotonic() + 60)


def events_of(text: str) -> list[Event]:
    """Return the events of ``20:add engine,35:kill replica``; none for ``none``. Raises ValueError."""
    events = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part == "none":
            continue
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*:\s*(\w+)\s+(\w+)", part)
        if not found or found[2] not in ACTIONS or found[3] not in KINDS or not 0 < float(found[1]) < 100:
            raise ValueError(f"--events {part!r}: write PERCENT:ACTION KIND, such as 35:kill replica, or none")
        events.append(Event(float(found[1]) / 100, found[2], found[3]))
    return events


def _check_roles(options: argparse.Namespace) -> None:
    """Raise ValueError if no engine is left that decodes."""
    if not 0 <= options.prefill < options.engines:
        raise ValueError(f"--prefill {options.prefill}: leave at least one of the {options.engines} engines to decode")


def _size(options: argparse.Namespace, events: Sequence[Event]) -> Size:
    added = [event.kind for event in events if event.action == "add"]
    return Size(
        options.replicas,
        options.engines,
        options.blocks,
        options.step_time,
        spare_replicas=added.count("replica"),
        spare_engines=added.count("engine"),
        prefill=options.prefill,
    )


def _locust_options(options: argparse.Namespace) -> argparse.Namespace:
    """Return the locustfile's options. ``seconds`` is longer than the run, unless the arrivals are spread over it."""
    seconds = options.duration if options.arrivals in ("ramp", "diurnal") else options.duration + LATE_S
    return argparse.Namespace(**vars(options), seconds=seconds)


def _locust_arguments(options: argparse.Namespace) -> list[str]:
    values = vars(_locust_options(options))
    names = ("rate", "arrivals", "seconds", "mix", "seed", "trace", "speed", "rows")
    arguments = [word for name in names for word in (f"--{name}", str(values[name]))]
    return arguments + (["--processes", str(options.processes)] if options.processes > 1 else [])


def _parser() -> argparse.ArgumentParser:
    text = (__doc__ or "").replace("KILL_WINDOW_S", f"{KILL_WINDOW_S:g} seconds")
    parser = argparse.ArgumentParser(prog="python -m warmfleet_loadtest.locust_run", description=text)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    seconds = os.environ.get("DURATION") or "120"
    add("--duration", type=float, default=seconds, help="seconds of each run (default %(default)s)")
    add("--compare", action="store_true", help="then the same load on the same engines with session affinity only")
    add("--web", action="store_true", help="start Locust's web page, where runs are started by hand")
    add("--out", type=Path, default=Path("out/loadtest"), help="folder of the report (default %(default)s)")
    add = parser.add_argument_group("load (loadtest/locustfile.py explains it)").add_argument
    add("--rate", type=float, default=DEFAULT_RATE, help="requests per second (default %(default)s)")
    add("--arrivals", choices=list(SHAPES), default="poisson", help="default %(default)s")
    add("--mix", default=DEFAULT_MIX, help="parts of the requests (default %(default)s)")
    add("--seed", default="1", help="equal seeds give equal loads (default %(default)s)")
    add("--trace", default="", help="play a trace instead: conversation, agents or a file")
    add("--speed", type=float, default=6.0, help="trace seconds per second (default %(default)s)")
    add("--rows", type=int, default=0, help="play only the trace's first rows; 0 = all")
    add("--processes", type=int, default=1, help="processes that send (default %(default)s)")
    add = parser.add_argument_group("fleet").add_argument
    add("--replicas", type=int, default=3, help="of the router (default %(default)s)")
    add("--engines", type=int, default=8, help="simulated ones (default %(default)s)")
    prefill = (
        "of the engines compute prompts for the others, which decode; 0 = engines have no roles (default %(default)s)"
    )
    add("--prefill", type=int, default=0, metavar="N", help=prefill)
    add("--blocks", type=int, default=2_048, help="of 16 tokens, per engine (default %(default)s)")
    add("--step-time", default="demo", help="speed of an engine (see engine --help; default %(default)s)")
    events = "processes that come and go, by percent of the run; kill is SIGKILL, stop is SIGTERM (default %(default)s)"
    add("--events", default=EVENTS, help=events)
    return parser


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
