"""Writes app/docs/settings.md and app/docs/metrics.md from the code: ``python -m tests.contract.generate_docs``.

tests/contract/test_docs.py fails while a file differs from the text that this module makes.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from warmfleet.metrics import Metrics
from warmfleet.settings import CONSTANTS, PREFIX, Settings

DOCS = Path(__file__).parents[2] / "app" / "docs"

SETTINGS = """\
# Settings

A router replica reads these environment variables once, at its start. Lists are separated by commas; a time is in
seconds. `warmfleet serve` has options for some of them, which win over the environment. A value that cannot be read,
and two values that contradict each other, end the start with a sentence that names them. The variables of an engine
are in [worker_plugin/README.md](../../worker_plugin/README.md).

This file is generated from `app/warmfleet/settings.py`: `python -m tests.contract.generate_docs`.

| variable | default | meaning |
|---|---|---|
"""

CONSTANT = """
## No longer settings
These variables of earlier versions are constants now, each beside its reason in the module that uses it. A replica
that finds one of them in its environment says so at its start and goes on.

"""

METRICS = """\
# Metrics

`GET /metrics` of a replica answers them in Prometheus' text format. The names of counters end in `_total` on that
page. [operate.md](operate.md) says which to watch and what to do.

The gauges of Redis and the index (`warmfleet_memory_*`, `warmfleet_apply_lag_*`, `warmfleet_digest_age_seconds`,
`warmfleet_diverged_workers`, `warmfleet_divergences`, `warmfleet_resyncs`, `warmfleet_index_*`,
`warmfleet_retired_slots`) have the same value on every replica: take the maximum over replicas, not the sum.
`/workers` and `warmfleet workers` show them for each worker.

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
        rows.append(f"| `{PREFIX}{item.name.upper()}` | {default} | {item.metadata['why']} |\n")
    return SETTINGS + "".join(rows) + CONSTANT + "".join(f"- `{name}`\n" for name in sorted(CONSTANTS))


def metrics_page() -> str:
    """The text of metrics.md."""
    rows = []
    for metric in vars(Metrics()).values():
        if isinstance(metric, MetricWrapperBase):
            labels = ", ".join(metric._labelnames) or "none"
            rows.append(f"| `{metric._name}` | {metric._type} | {labels} | {metric._documentation} |\n")
    return METRICS + "".join(rows)


PAGES = {DOCS / "settings.md": settings_page, DOCS / "metrics.md": metrics_page}

if __name__ == "__main__":
    for path, page in PAGES.items():
        path.write_text(page(), encoding="utf-8")
