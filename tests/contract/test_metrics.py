"""The names of all metrics follow one rule, their labels are few, and promtool finds nothing to say about them."""

from __future__ import annotations

import re
import subprocess

from prometheus_client.metrics import MetricWrapperBase
from tests.support.run.required_tools import require

from warmfleet.metrics import Metrics

#: A metric's name ends in its unit.
UNITS = ("seconds", "bytes", "ratio", "info", "tokens", "blocks", "batches", "tokens_per_second")
#: A metric that is 0 or 1 has an adjective as its name.
TRUTHS = ("routable",)
LABELS = {
    *("model", "worker", "client", "endpoint", "status", "reservation", "result", "reason", "outcome", "where"),
    *("limit", "policy", "why", "kind", "source", "percentile", "task", "state", "proof", "version", "python", "cause"),
    *("what", "answer"),
}


def families() -> list[MetricWrapperBase]:
    return [metric for metric in vars(Metrics()).values() if isinstance(metric, MetricWrapperBase)]


def test_names_follow_the_rule() -> None:
    """``warmfleet_``, then things in the plural, or what is measured with its unit at the end."""
    names = [metric._name for metric in families()]
    assert len(names) > 70
    assert [name for name in names if not re.fullmatch(r"warmfleet(_[a-z]+)+", name)] == []
    ends = tuple(f"_{end}" for end in (*UNITS, *TRUTHS))
    assert [name for name in names if not name.endswith((*ends, "s"))] == []
    unitless = [m._name for m in families() if m._type == "histogram" and not m._name.endswith(("_seconds", "_bytes"))]
    assert unitless == []


def test_labels_are_those_that_are_known_to_be_bounded() -> None:
    assert {label for metric in families() for label in metric._labelnames} == LABELS


def test_promtool_finds_nothing_to_say() -> None:
    metrics = Metrics()
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase) and metric._labelnames:
            metric.labels(*("x" for _ in metric._labelnames))
    checked = subprocess.run(
        [require("promtool"), "check", "metrics"], input=metrics.render(), capture_output=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
    wrong = metrics.render().replace(b"warmfleet_retries_total", b"warmfleet_retries")
    seeded = subprocess.run(
        [require("promtool"), "check", "metrics"], input=wrong, capture_output=True, timeout=60, check=False
    )
    assert b"warmfleet_retries" in seeded.stderr
