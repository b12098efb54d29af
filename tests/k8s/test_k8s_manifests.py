"""Every combination passes every check, and every check catches its kind of mistake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.k8s.objects import Manifest, name_of
from tests.k8s.policies import CHECKS, Program
from tests.k8s.render import COMBINATIONS, K8S, parse

Mutation = Callable[[dict[str, Manifest]], object]


@pytest.mark.parametrize("combination", COMBINATIONS)
@pytest.mark.parametrize("check", CHECKS)
def test_what_we_ship_passes(rendered: dict[str, str], program: Program, combination: str, check: str) -> None:
    assert CHECKS[check](parse(rendered[combination]), program) == []


def test_the_root_is_the_fleet_without_engines(rendered: dict[str, str]) -> None:
    names = {name_of(item).split("-settings")[0].split("-config")[0] for item in parse(rendered["root"])}

    assert {"Namespace/warmfleet", "Deployment/router", "Service/router", "PodDisruptionBudget/router"} <= names
    assert {"StatefulSet/redis", "Service/redis", "NetworkPolicy/default-deny"} <= names
    assert "Deployment/worker" not in names


def test_redis_is_bounded_and_never_evicts(rendered: dict[str, str]) -> None:
    (config,) = [item for item in parse(rendered["root"]) if "redis.conf" in item.get("data", {})]
    lines = config["data"]["redis.conf"].splitlines()

    assert "maxmemory 1gb" in lines
    assert "maxmemory-policy noeviction" in lines


def test_routers_follow_the_keys_of_clients_and_send_engines_theirs(rendered: dict[str, str]) -> None:
    objects = {name_of(item): item for item in parse(rendered["keys"])}
    pod, router = _pod(objects), _container(objects)
    given = {one["name"]: one for one in router["env"]}
    (mount,) = [one for one in router["volumeMounts"] if one["name"] == "client-keys"]

    assert given["WARMFLEET_CLIENT_KEYS_FILE"]["value"] == f"{mount['mountPath']}/keys.jsonl"
    assert "subPath" not in mount, "a file that is mounted so never changes"
    (volume,) = [one for one in pod["volumes"] if one["name"] == "client-keys"]
    assert volume["secret"]["secretName"].startswith("client-keys")
    assert given["WARMFLEET_WORKER_ADDRESSES"]["value"], "engines are listed, or the key is not sent for a probe"
    (engine,) = [one for one in _container(objects, "Deployment/worker")["env"] if one["name"] == "VLLM_API_KEY"]
    assert engine["valueFrom"] == given["WARMFLEET_WORKER_API_KEY"]["valueFrom"]


def test_every_kustomization_says_what_you_get() -> None:
    found = sorted(K8S.rglob("kustomization.yaml"))

    assert len(found) >= 7
    for path in found:
        assert path.read_text().startswith("# What you get"), path


def _pod(objects: dict[str, Manifest], name: str = "Deployment/router") -> Any:
    return objects[name]["spec"]["template"]["spec"]


def _container(objects: dict[str, Manifest], name: str = "Deployment/router") -> Any:
    return _pod(objects, name)["containers"][0]


def _context(objects: dict[str, Manifest], **values: Any) -> None:
    _container(objects)["securityContext"].update(values)


def _data(objects: dict[str, Manifest], prefix: str) -> dict[str, str]:
    (found,) = [item for key, item in objects.items() if key.startswith(f"ConfigMap/{prefix}")]
    data: dict[str, str] = found["data"]
    return data


def _secret_key(objects: dict[str, Manifest], kind: str = "secretKeyRef", name: str = "absent") -> None:
    reference = {"name": "X", "valueFrom": {kind: {"name": name, "key": "absent"}}}
    _container(objects)["env"] = [reference]


#: what went wrong -> (the check that must find it, a part of what it says, how to make the mistake)
MISTAKES: dict[str, tuple[str, str, Mutation]] = {
    "unknown field": ("schema", "replica", lambda o: o["Deployment/router"]["spec"].update(replica=3)),
    "wrong type": ("schema", "type", lambda o: o["Deployment/router"]["spec"].update(replicas="three")),
    "unknown field deep in a pod": ("schema", "httpget", lambda o: _container(o)["livenessProbe"].update(httpget={})),
    "missing required field": ("schema", "required", lambda o: o["Service/router"]["spec"]["ports"][0].pop("port")),
    "namespace not restricted": (
        "namespaces", "not restricted", lambda o: o["Namespace/warmfleet"]["metadata"].pop("labels"),
    ),
    "other namespace": ("namespaces", "default", lambda o: o["Service/redis"]["metadata"].update(namespace="default")),
    "workload selector": (
        "selectors", "its own pods",
        lambda o: o["Deployment/router"]["spec"]["template"]["metadata"].update(labels={"app": "router"}),
    ),
    "service selector": (
        "selectors", "Service/router", lambda o: o["Service/router"]["spec"].update(selector={"app": "router"}),
    ),
    "policy selector": (
        "selectors", "NetworkPolicy/redis",
        lambda o: o["NetworkPolicy/redis"]["spec"].update(podSelector={"matchLabels": {"app": "redis"}}),
    ),
    "spread selector": (
        "selectors", "spread",
        lambda o: _pod(o)["topologySpreadConstraints"][1].update(labelSelector={"matchLabels": {"app": "x"}}),
    ),
    "service name": ("selectors", "no Service", lambda o: o["StatefulSet/redis"]["spec"].update(serviceName="cache")),
    "budget selector": (
        "budgets", "0 workloads",
        lambda o: o["PodDisruptionBudget/router"]["spec"].update(selector={"matchLabels": {"app": "router"}}),
    ),
    "budget lets nobody go": (
        "budgets", "maxUnavailable 0", lambda o: o["PodDisruptionBudget/router"]["spec"].update(maxUnavailable=0),
    ),
    "no budget": ("budgets", "without a budget", lambda o: o.pop("PodDisruptionBudget/router")),
    "service port name": (
        "ports", "web", lambda o: o["Service/router"]["spec"]["ports"][0].update(targetPort="web"),
    ),
    "probe port name": ("ports", "web", lambda o: _container(o)["readinessProbe"]["httpGet"].update(port="web")),
    "policy port name": (
        "ports", "web", lambda o: o["NetworkPolicy/router"]["spec"]["ingress"][0]["ports"][0].update(port="web"),
    ),
    "probe path": ("probes", "/healthz", lambda o: _container(o)["livenessProbe"]["httpGet"].update(path="/healthz")),
    "engine probe path": (
        "probes", "/readyz",
        lambda o: _container(o, "Deployment/worker")["readinessProbe"]["httpGet"].update(path="/readyz"),
    ),
    "liveness asks what readiness asks": (
        "probes", "/readyz", lambda o: _container(o)["livenessProbe"]["httpGet"].update(path="/readyz"),
    ),
    "no startup probe": ("probes", "startupProbe", lambda o: _container(o, "StatefulSet/redis").pop("startupProbe")),
    "unknown setting": (
        "settings", "WARMFLEET_POLICI is not", lambda o: _data(o, "router-settings").update(WARMFLEET_POLICI="cost"),
    ),
    "unknown setting of a worker": (
        "settings", "WARMFLEET_MODELS is not", lambda o: _data(o, "worker-settings").update(WARMFLEET_MODELS="m"),
    ),
    "setting out of range": (
        "settings", "WARMFLEET_POLICY", lambda o: _data(o, "router-settings").update(WARMFLEET_POLICY="best"),
    ),
    "no Redis": (
        "settings", "no WARMFLEET_REDIS_URL", lambda o: _data(o, "router-settings").pop("WARMFLEET_REDIS_URL"),
    ),
    "missing secret": ("references", "no Secret absent", _secret_key),
    "missing key": (
        "references", "no key absent",
        lambda o: _secret_key(o, "configMapKeyRef", _container(o)["envFrom"][0]["configMapRef"]["name"]),
    ),
    "missing settings": (
        "references", "no ConfigMap x", lambda o: _container(o)["envFrom"][0].update(configMapRef={"name": "x"}),
    ),
    "missing key of a volume": (
        "references", "no key redis.conf",
        lambda o: _data(o, "redis-config").update(valkey=_data(o, "redis-config").pop("redis.conf")),
    ),
    "missing volume": ("references", "no volume tmp", lambda o: _pod(o).pop("volumes")),
    "missing account": ("references", "no ServiceAccount", lambda o: o.pop("ServiceAccount/router")),
    "privileged": ("restricted", "privileged", lambda o: _context(o, privileged=True)),
    "root user": ("restricted", "runAsUser is 0", lambda o: _context(o, runAsUser=0)),
    "may be root": ("restricted", "runAsNonRoot", lambda o: _pod(o)["securityContext"].update(runAsNonRoot=False)),
    "privilege escalation": ("restricted", "allowPrivilege", lambda o: _context(o, allowPrivilegeEscalation=True)),
    "writable root": ("restricted", "readOnlyRoot", lambda o: _context(o, readOnlyRootFilesystem=False)),
    "capability": (
        "restricted", "NET_ADMIN", lambda o: _context(o, capabilities={"drop": ["ALL"], "add": ["NET_ADMIN"]}),
    ),
    "capabilities kept": ("restricted", "capabilities", lambda o: _container(o)["securityContext"].pop("capabilities")),
    "no seccomp": ("restricted", "seccompProfile", lambda o: _pod(o)["securityContext"].pop("seccompProfile")),
    "host network": ("restricted", "hostNetwork", lambda o: _pod(o).update(hostNetwork=True)),
    "host path": (
        "restricted", "hostPath", lambda o: _pod(o)["volumes"].append({"name": "h", "hostPath": {"path": "/"}}),
    ),
    "token": ("restricted", "token", lambda o: _pod(o).update(automountServiceAccountToken=True)),
    "service links": ("restricted", "service links", lambda o: _pod(o).pop("enableServiceLinks")),
    "no request": ("resources", "no request for cpu", lambda o: _container(o)["resources"]["requests"].pop("cpu")),
    "no memory limit": ("resources", "memory limit", lambda o: _container(o)["resources"].pop("limits")),
    "no room for the trie": (
        "resources", "comes to", lambda o: _data(o, "router-settings").update(WARMFLEET_TRIE_BYTES="1000000000"),
    ),
    "cpu limit": ("resources", "CPU limit", lambda o: _container(o)["resources"]["limits"].update(cpu="1")),
    "too few replicas": ("rollout", "three", lambda o: o["Deployment/router"]["spec"].update(replicas=2)),
    "rollout below strength": (
        "rollout", "before their successors", lambda o: o["Deployment/router"]["spec"].pop("strategy"),
    ),
    "no preStop": ("rollout", "preStop sleeps 0", lambda o: _container(o).pop("lifecycle")),
    "grace too short": ("rollout", "grace period", lambda o: _pod(o).update(terminationGracePeriodSeconds=30)),
    "drain longer than grace": (
        "rollout", "grace period", lambda o: _data(o, "router-settings").update(WARMFLEET_SHUTDOWN_GRACE_S="600"),
    ),
    "no default deny": ("network", "default deny", lambda o: o.pop("NetworkPolicy/default-deny")),
    "router cannot reach Redis": (
        "network", "egress of router", lambda o: o["NetworkPolicy/router"]["spec"]["egress"].pop(),
    ),
    "Redis refuses workers": (
        "network", "ingress of redis", lambda o: o["NetworkPolicy/redis"]["spec"]["ingress"][0]["from"].pop(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught_by_its_check(rendered: dict[str, str], program: Program, mistake: str) -> None:
    check, message, mutate = MISTAKES[mistake]
    objects = {name_of(item): item for item in parse(rendered["overlay-workers"])}
    mutate(objects)

    problems = CHECKS[check](list(objects.values()), program)

    assert any(message in problem for problem in problems), problems


def test_every_check_has_a_mistake_that_proves_it() -> None:
    assert {check for check, _, _ in MISTAKES.values()} == set(CHECKS)
