"""Every combination passes every check, and every check catches its kind of mistake."""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from tests.k8s.fleet_policies import BUILT_IN, CHECKS, DEV
from tests.k8s.mistakes import MISTAKES, MISTAKES_OF_OTHERS, Mutation, container, pod
from tests.k8s.objects import name_of
from tests.k8s.policies import BROUGHT, Program
from tests.k8s.render import COMBINATIONS, K8S, MODEL, ROOT, every_combination, kustomize, parse, render

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("check", CHECKS)
def test_what_we_ship_passes(rendered: dict[str, str], program: Program, combination: str, check: str) -> None:
    assert CHECKS[check](parse(rendered[combination]), program) == []


@pytest.mark.long(minutes=1, shows="every combination of components renders and passes every check")
def test_every_combination_passes(program: Program, tmp_path: Path) -> None:
    problems = {}
    combinations = every_combination()
    for number, (name, parts) in enumerate(combinations.items()):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        objects = parse(render(parts, scratch))
        problems[name] = [problem for check in CHECKS.values() for problem in check(objects, program)]

    assert len(problems) == 200
    assert not any(problems.values()), {name: found for name, found in problems.items() if found}


def test_every_component_is_in_a_combination() -> None:
    folders = {path.name for path in (K8S / "components").iterdir()}
    listed = {part for parts in every_combination().values() for part in parts if "/" not in part}
    quick = {part for parts in COMBINATIONS.values() if not isinstance(parts, str) for part in parts if "/" not in part}

    in_folders = {"hpa-model", "prefill-decode"}  # of models, in shipped overlays
    assert listed == folders - in_folders
    assert quick == folders - in_folders - {"simulated-engines"}, "the latter are in the root"


def test_the_root_is_a_whole_fleet_with_simulated_engines_in_a_namespace_of_its_own(rendered: dict[str, str]) -> None:
    objects = {name_of(item): item for item in parse(rendered["root"])}
    prod = parse(rendered["prod"])

    assert {"Deployment/router", "Deployment/worker-demo", "StatefulSet/redis", "Service/router"} <= set(objects)
    assert "simulator" not in str(prod)
    assert container(objects, "Deployment/worker-demo")["command"] == ["python", "-m", "warmfleet_loadtest.engine"]
    assert "nvidia.com/gpu" not in str(objects)
    # Applying the root to a cluster with a fleet in production must not replace that fleet.
    assert {item["metadata"].get("namespace", item["metadata"]["name"]) for item in objects.values()} == {DEV}
    assert DEV not in {item["metadata"].get("namespace") for item in prod}


def test_prefill_and_decode_engines_differ_in_nothing_but_their_role(rendered: dict[str, str]) -> None:
    objects = {name_of(item): item for item in parse(rendered["prefill-decode"])}
    made = [container(objects, f"Deployment/worker{role}-chat") for role in ("-prefill", "")]

    transfers = [json.loads(part["args"].pop().removeprefix("--kv-transfer-config=")) for part in made]
    assert made[0] == made[1]
    assert [transfer.pop("kv_role") for transfer in transfers] == ["kv_producer", "kv_consumer"]
    assert transfers[0] == transfers[1] == {"kv_connector": "NixlConnector", "kv_load_failure_policy": "recompute"}
    for kind in ("Deployment", "PodDisruptionBudget"):
        selectors = [
            objects[f"{kind}/worker{role}-chat"]["spec"]["selector"]["matchLabels"] for role in ("-prefill", "")
        ]
        assert [found.pop("app.kubernetes.io/component") for found in selectors] == ["prefill", "decode"]
        assert selectors[0] == selectors[1]


@pytest.mark.parametrize("order", [("hpa-model", "prefill-decode"), ("prefill-decode", "hpa-model")])
def test_an_autoscaler_and_replicas_mean_the_engines_of_one_role(tmp_path: Path, order: tuple[str, str]) -> None:
    shipped = K8S / "overlays/prefill-decode/chat/kustomization.yaml"
    folder: dict[str, Any] = yaml.safe_load(shipped.read_text())
    reach = os.path.relpath(K8S, tmp_path.resolve())
    folder |= {"resources": [f"{reach}/model"], "components": [f"{reach}/components/{name}" for name in order]}
    folder["replicas"] = [{"name": "worker-prefill", "count": 7}]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(folder))
    objects = {name_of(item): item for item in parse(kustomize(tmp_path))}
    scaler = objects["HorizontalPodAutoscaler/worker-chat"]["spec"]["scaleTargetRef"]
    assert (scaler["kind"], scaler["name"]) == ("Deployment", "worker-chat")
    decode, prefill = (objects[f"Deployment/worker{role}-chat"]["spec"] for role in ("", "-prefill"))
    assert decode["selector"]["matchLabels"]["app.kubernetes.io/component"] == "decode"
    assert "replicas" not in decode, "the autoscaler owns it"
    assert prefill["replicas"] == 7


@pytest.mark.parametrize("name", ["root", "prod"])
def test_the_overlays_need_no_crd(rendered: dict[str, str], name: str) -> None:
    assert {item["kind"] for item in parse(rendered[name])} <= BUILT_IN


def test_the_readme_tells_every_overlay_component_and_secret() -> None:
    text = (K8S / "README.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)

    folders = {path.name for path in (K8S / "components").iterdir()}
    overlays = {f"k8s/overlays/{path.name}" for path in (K8S / "overlays").iterdir()}
    assert folders | overlays | set(BROUGHT) <= set(rows)
    for name, keys in BROUGHT.items():
        told = re.findall(rf"^\| `{name}` \|(.*)$", text, re.MULTILINE)  # a component may have the same name
        assert any(keys <= set(re.findall(r"`([^`]+)`", row)) for row in told), name


def test_the_way_to_a_collector_is_opened_as_the_docs_say(tmp_path: Path) -> None:
    (told,) = re.findall(r"^```yaml\n(.*?)^```$", (ROOT / "app/docs/tracing.md").read_text(), re.MULTILINE | re.DOTALL)
    shown = parse(render([MODEL, "redis"], tmp_path))
    (tmp_path / "kustomization.yaml").write_text((tmp_path / "kustomization.yaml").read_text() + told)
    objects = {name_of(item): item for item in parse(kustomize(tmp_path))}

    for item in shown:
        if item["kind"] == "NetworkPolicy":
            opened = [rule["ports"] for rule in objects[name_of(item)]["spec"].get("egress", [])]
            closed = [rule["ports"] for rule in item["spec"].get("egress", [])]
            added = [{port["port"] for port in ports} for ports in opened if ports not in closed]
            assert added == ([{4317, 4318}] if item["metadata"]["name"] in ("router", "worker") else []), name_of(item)
    (settings,) = [item["data"] for name, item in objects.items() if name.startswith("ConfigMap/router-settings")]
    assert settings["OTEL_EXPORTER_OTLP_ENDPOINT"].endswith(":4318")
    assert "WARMFLEET_SHUTDOWN_GRACE_S" in settings


@pytest.mark.parametrize("name", ["root", "sentinel"])
def test_redis_is_bounded_never_evicts_and_knows_its_users(rendered: dict[str, str], name: str) -> None:
    (config,) = [item for item in parse(rendered[name]) if "redis.conf" in item.get("data", {})]
    lines = config["data"]["redis.conf"].splitlines()

    assert "maxmemory 1gb" in lines
    assert "maxmemory-policy noeviction" in lines
    assert "aclfile /run/users/users.acl" in lines


def test_routers_follow_the_keys_of_clients_and_send_engines_theirs(rendered: dict[str, str]) -> None:
    objects = {name_of(item): item for item in parse(rendered["tls"])}
    spec, router = pod(objects), container(objects)
    given = {variable["name"]: variable for variable in router["env"]}
    (mount,) = [item for item in router["volumeMounts"] if item["name"] == "client-keys"]

    assert given["WARMFLEET_CLIENT_KEYS_FILE"]["value"] == f"{mount['mountPath']}/keys.jsonl"
    assert "subPath" not in mount, "a file that is mounted so never changes"
    (volume,) = [item for item in spec["volumes"] if item["name"] == "client-keys"]
    assert volume["secret"]["secretName"].startswith("client-keys")
    assert given["WARMFLEET_WORKER_ADDRESSES"]["value"], "engines are listed, or the key is not sent for a probe"
    (engine,) = [
        variable
        for variable in container(objects, "Deployment/worker-chat")["env"]
        if variable["name"] == "VLLM_API_KEY"
    ]
    assert engine["valueFrom"] == given["WARMFLEET_WORKER_API_KEY"]["valueFrom"]


def test_monitoring_has_every_alert_and_dashboard_of_its_folder(rendered: dict[str, str]) -> None:
    folder = K8S / "components/monitoring"
    objects = {name_of(item): item for item in parse(rendered["tls"])}
    (written,) = parse((folder / "alerts.yaml").read_text())
    dashboards = objects["ConfigMap/warmfleet-dashboards"]

    assert objects["PrometheusRule/warmfleet"]["spec"] == written["spec"]
    assert dashboards["data"] == {path.name: path.read_text() for path in (folder / "dashboards").iterdir()}
    assert dashboards["metadata"]["labels"]["grafana_dashboard"] == "1"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught_by_its_check(rendered: dict[str, str], program: Program, mistake: str) -> None:
    _caught(rendered["prod"], program, *MISTAKES[mistake])


@pytest.mark.parametrize("mistake", MISTAKES_OF_OTHERS)
def test_a_mistake_in_a_component_is_caught(rendered: dict[str, str], program: Program, mistake: str) -> None:
    name, check, message, mutate = MISTAKES_OF_OTHERS[mistake]
    _caught(rendered[name], program, check, message, mutate)


def _caught(text: str, program: Program, check: str, message: str, mutate: Mutation) -> None:
    objects = {name_of(item): item for item in parse(text)}
    mutate(objects)

    problems = CHECKS[check](list(objects.values()), program)

    assert any(message in problem for problem in problems), problems


def test_every_check_has_a_mistake_that_proves_it() -> None:
    found = {check for check, _, _ in MISTAKES.values()} | {check for _, check, _, _ in MISTAKES_OF_OTHERS.values()}

    assert found == set(CHECKS)
