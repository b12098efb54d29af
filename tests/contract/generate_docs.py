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

`GET /metrics` of a replica answers with the metrics of this table in Prometheus' text format. In that answer the name
of every counter ends in `_total`; the table leaves the ending out. [operate.md](operate.md#see-it) says how to scrape
them, which to watch and what to do.

Their names follow a rule: `warmfleet_`, then the things that are counted, in the plural, or what is measured with its
base unit at the end. Labels are bounded: `model` is the tag of a pool: each of the registry, or of `WARMFLEET_MODELS`
without one; `worker` is a worker of the last reading, whose samples go when it leaves, `client` a name in the file of
clients' keys. Prometheus' own `process_*` metrics (CPU, memory, open files, start) are on the same page.

These gauges describe the fleet, Redis and the index, not the replica: `warmfleet_workers`, `warmfleet_worker_*`,
`warmfleet_memory_*`, `warmfleet_apply_lag_*`, `warmfleet_digest_age_seconds`, `warmfleet_diverged_workers`,
`warmfleet_divergences`, `warmfleet_resyncs`, `warmfleet_index_*` and `warmfleet_retired_slots`. Every replica reads
them from the same Redis, each at its own moment. A sum over replicas would count the same thing once for each replica:
take the maximum. All other gauges are of one replica.

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
