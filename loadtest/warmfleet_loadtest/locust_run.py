"""`make loadtest`: a local fleet behind haproxy, driven by Locust while one replica is killed and one is added.

It starts a store, four simulated engines, three router replicas and haproxy, and runs loadtest/locustfile.py. At 35 %
of the time it kills one replica (SIGKILL), at 50 % it starts a new one. At the end it writes an HTML report and stops
everything.

The run passes if no request has failed. A SIGKILL cuts the streams that ran through the killed replica. A TCP balancer
cannot mend that, so clients send such a request again, as the OpenAI clients do after a broken connection. Broken
connections are counted and printed, and are allowed only within KILL_WINDOW_S after the kill: at any other time they
fail the run. Answers that were routed without a decision (the store was too slow) are printed as a warning.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warmfleet_loadtest.stacks.locust_stack import LocustStack
from warmfleet_loadtest.stacks.processes import StackError, end_on_signals

LOCUSTFILE = Path(__file__).parents[1] / "locustfile.py"
KILL_AT, ADD_AT = 0.35, 0.5  # share of the duration
# A fallback is a correct answer that was routed without the shared decision. A run in which a larger share of the
# answers than this are fallbacks has failed: it says little about the shared decision. Runs on a crowded 2-core machine
# had 0 to 6 % fallbacks: there the store waited for a CPU longer than the routers wait for the store.
FALLBACK_SHARE = 0.2
KILL_WINDOW_S = 3.0  # two health checks (1 s each), and time to send the cut requests again
FINISH_S = 30  # seconds that users get to finish their last request
TRAFFIC = "replica-4"
POLL_S = 0.2
TRAFFIC_S = 60  # on a busy machine the added replica may get its first request only after the duration


@dataclass(frozen=True)
class Run:
    """The driver's part of a run: Unix times of kill and start, connections per replica, Locust's exit status."""

    killed_at: float
    added_at: float
    sessions: dict[str, int]
    locust_status: int


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 no failures, 1 failures, 2 the run could not be made."""
    options = _parser().parse_args(argv)
    try:
        options.report.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="wf-load-") as folder, LocustStack(Path(folder)) as stack:
            print("starting a store, 4 simulated engines, 3 router replicas and haproxy ...", flush=True)
            stack.start()
            print(f"serving at {stack.url}; {options.users} users for {options.duration} s", flush=True)
            summary, run = drive(stack, options, Path(folder))
    except (StackError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    problems = verdict(summary, run)
    print(describe(summary, run))
    print(f"report    {options.report}")
    for problem in problems:
        print(f"FAILED    {problem}")
    print("passed" if not problems else "failed")
    return 1 if problems else 0


def drive(stack: LocustStack, options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], Run]:
    """Run Locust against the stack; meanwhile kill one replica and start one. Raises StackError if Locust breaks."""
    target = folder / "summary.json"
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--host", stack.url, "--headless"]
    command += ["--users", str(options.users), "--spawn-rate", str(max(1, options.users / 5))]
    command += ["--stop-timeout", str(FINISH_S)]
    command += ["--html", str(options.report), "--only-summary", "--loglevel", "WARNING"]
    locust = stack.spawn("client", "locust", command, {"WARMFLEET_LOADTEST_SUMMARY": str(target)})
    stack.wait("locust", lambda: any(stack.sessions().values()))  # it takes seconds to import its modules
    began = time.monotonic()
    stack.sleep_until(began + KILL_AT * options.duration)
    killed_at = time.time()
    stack.kill("replica-1")
    print("killed    replica-1 (SIGKILL)", flush=True)
    stack.sleep_until(began + ADD_AT * options.duration)
    added_at = time.time()
    stack.start_replica(4)
    print("added     replica-4", flush=True)
    stack.sleep_until(began + options.duration)
    latest = time.monotonic() + TRAFFIC_S
    while not stack.sessions().get(TRAFFIC) and time.monotonic() < latest:
        stack.sleep_until(time.monotonic() + POLL_S)
    locust.send_signal(signal.SIGUSR1)
    try:
        status = locust.wait(timeout=FINISH_S + 60)  # time to write its report
    except subprocess.TimeoutExpired as error:
        raise StackError(f"Locust did not end:\n{stack.tail('locust')}") from error
    if not target.exists():
        raise StackError(f"Locust ended with {status} and no summary:\n{stack.tail('locust')}")
    return json.loads(target.read_text()), Run(killed_at, added_at, stack.sessions(), status)


def verdict(summary: dict[str, Any], run: Run) -> list[str]:
    """The reasons why this run has failed; empty if it has passed."""
    problems = [f"request failed: {error}" for error in summary["errors"]]
    failures = sum(row["failures"] for row in summary["rows"].values())
    if failures:
        problems.append(f"{failures} failures")
    if not any(row["requests"] for name, row in summary["rows"].items() if name.startswith("chat ")):
        problems.append("no requests were made")
    stray = [when for when, _ in summary["broken"] if not run.killed_at <= when <= run.killed_at + KILL_WINDOW_S]
    if stray:
        seconds = ", ".join(f"{when - run.killed_at:+.1f} s" for when in stray[:10])
        problems.append(f"{len(stray)} connections broke at other times than the kill ({seconds} from it)")
    fallbacks, answers = len(summary["fallbacks"]), sum(summary["reservations"].values())
    if fallbacks > FALLBACK_SHARE * answers:
        problems.append(f"{fallbacks} of {answers} requests were routed without a decision (fallback)")
    if not run.sessions.get(TRAFFIC):
        problems.append(f"the added {TRAFFIC} got no traffic")
    if run.locust_status != 0 and not problems:
        problems.append(f"Locust ended with {run.locust_status}")
    return problems


def describe(summary: dict[str, Any], run: Run) -> str:
    """A summary of the run in a few lines."""
    lines = [f"{'':10}{'requests':>9}{'failures':>9}{'mean ms':>9}{'p50':>8}{'p95':>8}"]
    for name, row in sorted(summary["rows"].items()):
        figures = f"{row['mean_ms']:>9.0f}{row['p50_ms'] or 0:>8.0f}{row['p95_ms'] or 0:>8.0f}"
        lines.append(f"{name:10}{row['requests']:>9}{row['failures']:>9}{figures}")
    prompt, matched = summary["prompt_tokens"], summary["matched_tokens"]
    fallbacks = ", ".join(f"{when - run.killed_at:+.0f}" for when in summary["fallbacks"][:20])
    kinds = [kind for _, kind in summary["broken"]]
    lines += [
        f"cache     {matched:,} of {prompt:,} prompt tokens matched ({matched / max(1, prompt):.0%})",
        f"workers   {_counts(summary['workers'])}",
        f"replicas  {_counts(run.sessions)} (connections, health checks not counted)",
        f"decisions {_counts(summary['reservations'])}",
        f"broken    {kinds.count('retried')} before an answer, {kinds.count('cut')} in mid-stream; all sent again",
    ]
    if fallbacks:
        lines.append(
            f"WARNING   {len(summary['fallbacks'])} without a decision (fallback), s from the kill: {fallbacks}"
        )
    return "\n".join(lines)


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m warmfleet_loadtest.locust_run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    seconds = os.environ.get("DURATION") or "120"
    parser.add_argument("--duration", type=int, default=seconds, help="seconds (default: DURATION, else 120)")
    parser.add_argument("--users", type=int, default=24, help="simulated users (default %(default)s)")
    parser.add_argument("--report", type=Path, default=Path("out/loadtest.html"), help="default %(default)s")
    return parser


if __name__ == "__main__":
    end_on_signals()
    sys.exit(main())
