"""Writes generated text: settings.md, metrics.md, tables of api.md, sizing.md, lua/README.md; figures of tests/bench.

The command is ``python -m tests.contract.generate_docs``.

tests/contract/test_docs.py fails while a file differs from the text that this module makes.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.metrics import MetricWrapperBase
from starlette.routing import Route
from tests.bench import results
from tests.contract import lua_tables, sizing

from warmfleet import errors
from warmfleet.errors import WarmfleetError
from warmfleet.main import create_app
from warmfleet.metrics import Metrics
from warmfleet.prompt.engine_paths import KNOWN, NEVER, NEVER_BELOW
from warmfleet.settings import PREFIX, Settings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from warmfleet.api.listening.server import Door

DOCS = Path(__file__).parents[2] / "app" / "docs"

SETTINGS = """\
# Settings

A router replica reads these environment variables once, at its start. Lists are separated by commas; a time is in
seconds. `warmfleet serve` has options for some of them, which win over the environment. A value that cannot be read,
and two values that contradict each other, end the start with a sentence that names them. The variables of an engine
are in [worker_plugin/README.md](../../worker_plugin/README.md).

A secret may also be given by a file, such as `WARMFLEET_ADMIN_KEY_FILE=/run/secrets/admin`: the variable with `_FILE`
at its end names a file, and the file's content, without white space at its ends, is the value.

Traces are set up by the standard variables of OpenTelemetry, such as `OTEL_EXPORTER_OTLP_ENDPOINT`:
[tracing.md](tracing.md#variables).

This file is generated from `app/warmfleet/settings.py`: `python -m tests.contract.generate_docs`.
"""

METRICS = """\
# Metrics

`GET /metrics` of a replica answers with these metrics in Prometheus' text format, and with Prometheus' own `process_*`
metrics (CPU, memory, open files, start). There the name of every counter ends in `_total`; the table leaves the ending
out. [operate.md](operate.md#see-it) says how to scrape the metrics, which to watch and what to do.

The label `model` is the tag of a pool, `worker` a worker on the list that the replica last read from Redis (its
samples go when it leaves the list), and `client` a name in the file of clients' keys. [glossary.md](glossary.md)
explains other words.

These gauges are the same at all replicas, which read them from one Redis, so take their maximum: `warmfleet_workers`,
`warmfleet_worker_*`, `warmfleet_memory_*`, `warmfleet_apply_lag_*`, `warmfleet_digest_age_seconds`,
`warmfleet_diverged_workers`, `warmfleet_divergences`, `warmfleet_resyncs`, `warmfleet_index_*` and
`warmfleet_retired_slots`. All other gauges are of one replica.

This file is generated from `app/warmfleet/metrics.py`: `python -m tests.contract.generate_docs`.

| name | type | labels | meaning |
|---|---|---|---|
"""


def settings_page() -> str:
    """The text of settings.md."""
    rows = []
    for item in fields(Settings):
        value = ",".join(item.default) if isinstance(item.default, tuple) else str(item.default)
        default = f"`{value}`" if value else "empty"
        why = f"secret: {item.metadata['why']}" if item.metadata.get("secret") else item.metadata["why"]
        if item.metadata["group"]:
            rows.append(f"\n## {item.metadata['group']}\n| variable | default | meaning |\n|---|---|---|\n")
        rows.append(f"| `{PREFIX}{item.name.upper()}` | {default} | {why} |\n")
    return SETTINGS + "".join(rows)


def metrics_page() -> str:
    """The text of metrics.md."""
    rows = []
    for metric in vars(Metrics()).values():
        if isinstance(metric, MetricWrapperBase):
            labels = ", ".join(metric._labelnames) or "none"
            rows.append(f"| `{metric._name}` | {metric._type} | {labels} | {metric._documentation} |\n")
    return METRICS + "".join(rows)


def filled(page: str, blocks: dict[str, str]) -> str:
    """The page with each block between the two marks of its name. Raises ValueError if a mark is missing."""
    for name, block in blocks.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = before + begin + block + end + after
    return page


def endpoints(*, of_operators: bool) -> str:
    """A row for each path that a replica answers itself, on the port of clients or only on that of operators."""
    doors = create_app(Settings(models=("any",)))
    shared = set(map(_endpoint, _routes(doors.clients)))
    rows: dict[str, list[str]] = {}
    for route in _routes(doors.operators if of_operators else doors.clients):
        path = _endpoint(route)
        if (of_operators and path in shared) or path.startswith(("/status/", "/favicon")):
            continue
        said = (route.endpoint.__doc__ or "").partition("\n")[0].rstrip(".")
        rows.setdefault(said, []).extend(f"{method} {path}" for method in sorted((route.methods or set()) - {"HEAD"}))
    head = "| endpoint | answer |\n|---|---|\n"
    return head + "".join(f"| {_codes(same)} | {said} |\n" for said, same in rows.items())


def _routes(door: Door) -> list[Route]:
    return [route for route in door.connections.application.starlette.routes if isinstance(route, Route)]


def _endpoint(route: Route) -> str:
    return route.path.replace(":path}", "}")


def engine_paths() -> str:
    """A row for each way in which requests are placed, with the paths that are and their labels."""
    rows: dict[str, dict[str, list[str]]] = {"by prefix": {}, "by load": {}, "no prompt": {}}
    for known in KNOWN.values():
        labels = rows[{"unknown": "by load", "none": "no prompt"}.get(known.form, "by prefix")]
        labels.setdefault(known.name, []).append(known.path)
    head = "| placed | paths (`POST`); label `endpoint` of metrics |\n|---|---|\n"
    return head + "".join(
        f"| {placed} | {'; '.join(f'{_codes(paths)} (`{label}`)' for label, paths in labels.items())} |\n"
        for placed, labels in rows.items()
    )


def refused_paths() -> str:
    """The paths of vLLM that never pass."""
    return _codes(sorted({*NEVER, *(f"{above}…" for above in NEVER_BELOW if above != "/v1/models/")})) + ".\n"


def error_table() -> str:
    """A row for each class of errors.py, of which the first line of its docstring says when it is answered."""
    kinds = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, WarmfleetError)]
    rows = sorted(
        f"| {kind.status} `{kind.type}` | `{kind.code}` | {(kind.__doc__ or '').partition(chr(10))[0].rstrip('.')} |\n"
        for kind in kinds
    )
    return "| status, type | code | when |\n|---|---|---|\n" + "".join(rows)


def _codes(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def api_page() -> str:
    """The text of api.md with its tables of paths and errors."""
    return filled(
        (DOCS / "api.md").read_text(encoding="utf-8"),
        {
            "endpoints": endpoints(of_operators=False),
            "endpoints for operators": endpoints(of_operators=True),
            "paths of engines": engine_paths(),
            "refused paths": refused_paths(),
            "errors": error_table(),
        },
    )


def sizing_page() -> str:
    """The text of sizing.md, whose table of large fleets follows from unit costs."""
    return filled((DOCS / "sizing.md").read_text(encoding="utf-8"), {"large fleets": sizing.table()})


def lua_page() -> str:
    """The text of lua/README.md with its tables of packed records and codes."""
    return filled(lua_tables.README.read_text(encoding="utf-8"), lua_tables.tables())


PAGES = {
    DOCS / "settings.md": settings_page,
    DOCS / "metrics.md": metrics_page,
    DOCS / "api.md": api_page,
    DOCS / "sizing.md": sizing_page,
    results.README: results.page,
    lua_tables.README: lua_page,
}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
