"""Writes the dashboards of k8s/components/monitoring: ``python -m tests.monitoring.dashboards``.

tests/monitoring/test_monitoring.py fails while a file differs from what this module makes, a query cannot be parsed, or
a metric does not exist. Plain dicts, as Grafana reads them: its SDK would add a dependency, and no check.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "k8s/components/monitoring/dashboards"
SOURCE = {"type": "prometheus", "uid": "${source}"}
COLUMNS, WIDTH, HEIGHT = 24, 12, 8
MODEL, INSTANCE = 'model=~"$model"', 'instance=~"$instance"'
#: A rate needs two samples: Grafana makes this at least four intervals of the scrape.
RATE = "[$__rate_interval]"


@dataclass(frozen=True)
class Line:
    """A query, and the name of each of its lines in the legend."""

    expr: str
    name: str


@dataclass(frozen=True)
class Panel:
    """axis: what the y axis measures. unit: as Grafana calls it. text: what the panel tells, and when to worry.

    nothing: shown in place of "No data", for a panel whose samples appear with their first event.
    """

    title: str
    axis: str
    unit: str
    text: str
    lines: tuple[Line, ...]
    stacked: bool = False
    top: float | None = None
    nothing: str = ""


def rate(metric: str, by: str, labels: str = MODEL) -> str:
    return f"sum by ({by}) (rate(warmfleet_{metric}{{{labels}}}{RATE}))"


def quantiles(metric: str, labels: str = MODEL, where: str = "") -> tuple[Line, ...]:
    """P50, P90 and P99 over all replicas. where: `` > 0`` drops times without any event, which are not a number."""
    ranges = f"sum by (model, le) (rate(warmfleet_{metric}_bucket{{{labels}}}{RATE}))"
    return tuple(
        Line(
            f"histogram_quantile({share}, {ranges}){where}",
            f"P{round(100 * share)} {{{{model}}}}",
        )
        for share in (0.5, 0.9, 0.99)
    )


def share(part: str, whole: str, by: str = "model") -> str:
    return f"{rate(part, by)} / {rate(whole, by)}"


FLEET = (
    Panel(
        "Answers by status",
        "answers a second",
        "reqps",
        "All replicas together. 429: the queue or a key's limit refuses. 5xx: see the alert WarmfleetErrors.",
        (Line(rate("requests_total", "status"), "{{status}}"),),
        stacked=True,
        nothing="No request was answered yet",
    ),
    Panel(
        "Hit ratio",
        "share of the prompt tokens",
        "percentunit",
        "Prompt tokens that the chosen worker held already. It falls when caches are too small, or prompts are new.",
        (Line(share("matched_tokens_total", "prompt_tokens_total"), "{{model}}"),),
        top=1.0,
    ),
    Panel(
        "Time to first token",
        "seconds since the request was read",
        "s",
        "Of streamed answers: a plain answer comes only with its last token. Buckets end at 30 s.",
        quantiles("first_byte_seconds", f'{MODEL},answer="stream"', where=" > 0"),
        nothing="No streamed answer yet",
    ),
    Panel(
        "Prompt tokens",
        "tokens a second",
        "short",
        "Matched: the worker held them. The others are computed.",
        (
            Line(rate("matched_tokens_total", "model"), "matched {{model}}"),
            Line(f"{rate('prompt_tokens_total', 'model')} - {rate('matched_tokens_total', 'model')}", "new {{model}}"),
        ),
        stacked=True,
    ),
    Panel(
        "Requests that wait for a worker",
        "requests, in all replicas",
        "short",
        "They wait while every worker has enough to do. Bodies wait in the replicas, their order is the fleet's.",
        (Line(f"sum by (model) (warmfleet_queued_requests{{{MODEL}}})", "{{model}}"),),
    ),
    Panel(
        "Wait in the queue",
        "seconds",
        "s",
        "Of those requests that had to wait at all.",
        quantiles("queue_seconds", where=" > 0"),
        nothing="No request had to wait",
    ),
    Panel(
        "Refused by the queue",
        "requests a second",
        "reqps",
        "full, displaced, deadline: too few engines. bytes: twice WARMFLEET_BODY_MAX_BYTES wait.",
        (Line(rate("queue_rejections_total", "reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "Why this worker",
        "decisions a second",
        "ops",
        "The rule that decided (app/docs/operate.md, Policies).",
        (Line(rate("decisions_total", "why"), "{{why}}"),),
        stacked=True,
        nothing="No request was decided yet",
    ),
    Panel(
        "Decisions",
        "seconds",
        "s",
        "Time that requests waited for Redis to decide. Beyond WARMFLEET_DECIDE_TIMEOUT_S the fallback chooses.",
        quantiles("decision_seconds"),
    ),
    Panel(
        "Placed without Redis",
        "requests a second",
        "reqps",
        "away: Redis gave no answer in time. open: it was not asked after two failures. no_worker: none was known.",
        (Line(rate("fallback_requests_total", "reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "How prompts were identified",
        "requests a second",
        "reqps",
        "Only exact, engine, text and prefix can match blocks; load cannot (app/docs/identity.md).",
        (Line(rate("identified_requests_total", "kind"), "{{kind}}"),),
        stacked=True,
        nothing="No prompt was identified yet",
    ),
    Panel(
        "Placed by load, by reason",
        "requests a second",
        "reqps",
        "app/docs/identity.md explains each reason.",
        (Line(rate("load_only_requests_total", "reason"), "{{reason}}"),),
        stacked=True,
        nothing="No prompt was placed by load",
    ),
)

#: Every replica tells the same of a worker and of Redis: the maximum is one of them, a sum would be several times it.
WORKERS = (
    Panel(
        "Workers by state",
        "workers",
        "short",
        "proven, identity, approximate and unheard take requests (app/docs/worker-life.md).",
        (Line(f"sum by (state) (max by (model, state) (warmfleet_workers{{{MODEL}}})) > 0", "{{state}}"),),
        stacked=True,
        nothing="No worker has joined",
    ),
    Panel(
        "Requests in flight",
        "requests of all replicas",
        "short",
        "A worker that is far above the others holds what many ask for, or is slower.",
        (Line(f"max by (worker) (warmfleet_worker_in_flight_requests{{{MODEL}}})", "{{worker}}"),),
    ),
    Panel(
        "Booked prefill",
        "prompt tokens",
        "short",
        "Divided by the worker's speed this is the time until it is free.",
        (Line(f"max by (worker) (warmfleet_worker_prefill_tokens{{{MODEL}}})", "{{worker}}"),),
    ),
    Panel(
        "Measured speed of prefill",
        "prompt tokens a second",
        "short",
        "0 until it is measured; then the fleet's median counts in its place.",
        (Line(f"max by (worker) (warmfleet_worker_prefill_tokens_per_second{{{MODEL}}})", "{{worker}}"),),
    ),
    Panel(
        "Cache fill",
        "share of the blocks",
        "percentunit",
        "A full cache is normal: blocks stay until others need their place.",
        (
            Line(
                f"max by (worker) (warmfleet_worker_held_blocks{{{MODEL}}})"
                f" / (max by (worker) (warmfleet_worker_cache_blocks{{{MODEL}}}) > 0)",
                "{{worker}}",
            ),
        ),
        top=1.0,
    ),
    Panel(
        "Lag of the index",
        "seconds since the oldest event",
        "s",
        "Block events that no replica has applied. While it lags, matches are those of that long ago.",
        (Line(f"max by (worker) (warmfleet_worker_apply_lag_seconds{{{MODEL}}})", "{{worker}}"),),
    ),
    Panel(
        "Last heard",
        "seconds since the heartbeat",
        "s",
        "A worker that was not heard for 15 s gets no requests, unless its engine answers.",
        (Line(f"max by (worker) (warmfleet_worker_heartbeat_age_seconds{{{MODEL}}})", "{{worker}}"),),
    ),
    Panel(
        "Workers whose index is wrong",
        "workers",
        "short",
        "Known to differ from the engine's table; a snapshot mends it within seconds.",
        (Line("max(warmfleet_diverged_workers)", "diverged"),),
    ),
    Panel(
        "Memory of Redis",
        "share of maxmemory",
        "percentunit",
        "From 85 % on, new blocks are not indexed (app/docs/redis.md).",
        (Line("max(warmfleet_memory_used_ratio)", "used"),),
        top=1.0,
    ),
    Panel(
        "Pairs of a block and a worker",
        "entries of the index",
        "short",
        "Each takes about 165 bytes of Redis, with all that belongs to it.",
        (Line("max(warmfleet_index_entries)", "entries"),),
    ),
)

REPLICAS = (
    Panel(
        "CPU",
        "share of a core",
        "percentunit",
        "A replica uses one core: near 1 add replicas.",
        (
            Line(
                f"rate(process_cpu_seconds_total{{{INSTANCE}}}{RATE}) and on (job, instance) warmfleet_build_info",
                "{{instance}}",
            ),
        ),
        top=1.0,
    ),
    Panel(
        "Memory",
        "bytes that are resident",
        "bytes",
        "The prompt trie (WARMFLEET_TRIE_BYTES) and bodies that wait are most of it.",
        (
            Line(
                f"process_resident_memory_bytes{{{INSTANCE}}} and on (job, instance) warmfleet_build_info",
                "{{instance}}",
            ),
        ),
    ),
    Panel(
        "Requests in flight",
        "requests",
        "short",
        "About the same in each replica, if the balancer spreads requests evenly.",
        (Line(f"warmfleet_in_flight_requests{{{INSTANCE}}}", "{{instance}}"),),
    ),
    Panel(
        "Connections of clients",
        "open connections",
        "short",
        "The limit is WARMFLEET_MAX_CONNECTIONS for each port.",
        (Line(f"warmfleet_connections{{{INSTANCE}}}", "{{instance}}"),),
    ),
    Panel(
        "Age of the last reading",
        "seconds since the fleet was read",
        "s",
        "About a second; more than two means that Redis is away.",
        (Line(f"warmfleet_view_age_seconds{{{INSTANCE}}}", "{{instance}}"),),
    ),
    Panel(
        "Rounds of background tasks that failed",
        "failures a second",
        "ops",
        "One failure now and then is tried again; see the alert WarmfleetTaskFails.",
        (Line(f"{rate('task_failures_total', 'task', INSTANCE)} > 0", "{{task}}"),),
        stacked=True,
        nothing="No round failed",
    ),
    Panel(
        "Tries at a second worker",
        "tries a second",
        "ops",
        "same: a kept connection had ended. another: a worker failed before its first byte.",
        (Line(rate("retries_total", "where", INSTANCE), "{{where}}"),),
        stacked=True,
    ),
    Panel(
        "Block events applied",
        "blocks a second",
        "ops",
        "The replicas share this work: any of them applies the events of any worker.",
        (Line(rate("applied_blocks_total", "instance", INSTANCE), "{{instance}}"),),
    ),
)


def dashboard(uid: str, title: str, panels: tuple[Panel, ...], *variables: dict[str, Any]) -> dict[str, Any]:
    """A dashboard as Grafana 10 and later import it."""
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "uid": uid,
        "title": title,
        "tags": ["warmfleet"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["warmfleet"], "title": "Warmfleet", "asDropdown": True}],
        "templating": {"list": [source, *variables]},
        "panels": [_panel(place, panel) for place, panel in enumerate(panels)],
    }


def variable(name: str, metric: str) -> dict[str, Any]:
    """A choice among the values of a label; at first all of them."""
    query = f"label_values({metric}, {name})"
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(place: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(place, COLUMNS // WIDTH)
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "custom": {
            "axisLabel": panel.axis,
            "lineWidth": 2,
            "fillOpacity": 20 if panel.stacked else 0,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        },
    }
    if panel.top is not None:
        defaults["max"] = panel.top
    if panel.nothing:
        defaults["noValue"] = panel.nothing
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull", "max"]},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": SOURCE, "expr": line.expr, "legendFormat": line.name}
            for number, line in enumerate(panel.lines)
        ],
    }


def pages() -> dict[str, str]:
    """The text of each file, by its name."""
    model = variable("model", "warmfleet_workers")
    instance = variable("instance", "warmfleet_build_info")
    found = {
        "warmfleet-fleet.json": dashboard("warmfleet-fleet", "Warmfleet: fleet", FLEET, model),
        "warmfleet-workers.json": dashboard("warmfleet-workers", "Warmfleet: workers and index", WORKERS, model),
        "warmfleet-replicas.json": dashboard("warmfleet-replicas", "Warmfleet: replicas", REPLICAS, instance),
    }
    return {name: json.dumps(page, indent=2) + "\n" for name, page in found.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
