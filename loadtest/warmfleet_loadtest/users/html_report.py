"""The report of a load test: a page with figures, and plots that mark when a process was added or taken away."""

from __future__ import annotations

import json
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from warmfleet_loadtest.measuring.plots import line_figure, save_figure
from warmfleet_loadtest.users.fleet_run import HEAD, facts, rows, verdict, warnings
from warmfleet_loadtest.users.report_figures import over_time
from warmfleet_loadtest.users.tally import distribution

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from warmfleet_loadtest.users.fleet_run import FleetRun

POINTS = 20  # number of points of a line over the run
SECONDS = "seconds from the first arrival"

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Load test</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }}
table {{ border-collapse: collapse; margin: .5rem 0; }} .wide {{ overflow-x: auto; }}
td, th {{ padding: .15rem .6rem; text-align: right; border-bottom: 1px solid #ddd; }}
td:first-child, th:first-child, dl {{ text-align: left; }}
dt {{ float: left; clear: left; width: 6rem; color: #555; }} dd {{ margin-left: 6.5rem; }}
svg {{ max-width: 100%; height: auto; }} .bad {{ color: #a00; }} .good {{ color: #060; }}
</style></head><body>
<h1>Load test</h1>
<p>{plan}</p>
{fleets}
<h2>Plots</h2>
{plots}
</body></html>
"""


def save_report(folder: Path, runs: Sequence[FleetRun]) -> Path:
    """Write report.html, its plots and figures.json. Returns the page's path. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    plots = plots_of(runs)
    for name, figure in plots.items():
        save_figure(figure, folder / f"{name}.svg")
    texts = [(folder / f"{name}.svg").read_text() for name in plots]
    drawn = [svg[svg.index("<svg") :] for svg in texts]  # without the XML declaration, so that a page can hold it
    page = folder / "report.html"
    page.write_text(
        _PAGE.format(plan=escape(plan_text(runs[0])), fleets="\n".join(map(_section, runs)), plots="\n".join(drawn))
    )
    found = {
        run.fleet: {
            "figures": run.figures,
            "generator": run.generator,
            "cpu_s": {kind: round(used, 2) for kind, used in run.cpu_s.items()},
            "marks": [f"{mark.text} at {mark.at_s:.1f} s" for mark in run.marks],
            "problems": verdict(run),
            "warnings": warnings(run),
            "plan": run.summary["plan"],
            **({"split": run.split} if run.roles else {}),
        }
        for run in runs
    }
    (folder / "figures.json").write_text(json.dumps(found, indent=1))
    return page


def plan_text(run: FleetRun) -> str:
    plan = run.summary["plan"]
    mix = ", ".join(f"{kind} {share:g}" for kind, share in plan["mix"].items())
    if "trace" in plan["mix"]:
        return f"A trace, for {run.seconds:.0f} s."
    return (
        f"{plan['rate']:g} requests per second for {run.seconds:.0f} s, in an open loop, arrivals {plan['shape']}; "
        f"parts of the requests: {mix}. Seed {plan['seed']}. TTFT is the time from when a request was due to its first "
        "token, gap the time between tokens."
    )


def plots_of(runs: Sequence[FleetRun]) -> dict[str, Any]:
    """Return the plots by the names of their files, with marks at the first run's kills, stops and additions."""
    window_s = max(1.0, round(runs[0].seconds / POINTS))
    lines = {run.fleet: over_time(run.tally, run.began, run.seconds, window_s) for run in runs}
    marks = [(mark.at_s, mark.text) for mark in runs[0].marks]

    def over(names: dict[str, str]) -> dict[str, tuple[list[float], list[float]]]:
        """Return a line per fleet and figure. names: of the figures, each with its text for the legend."""
        return {
            f"{fleet}{label}": ([at for at, _ in found[name]], [value for _, value in found[name]])
            for fleet, found in lines.items()
            for name, label in names.items()
            if name in found
        }

    each = f"in stretches of {window_s:.0f} s"
    hits, gaps = over({"hit_ratio": ""}), over({"gap_p50": ""})
    ttft = over({"ttft_p50": ", p50", "ttft_p90": ", p90"})
    numbers = {"rate": ", sent", "broken": ", connections broken (number)", "failed": ", failed (number)"}
    whole = {run.fleet: _cdf(run) for run in runs}
    return {
        "hit_ratio": line_figure(f"Prompt tokens from caches, {each}", SECONDS, "share of prompt tokens", hits, marks),
        "ttft": line_figure(f"Time to first token, {each}", SECONDS, "ms", ttft, marks),
        "ttft_cdf": line_figure("Time to first token", "ms", "share of the requests of the run", whole, xscale="log"),
        "gap": line_figure(f"Gap between tokens, {each}", SECONDS, "ms, median", gaps, marks),
        "rate": line_figure(f"Requests, {each}", SECONDS, "per second", over(numbers), marks),
    }


def _cdf(run: FleetRun) -> tuple[list[float], list[float]]:
    """Return (TTFT in ms, share of requests that had at most that)."""
    known = distribution(run.tally.total(), "ttft", run.tally.kinds())
    whole = sum(times for _, times in known)
    shares = [count / whole for count in accumulate(times for _, times in known)]
    return [value for value, _ in known], shares


def _section(run: FleetRun) -> str:
    problems, doubts = verdict(run), warnings(run)
    head = "".join(f"<th>{escape(cell)}</th>" for cell in HEAD)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows(run))
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts(run))
    failures = "".join(f'<p class="bad">failed: {escape(problem)}</p>' for problem in problems)
    result = failures or '<p class="good">passed</p>'
    result += "".join(f"<p>warning: {escape(doubt)}</p>" for doubt in doubts)
    table = f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
    return f"<h2>{escape(run.fleet)}</h2>{result}<p>Times in ms.</p>{table}<dl>{terms}</dl>"
