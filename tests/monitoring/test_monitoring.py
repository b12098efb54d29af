"""Alerts and dashboards agree with the metrics and the runbook, and every alert fires when it should and only then.

Each kind of mistake is made on purpose as well, and must be found.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.monitoring import dashboards
from tests.monitoring.cases import CASES, unit_tests
from tests.monitoring.checks import adapter_faults, adapter_query, alert_faults, dashboard_faults, query_faults, samples
from tests.support.run.required_tools import require

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "k8s/components/monitoring/alerts.yaml"
RUNBOOK = (ROOT / "app/docs/operate.md").read_text()
SPEC: dict[str, Any] = yaml.safe_load(ALERTS.read_text())["spec"]
TESTED = {case.alert for case in CASES}
PAGES = {name: json.loads(text) for name, text in dashboards.pages().items()}


def rule(spec: dict[str, Any], name: str) -> dict[str, Any]:
    [found] = [alert for group in spec["groups"] for alert in group["rules"] if alert["alert"] == name]
    assert isinstance(found, dict)
    return found


def promtool(*words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([require("promtool"), *words], input=stdin, capture_output=True, timeout=120, check=False)


def tried(spec: dict[str, Any], folder: Path) -> tuple[bool, str]:
    """Return whether all cases hold under these rules, and the output of promtool.

    Each alert has files of its own, because promtool evaluates all rules of a file in each of its tests.
    """
    files = []
    for name in TESTED:
        bare = rule(spec, name) | {"annotations": {}}  # promtool would compare their text; `check rules` expands it
        rules, tests = folder / f"{name}.rules.yaml", folder / f"{name}.yaml"
        rules.write_text(yaml.safe_dump({"groups": [{"name": name, "rules": [bare]}]}))
        tests.write_text(yaml.safe_dump(unit_tests(name, rules.name, bare["labels"]["severity"])))
        files.append(str(tests))
    done = promtool("test", "rules", *files)
    return done.returncode == 0, (done.stdout + done.stderr).decode()


# ---------------------------------------------------------------- alerts


def test_alerts_name_metrics_that_exist_and_have_a_runbook_and_a_unit_test() -> None:
    assert alert_faults(SPEC, RUNBOOK, TESTED) == []


def test_prometheus_takes_the_rules_as_the_runbook_extracts_them(tmp_path: Path) -> None:
    [command] = re.findall(r"^sed .*alerts\.yaml", RUNBOOK, re.MULTILINE)
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=True)
    assert yaml.safe_load(done.stdout) == SPEC
    (tmp_path / "rules.yaml").write_bytes(done.stdout)
    checked = promtool("check", "rules", str(tmp_path / "rules.yaml"))
    assert checked.returncode == 0, checked.stderr
    assert f"{len(TESTED)} rules found".encode() in checked.stdout


def test_every_alert_fires_and_is_quiet_just_short_of_it(tmp_path: Path) -> None:
    well, said = tried(SPEC, tmp_path)
    assert well, said


def a_wrong_metric(spec: dict[str, Any]) -> None:
    rule(spec, "WarmfleetMemoryFills")["expr"] = "max(warmfleet_memory_ratio) > 0.75"


def a_wrong_label(spec: dict[str, Any]) -> None:
    rule(spec, "WarmfleetTaskFails")["expr"] = "sum by (taks) (rate(warmfleet_task_failures_total[10m])) > 0.01"


def a_wrong_matcher(spec: dict[str, Any]) -> None:
    expr = rule(spec, "WarmfleetErrors")["expr"]
    rule(spec, "WarmfleetErrors")["expr"] = expr.replace("status=~", "code=~")


def a_broken_expression(spec: dict[str, Any]) -> None:
    rule(spec, "WarmfleetIndexLags")["expr"] = "max(warmfleet_apply_lag_seconds > 5"


def a_missing_runbook(spec: dict[str, Any]) -> None:
    rule(spec, "WarmfleetRefuses")["alert"] = "WarmfleetOverloaded"


def no_severity(spec: dict[str, Any]) -> None:
    rule(spec, "WarmfleetRefuses")["labels"] = {}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (a_wrong_metric, "warmfleet_memory_ratio is no metric"),
        (a_wrong_label, "has the label taks"),
        (a_wrong_matcher, "has no label code"),
        (a_broken_expression, "cannot be parsed"),
        (a_missing_runbook, "WarmfleetOverloaded has no meaning and action"),
        (a_missing_runbook, "WarmfleetRefuses is in the runbook and is no alert"),
        (a_missing_runbook, "WarmfleetOverloaded has no unit test"),
        (no_severity, "WarmfleetRefuses has no severity"),
    ],
)
def test_a_mistake_in_an_alert_is_found(fault: Callable[[dict[str, Any]], None], said: str) -> None:
    spec = copy.deepcopy(SPEC)
    fault(spec)
    assert [fault for fault in alert_faults(spec, RUNBOOK, TESTED) if said in fault]


def test_a_changed_threshold_is_found_by_the_unit_tests(tmp_path: Path) -> None:
    """Every alert with a threshold fails its test if all thresholds are a third higher."""
    spec = copy.deepcopy(SPEC)
    changed = set()
    for group in spec["groups"]:
        for alert in group["rules"]:
            higher = re.sub(
                r"(?<=> )(0\.\d*[1-9]|[1-9]\d*)$", lambda found: str(float(found[0]) * 4 / 3), alert["expr"]
            )
            if higher != alert["expr"]:
                alert["expr"] = higher
                changed.add(alert["alert"])
    well, said = tried(spec, tmp_path)
    assert not well
    assert len(changed) >= 12
    assert {name for name in changed if f"{name} fires" not in said and f"alertname: {name}," not in said} == set()


def test_a_row_of_the_runbook_that_lacks_its_action_is_found() -> None:
    cut = re.sub(r"^(\| WarmfleetCertificateEnds \| .*? \|).*", r"\1 |", RUNBOOK, flags=re.MULTILINE)
    assert alert_faults(SPEC, cut, TESTED) == ["WarmfleetCertificateEnds has no meaning and action in the runbook"]


# ---------------------------------------------------------------- dashboards


def test_the_dashboards_are_current() -> None:
    there = {path.name: path.read_text() for path in dashboards.FOLDER.glob("*.json")}
    assert there == dashboards.pages(), "run: python -m tests.monitoring.dashboards"


@pytest.mark.parametrize("name", PAGES)
def test_every_panel_can_be_read_and_asks_for_metrics_that_exist(name: str) -> None:
    page = PAGES[name]
    assert len(page["panels"]) >= 8
    assert dashboard_faults(page) == []
    queries = [variable["query"]["query"] for variable in page["templating"]["list"] if variable["type"] == "query"]
    asked = [re.fullmatch(r"label_values\((\w+), (\w+)\)", query) for query in queries]
    assert all(found and found[2] in samples()[found[1]] | {"instance"} for found in asked)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda panel: panel["targets"][0].update(expr="sum(rate(warmfleet_request_total[5m]))"), "is no metric"),
        (lambda panel: panel["targets"][0].update(expr="sum(rate(warmfleet_requests_total[5m])"), "cannot be parsed"),
        (lambda panel: panel["targets"][0].update(legendFormat=""), "a line without a name"),
        (lambda panel: panel["fieldConfig"]["defaults"]["custom"].update(axisLabel=""), "an axis without a name"),
        (lambda panel: panel["gridPos"].update(y=8), "lies over another panel"),
        (lambda panel: panel.update(description=""), "is not explained"),
    ],
)
def test_a_mistake_in_a_panel_is_found(change: Callable[[dict[str, Any]], None], said: str) -> None:
    page = copy.deepcopy(PAGES["warmfleet-fleet.json"])
    change(page["panels"][0])
    assert [fault for fault in dashboard_faults(page) if said in fault]


def test_metrics_that_other_manifests_name_exist() -> None:
    """Other manifests name metrics, for example for autoscalers."""
    named = {
        name
        for path in (ROOT / "k8s").rglob("*.y*ml")
        if path != ALERTS
        for name in re.findall(r"\bwarmfleet_[a-z_]+[a-z]\b", path.read_text())
    }
    assert {name for name in named - {"warmfleet_worker", "warmfleet_loadtest"} if name not in samples()} == set()


@pytest.mark.parametrize(
    "expr", ["up", 'histogram_quantile(0.9, sum by (model, le) (rate(warmfleet_queue_seconds_bucket{model="m"}[5m])))']
)
def test_a_query_that_is_right_has_no_faults(expr: str) -> None:
    assert query_faults(expr) == []


# ---------------------------------------------------------------- autoscalers

SCALERS: list[Any] = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "k8s").rglob("*hpa.yaml"))]


def adapter_rules() -> dict[str, Any]:
    """The rules of prometheus-adapter that the README of the manifests prints."""
    text = (ROOT / "k8s/README.md").read_text()
    [block] = re.findall(r"^    rules:\n(?:      .*\n)+", text, re.MULTILINE)
    found: dict[str, Any] = yaml.safe_load(block)["rules"]
    return found


def test_an_adapter_serves_every_metric_that_an_autoscaler_asks_for() -> None:
    assert len(SCALERS) == 3
    assert adapter_faults(adapter_rules(), SCALERS) == []
    assert len(adapter_faults({}, SCALERS)) == 2, "one of pods, one of the fleet"


def models_of_the_example() -> dict[str, str]:
    """The name of each model of the example with two -> the label by which its autoscaler asks for it."""
    found = {}
    for path in (ROOT / "k8s/overlays/two-models").glob("*/kustomization.yaml"):
        text = path.read_text()
        [name] = re.findall(r"- WARMFLEET_MODEL=(\S+)$", text, re.MULTILINE)
        [found[name]] = re.findall(r"matchLabels/model\n +value: (\S+)$", text, re.MULTILINE)
    return found


def test_the_adapter_tells_each_routers_queue_and_each_models(tmp_path: Path) -> None:
    """A model's pools count together; a model whose name is longer, and other namespaces, do not count."""
    rules, labels = adapter_rules(), models_of_the_example()
    first, second = labels
    samples_ = {"a": {f"{first}#1": 2, second: 30, f"{first}-longer": 500}, "b": {f"{first}#2": 4, first: 1}}
    series = [
        {
            "series": f'warmfleet_queued_requests{{namespace="{space}",pod="{pod}",model="{model}"}}',
            "values": f"{value}x5",
        }
        for space in ("warmfleet", "other")
        for pod, models in samples_.items()
        for model, value in models.items()
    ]
    [of_pods], [of_models] = rules["custom"], rules["external"]
    told = [
        (adapter_query(of_pods, "pod"), {'{pod="a"}': 532, '{pod="b"}': 5}),
        (adapter_query(of_models, "", labels[first]), {"": 7}),
        (adapter_query(of_models, "", labels[second]), {"": 30}),
        (adapter_query(of_models, "", "not-set"), {}),
        (adapter_query(of_models, ""), {}),
    ]
    asked = [
        {
            "expr": query,
            "eval_time": "3m",
            "exp_samples": [{"value": value} | ({"labels": of} if of else {}) for of, value in values.items()],
        }
        for query, values in told
    ]
    tests = tmp_path / "queue.yaml"
    tests.write_text(yaml.safe_dump({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": asked}]}))
    done = promtool("test", "rules", str(tests))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rules: rules["custom"][0].update(seriesQuery='warmfleet_queue{namespace!="",pod!=""}'), "is no metric"),
        (lambda rules: rules["custom"][0].update(seriesQuery="warmfleet_queued_requests{pod!=}"), "cannot be parsed"),
        (lambda rules: rules["external"][0].update(metricsQuery="sum(<<.Series>>{<<.LabelMatchers>>)"), "cannot be"),
        (lambda rules: rules["external"][0].update(metricsQuery="sum(<<.Series>>)"), "the sum of all models"),
        (lambda rules: rules["custom"][0].update(metricsQuery="sum(<<.Series>>) by (modle, <<.GroupBy>>)"), "modle"),
        (lambda rules: rules["custom"][0]["resources"]["overrides"].pop("pod"), "does not tell the pod"),
        (
            lambda rules: rules["external"][0].update(seriesQuery="warmfleet_queued_requests"),
            "takes samples without namespace",
        ),
        (
            lambda rules: rules.pop("external"),
            "no rule serves warmfleet_queued_requests to metrics of the type External",
        ),
        (lambda rules: rules.pop("custom"), "no rule serves warmfleet_queued_requests to metrics of the type Pods"),
    ],
)
def test_a_mistake_in_the_adapters_rules_is_found(change: Callable[[dict[str, Any]], None], said: str) -> None:
    rules = adapter_rules()
    change(rules)
    assert [fault for fault in adapter_faults(rules, SCALERS) if said in fault]


def test_an_autoscaler_that_asks_for_another_metric_is_found() -> None:
    changed = copy.deepcopy(SCALERS)
    [worker] = [item for item in changed if isinstance(item, dict) and item["metadata"]["name"] == "worker"]
    worker["spec"]["metrics"][0]["external"]["metric"]["name"] = "warmfleet_in_flight_requests"
    assert adapter_faults(adapter_rules(), changed) == [
        "no rule serves warmfleet_in_flight_requests to metrics of the type External"
    ]
