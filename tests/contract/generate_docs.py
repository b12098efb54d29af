"""Writes what follows from the code into app/docs: settings.md, metrics.md, a table of sizing.md.

The command is ``python -m tests.contract.generate_docs``.

tests/contract/test_docs.py fails while a file differs from the text that this module makes.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase
from tests.contract import sizing

from warmfleet.metrics import Metrics
from warmfleet.settings import PREFIX, Settings

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

The label `model` is the tag of a pool, `worker` a worker that the replica read last (its samples go when it leaves),
and `client` a name in the file of clients' keys. [glossary.md](glossary.md) explains other words.

These gauges describe the fleet, Redis and the index, which all replicas read from the same Redis: `warmfleet_workers`,
`warmfleet_worker_*`, `warmfleet_memory_*`, `warmfleet_apply_lag_*`, `warmfleet_digest_age_seconds`,
`warmfleet_diverged_workers`, `warmfleet_divergences`, `warmfleet_resyncs`, `warmfleet_index_*` and
`warmfleet_retired_slots`. Take their maximum over the replicas; a sum would count the same thing once for each replica.
All other gauges are of one replica.

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


def sizing_page() -> str:
    """The text of sizing.md, whose table of large fleets follows from unit costs."""
    return sizing.with_table((DOCS / "sizing.md").read_text(encoding="utf-8"))


PAGES = {DOCS / "settings.md": settings_page, DOCS / "metrics.md": metrics_page, DOCS / "sizing.md": sizing_page}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
