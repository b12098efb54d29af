"""Small functions that read rendered Kubernetes objects. The checks are written with them."""

from __future__ import annotations

import re
from ipaddress import ip_address, ip_network
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

Manifest = dict[str, Any]
VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
NETWORK_PROBES = ("httpGet", "tcpSocket", "grpc")


def name_of(item: Manifest) -> str:
    return f"{item['kind']}/{item['metadata']['name']}"


def workloads(objects: list[Manifest]) -> list[Manifest]:
    return [item for item in objects if item["kind"] in ("Deployment", "StatefulSet", "DaemonSet")]


def of_kind(objects: list[Manifest], kind: str) -> list[Manifest]:
    return [item for item in objects if item["kind"] == kind]


def replicas_of(objects: list[Manifest], workload: Manifest) -> int:
    """The least number of pods: that of its autoscaler, else its own."""
    for scaler in of_kind(objects, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        if (target["kind"], target["name"]) == (workload["kind"], workload["metadata"]["name"]):
            return int(scaler["spec"].get("minReplicas", 1))
    return int(workload["spec"].get("replicas", 1))


def pod(workload: Manifest) -> Manifest:
    spec: Manifest = workload["spec"]["template"]["spec"]
    return spec


def labels(workload: Manifest) -> dict[str, str]:
    found: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return found


def role(workload: Manifest) -> str:
    """The role of a workload's pods in a fleet: router, worker or redis."""
    return labels(workload).get("app.kubernetes.io/name", "")


def of_role(objects: list[Manifest], name: str) -> list[Manifest]:
    return [item for item in workloads(objects) if role(item) == name]


def containers(workload: Manifest) -> list[Manifest]:
    spec = pod(workload)
    return [*spec.get("initContainers", []), *spec["containers"]]


def matches(selector: dict[str, Any], candidate: dict[str, str]) -> bool:
    """The selector of a Service (a flat map) or of another object. An empty one selects all pods."""
    listed = selector.get("matchExpressions", [])
    wanted = selector.get("matchLabels", {}) if listed or "matchLabels" in selector else selector
    assert all(expression["operator"] == "In" for expression in listed), "no other operator is understood here"
    return all(candidate.get(key) == value for key, value in wanted.items()) and all(
        candidate.get(expression["key"]) in expression["values"] for expression in listed
    )


def environment(objects: list[Manifest], container: Manifest) -> dict[str, str]:
    """The variables of a container. The value is ``""`` where only the cluster knows it (field references)."""
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        kind = "ConfigMap" if "configMapRef" in source else "Secret"
        name = source.get("configMapRef", source.get("secretRef"))["name"]
        found.update(data_of(objects, kind, name) or {})
    for entry in container.get("env", []):
        found[entry["name"]] = entry.get("value", "")
    return found


def undefined(container: Manifest) -> list[str]:
    """The ``$(NAME)`` of a container that Kubernetes would not replace: NAME is not set, or set later."""
    known: set[str] = set()
    known |= {"WARMFLEET_MODEL", "WARMFLEET_MODELS"} if container.get("envFrom") else set()
    wrong = []
    for entry in container.get("env", []):
        wrong += [name for name in VARIABLE.findall(entry.get("value", "")) if name not in known]
        known.add(entry["name"])
    words = " ".join([*container.get("command", []), *container.get("args", [])])
    return wrong + [name for name in VARIABLE.findall(words) if name not in known]


def probes_of(container: Manifest) -> Iterator[tuple[str, Manifest]]:
    return (
        (kind, container[kind]) for kind in ("startupProbe", "livenessProbe", "readinessProbe") if kind in container
    )


def declared_by(container: Manifest) -> set[Any]:
    return {value for port in container.get("ports", []) for value in (port.get("name"), port["containerPort"])}


def declared(workload: Manifest) -> set[Any]:
    return {value for container in pod(workload)["containers"] for value in declared_by(container)}


def data_of(objects: list[Manifest], kind: str, name: str) -> dict[str, str] | None:
    for item in of_kind(objects, kind):
        if item["metadata"]["name"] == name:
            return {**item.get("data", {}), **item.get("stringData", {})}
    return None


def referenced(spec: Manifest) -> Iterator[tuple[str, str, str | None]]:
    """(kind, name, key or None) of every ConfigMap, Secret and claim that a pod needs in order to start."""
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        for source in container.get("envFrom", []):
            for field_name, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
                if field_name in source:
                    yield kind, source[field_name]["name"], None
        for entry in container.get("env", []):
            for field_name, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
                if field_name in entry.get("valueFrom", {}):
                    found = entry["valueFrom"][field_name]
                    yield kind, found["name"], found["key"]
    for secret in spec.get("imagePullSecrets", []):
        yield "Secret", secret["name"], None
    yield from _of_volumes(spec)


def _of_volumes(spec: Manifest) -> Iterator[tuple[str, str, str | None]]:
    for volume in spec.get("volumes", []):
        for field_name, kind, name in (("configMap", "ConfigMap", "name"), ("secret", "Secret", "secretName")):
            if field_name in volume:
                yield kind, volume[field_name][name], None
                for item in volume[field_name].get("items", []):
                    yield kind, volume[field_name][name], item["key"]
        if "persistentVolumeClaim" in volume:
            yield "PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"], None


def unrestricted(context: Manifest) -> list[str]:
    """The rules of the restricted standard that a security context (pod and container merged) breaks."""
    wanted = {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    problems = [f"{key} is {context.get(key)}" for key, value in wanted.items() if context.get(key) != value]
    if context.get("privileged"):
        problems.append("privileged")
    kept = context.get("capabilities", {})
    if kept.get("drop") != ["ALL"] or kept.get("add"):
        problems.append(f"capabilities are {kept}")
    return problems


def is_open(policies: list[Manifest], side: str, own: Manifest, peer: Manifest, port: int) -> bool:
    """Whether a policy on the pods of ``own`` allows those of ``peer`` on ``port``; the receiving pod names ports."""
    receiver = own if side == "ingress" else peer
    names = {p.get("name") for c in pod(receiver)["containers"] for p in c["ports"] if p["containerPort"] == port}
    for item in policies:
        if not matches(item["spec"]["podSelector"], labels(own)):
            continue
        for rule in item["spec"].get(side, []):
            peers = rule.get("from" if side == "ingress" else "to")
            hit = peers is None or any("podSelector" in p and matches(p["podSelector"], labels(peer)) for p in peers)
            if hit and any(p["port"] in {port, *names} for p in rule.get("ports", [])):
                return True
    return False


def resolves(policies: list[Manifest], own: Manifest, server: str | dict[str, str], protocol: str) -> bool:
    """Whether these pods may ask a DNS server: an address, or a pod with these labels in another namespace."""
    for item in policies:
        if not matches(item["spec"]["podSelector"], labels(own)):
            continue
        for rule in item["spec"].get("egress", []):
            opened = any((p["port"], p["protocol"]) == (53, protocol) for p in rule.get("ports", []))
            if opened and ("to" not in rule or any(_is_peer(peer, server) for peer in rule["to"])):
                return True
    return False


def _is_peer(peer: Manifest, server: str | dict[str, str]) -> bool:
    if isinstance(server, str):
        network = peer.get("ipBlock", {}).get("cidr")
        return network is not None and ip_address(server) in ip_network(network)
    return "namespaceSelector" in peer and matches(peer.get("podSelector", {}), server)
