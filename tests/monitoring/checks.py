"""Checks of queries, alerts and dashboards; each returns its faults as sentences."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Any

import promql_parser
from prometheus_client.metrics import MetricWrapperBase

from warmfleet.metrics import Metrics

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

#: Labels that Prometheus itself adds to every sample.
SCRAPED = frozenset({"job", "instance", "namespace", "pod"})
HISTOGRAM = ("_bucket", "_sum", "_count")
MIN_TEXT = 40  # characters of the description of a panel


@cache
def samples() -> Mapping[str, frozenset[str]]:
    """The name of every sample that a replica can tell -> its labels."""
    metrics = Metrics()
    found = {"up": frozenset[str]()}
    for family in metrics.registry.collect():
        found |= {sample.name: frozenset(sample.labels) for sample in family.samples}
    for metric in vars(metrics).values():
        if isinstance(metric, MetricWrapperBase):
            labels = frozenset(metric._labelnames)
            kind = metric._type
            if kind == "histogram":
                found |= {metric._name + end: labels | ({"le"} if end == "_bucket" else set()) for end in HISTOGRAM}
            else:
                found[metric._name + ("_total" if kind == "counter" else "")] = labels
    return found


def query_faults(expr: str) -> list[str]:
    """Faults of a query: it cannot be parsed, no replica has the metric, or the metric lacks a label."""
    plain = expr.replace("[$__rate_interval]", "[5m]")
    try:
        parsed = promql_parser.parse(plain)
    except ValueError as error:
        return [f"{expr!r} cannot be parsed: {error}"]
    faults, reachable = [], set(SCRAPED)
    for selector in _selectors(parsed):
        labels = samples().get(selector.name)
        if labels is None:
            faults.append(f"{selector.name} is no metric of a replica")
            continue
        reachable |= labels
        strangers = {matcher.name for matcher in selector.matchers.matchers} - labels - SCRAPED
        faults += [f"{selector.name} has no label {name}" for name in sorted(strangers)]
    reachable |= set(re.findall(r', "(\w+)", "[^"]*", "\w+", "[^"]*"\)', plain))  # made by label_replace
    grouped = {name for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", plain) for name in group.split(", ") if name}
    return faults + [f"no metric of {expr!r} has the label {name}" for name in sorted(grouped - reachable)]


def _selectors(parsed: Any) -> Iterator[Any]:
    """All vector selectors of a parsed query."""
    if isinstance(parsed, promql_parser.VectorSelector):
        yield parsed
    elif isinstance(parsed, promql_parser.MatrixSelector):
        yield parsed.vector_selector
    else:
        for name in ("expr", "lhs", "rhs"):
            if (part := getattr(parsed, name, None)) is not None:
                yield from _selectors(part)
        for part in getattr(parsed, "args", ()):
            yield from _selectors(part)


def alert_faults(rules: Mapping[str, Any], runbook: str, tested: set[str]) -> list[str]:
    """rules: the spec of a PrometheusRule. runbook: the text of operate.md. tested: alerts with a unit test."""
    found = [rule for group in rules["groups"] for rule in group["rules"]]
    names = [rule["alert"] for rule in found]
    faults = [f"{name} is there twice" for name in set(names) if names.count(name) > 1]
    faults += [f"{name} has no unit test" for name in names if name not in tested]
    told = set(re.findall(r"^\| (Warmfleet\w+) \| \S.* \| \S.* \|$", runbook, re.MULTILINE))
    faults += [f"{name} is in the runbook and is no alert" for name in sorted(told - set(names))]
    for rule in found:
        name, notes = rule["alert"], rule.get("annotations", {})
        faults += query_faults(rule["expr"])
        if rule.get("labels", {}).get("severity") not in ("critical", "warning"):
            faults.append(f"{name} has no severity")
        if not notes.get("summary"):
            faults.append(f"{name} has no summary")
        if notes.get("runbook") != "app/docs/operate.md#alerts":
            faults.append(f"{name} does not link its runbook")
        if name not in told:
            faults.append(f"{name} has no meaning and action in the runbook")
    return faults


def adapter_faults(rules: Mapping[str, Any], scalers: Iterable[Any]) -> list[str]:
    """Where autoscalers and the rules of prometheus-adapter do not fit together, or the rules not the metrics.

    rules: by ``custom`` and ``external``, as the values of its chart have them. scalers: HorizontalPodAutoscalers, and
    patches of them.
    """
    faults, served = [], {"Pods": set[str](), "External": set[str]()}
    for kind, listed, grouped in ("Pods", "custom", "pod"), ("External", "external", ""):
        for rule in rules.get(listed, ()):
            series = rule["seriesQuery"]
            faults += query_faults(series)
            faults += query_faults(adapter_query(rule, grouped, model="m"))
            if kind == "External" and (all_models := adapter_query(rule, grouped)) == adapter_query(
                rule, grouped, model="m"
            ):
                faults.append(f"{all_models} tells the sum of all models, whichever is asked for")
            labels = rule["resources"]["overrides"]
            missing = {"namespace", grouped} - {"", *labels}
            faults += [f"{series} does not tell the {name} of a sample" for name in sorted(missing)]
            faults += [f"{series} takes samples without {name}" for name in labels if f'{name}!=""' not in series]
            served[kind].add(series.partition("{")[0])
    asked = [query for scaler in scalers for query in _asked(scaler)]
    faults += [
        f"no rule serves {name} to metrics of the type {kind}" for kind, name in asked if name not in served[kind]
    ]
    return faults


def adapter_query(rule: Mapping[str, Any], grouped: str, model: str = "") -> str:
    """The query that the adapter makes of a rule, a template of Go.

    grouped: the label of the objects it is asked about, or empty. model: that of the autoscaler's selector, or empty.
    """
    values = {"namespace": "warmfleet"} | ({"model": model} if model else {}) | ({grouped: "a|b"} if grouped else {})
    matchers = [f'{name}{"=~" if "|" in value else "="}"{value}"' for name, value in values.items()]
    known = {"Series": rule["seriesQuery"].partition("{")[0], "LabelMatchers": ",".join(matchers), "GroupBy": grouped}
    known |= {f"LabelValuesByName.{name}": value for name, value in values.items()}
    query: str = re.sub(r"<<\.([\w.]+)>>", lambda found: known.get(found[1], "<no value>"), rule["metricsQuery"])
    return query


def _asked(scaler: Any) -> Iterator[tuple[str, str]]:
    """The type and the name of each metric in an autoscaler, or in a patch of one, that an adapter must serve."""
    if isinstance(scaler, list):
        for part in scaler:
            yield from _asked(part)
    elif isinstance(scaler, dict):
        for kind in ("Pods", "External"):
            if scaler.get("type") == kind and (found := scaler.get(kind.lower())):
                yield kind, found["metric"]["name"]
        yield from _asked(list(scaler.values()))


def dashboard_faults(page: Mapping[str, Any]) -> list[str]:
    """Faults of panels that are hard to read: no words, no unit, no axis, lines without names, or an overlap."""
    faults, taken = [], set[tuple[int, int]]()
    for panel in page["panels"]:
        title, defaults, place = panel["title"], panel["fieldConfig"]["defaults"], panel["gridPos"]
        if len(panel["description"]) < MIN_TEXT and not panel["description"].endswith("."):
            faults.append(f"{title} is not explained")
        if not defaults["unit"] or not defaults["custom"]["axisLabel"]:
            faults.append(f"{title} has an axis without a name or a unit")
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        if cells & taken or place["x"] + place["w"] > 24:
            faults.append(f"{title} lies over another panel, or beyond the page")
        taken |= cells
        for target in panel["targets"]:
            if not target["legendFormat"]:
                faults.append(f"{title} has a line without a name")
            faults += [f"{title}: {fault}" for fault in query_faults(target["expr"])]
    return faults
