"""Rules between Kubernetes objects: one named check for each kind of mistake that a strict schema cannot see.

A check takes the rendered objects and the program's own routes and settings. It returns problems, each with the name of
its object. ``CHECKS`` holds all checks: tests run all of them on the shipped manifests, and one of them per mistake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from tests.k8s.objects import (
    NETWORK_PROBES,
    Manifest,
    containers,
    data_of,
    declared,
    declared_by,
    environment,
    is_open,
    labels,
    matches,
    name_of,
    of_kind,
    of_role,
    pod,
    probes_of,
    referenced,
    replicas_of,
    resolves,
    role,
    undefined,
    unrestricted,
    workloads,
)
from tests.k8s.schemas import problem_of

from warmfleet.errors import BadArgument

if TYPE_CHECKING:
    from warmfleet.settings import Settings

#: Memory of a router with one model, without its trie. Measured: 60 MiB for the program, 255 for a tokenizer of 6 MB in
#: both libraries, 84 for the processes of four templates, and 237 for the seconds in which a new tokenizer is tried.
ROUTER_BYTES = 640 * 2**20
#: Memory of each further model: its tokenizer and templates, at most.
MODEL_BYTES = 340 * 2**20
CLUSTER_SCOPED = {"Namespace"}
#: The Secrets that an operator brings, with their keys; k8s/README.md has the same table.
BROUGHT: dict[str, frozenset[str]] = {
    "redis-passwords": frozenset({"admin", "router", "worker", "replica", "sentinel"}),
    "redis-urls": frozenset({"router", "worker"}),
    "redis-ca": frozenset({"ca.crt"}),
    "redis-tls": frozenset({"tls.crt", "tls.key", "ca.crt"}),
    "router-tls": frozenset({"tls.crt", "tls.key"}),
    "picker-tls": frozenset({"tls.crt", "tls.key"}),
    "client-keys": frozenset({"keys.jsonl"}),
    "engine-key": frozenset({"key"}),
    "hf-token": frozenset({"token"}),
    "registry": frozenset({".dockerconfigjson"}),
}
#: The labels that policies and monitors of engines select, also in a fleet whose engines are elsewhere today.
ENGINES_TO_COME = {"app.kubernetes.io/name": "worker"}
#: The label of the pods that a controller runs for Gateway `router`, by the Gateway API's convention.
GATEWAYS_TO_COME = {"gateway.networking.k8s.io/gateway-name": "router"}
#: Where a node may answer DNS: pods of the cluster's DNS; NodeLocal DNSCache on the node, at its own address and at
#: that of Service kube-dns (here any address of Services); its pods, where the network plugin redirects to them.
DNS_SERVERS: tuple[str | dict[str, str], ...] = (
    *({"k8s-app": "kube-dns"}, "169.254.20.10", "10.96.0.10", {"k8s-app": "node-local-dns"}),
)
#: Connections between pods, with the port of the receiver. A port that the receiver does not have needs no way to it.
CONNECTIONS = (
    *(("router", "redis", 6379), ("worker", "redis", 6379), ("router", "worker", 8000)),
    *(("router", "redis", 26379), ("worker", "redis", 26379), ("redis", "redis", 26379)),
)


@dataclass(frozen=True)
class Program:
    """Routes and variables of each container, by name: HTTP paths, environment variables; the router's metrics."""

    routes: dict[str, frozenset[str]]
    settings: dict[str, frozenset[str]]
    load_router: Callable[[dict[str, str]], Settings]
    metrics: frozenset[str]


Check = Callable[[list[Manifest], Program], list[str]]


def schema(objects: list[Manifest], _: Program) -> list[str]:
    """Every field exists in this version of Kubernetes and has the right type."""
    return [f"{name_of(item)}: {problem}" for item in objects if (problem := problem_of(item))]


def namespaces(objects: list[Manifest], _: Program) -> list[str]:
    """Every object lies in a namespace of this render that enforces the restricted pod security standard."""
    known = {item["metadata"]["name"]: item["metadata"].get("labels", {}) for item in of_kind(objects, "Namespace")}
    problems = [
        f"Namespace/{name}: pod-security enforce is not restricted"
        for name, found in known.items()
        if found.get("pod-security.kubernetes.io/enforce") != "restricted"
    ]
    scoped = [item for item in objects if item["kind"] not in CLUSTER_SCOPED]
    return problems + [
        f"{name_of(item)}: namespace {item['metadata'].get('namespace')} is not in this render"
        for item in scoped
        if item["metadata"].get("namespace") not in known
    ]


def selectors(objects: list[Manifest], _: Program) -> list[str]:
    """Workloads select their own pods only, Services and policies select some pods, a spread counts its own pods."""
    problems = []
    for item in workloads(objects):
        own, where = item["spec"]["selector"], name_of(item)
        if not matches(own, labels(item)):
            problems.append(f"{where}: selector does not match its own pods")
        others = [name_of(other) for other in workloads(objects) if other is not item and matches(own, labels(other))]
        problems += [f"{where}: selects the pods of {other}" for other in others]
        spreads = pod(item).get("topologySpreadConstraints", [])
        problems += [f"{where}: spread counts other pods" for spread in spreads if spread["labelSelector"] != own]
        headless = item["spec"].get("serviceName")
        if headless and headless not in {service["metadata"]["name"] for service in of_kind(objects, "Service")}:
            problems.append(f"{where}: no Service {headless}")
    pods = [labels(workload) for workload in workloads(objects)]
    for kind, field_name, known in (
        ("Service", "selector", pods),
        ("NetworkPolicy", "podSelector", [*pods, ENGINES_TO_COME, GATEWAYS_TO_COME]),
        ("InferencePool", "selector", [*pods, ENGINES_TO_COME]),
    ):
        problems += [
            f"{name_of(item)}: selects no pods"
            for item in of_kind(objects, kind)
            if not any(matches(item["spec"][field_name], candidate) for candidate in known)
        ]
    problems += [
        f"{name_of(item)}: it leads to {sorted(found)}"
        for item in of_kind(objects, "Service")
        if len(
            found := {
                name_of(workload)
                for workload in workloads(objects)
                if matches(item["spec"]["selector"], labels(workload))
            }
        )
        > 1
    ]
    return problems


def budgets(objects: list[Manifest], _: Program) -> list[str]:
    """A PodDisruptionBudget selects the pods of exactly one workload, keeps some of them, and lets some be evicted.

    The Eviction API refuses a pod that two budgets select.
    """
    problems = []
    for workload in workloads(objects):
        found = [
            name_of(item)
            for item in of_kind(objects, "PodDisruptionBudget")
            if matches(item["spec"]["selector"], labels(workload))
        ]
        problems += [f"{name_of(workload)}: its pods are under {len(found)} budgets: {found}"] * (len(found) > 1)
    for item in of_kind(objects, "PodDisruptionBudget"):
        owners = [found for found in workloads(objects) if found["spec"]["selector"] == item["spec"]["selector"]]
        if len(owners) != 1:
            problems.append(f"{name_of(item)}: its selector equals that of {len(owners)} workloads")
            continue
        replicas, may_go = replicas_of(objects, owners[0]), item["spec"].get("maxUnavailable")
        if not isinstance(may_go, int) or not 1 <= may_go < replicas:
            problems.append(f"{name_of(item)}: maxUnavailable {may_go} of {replicas}")
    covered = {str(item["spec"]["selector"]) for item in of_kind(objects, "PodDisruptionBudget")}
    return problems + [
        f"{name_of(item)}: several replicas without a budget"
        for item in workloads(objects)
        if replicas_of(objects, item) > 1 and str(item["spec"]["selector"]) not in covered
    ]


def ports(objects: list[Manifest], _: Program) -> list[str]:
    """Ports named by Services, probes and network policies are declared by the container."""
    problems = []
    for item in of_kind(objects, "Service"):
        for workload in workloads(objects):
            if matches(item["spec"]["selector"], labels(workload)):
                wanted = [port.get("targetPort", port["port"]) for port in item["spec"]["ports"]]
                problems += _missing(name_of(item), wanted, declared(workload))
    for workload in workloads(objects):
        for container in containers(workload):
            wanted = [probe[how]["port"] for _, probe in probes_of(container) for how in NETWORK_PROBES if how in probe]
            problems += _missing(name_of(workload), wanted, declared_by(container))
    for item in of_kind(objects, "NetworkPolicy"):
        opened = [port for rule in item["spec"].get("ingress", []) for port in rule.get("ports", [])]
        rules = [port["port"] for port in opened if "endPort" not in port]  # a library chooses ports of a range
        for workload in workloads(objects):
            if matches(item["spec"]["podSelector"], labels(workload)):
                problems += _missing(name_of(item), rules, declared(workload))
    return problems


def probes(objects: list[Manifest], program: Program) -> list[str]:
    """All three probes exist, HTTP probes ask for paths that the program serves, liveness differs from readiness."""
    problems = []
    for workload in workloads(objects):
        for container in pod(workload)["containers"]:
            found = dict(probes_of(container))
            missing = {"startupProbe", "livenessProbe", "readinessProbe"} - set(found)
            problems += [f"{name_of(workload)}: no {kind}" for kind in sorted(missing)]
            served = program.routes.get(container["name"], frozenset())
            for kind, probe in found.items():
                path = probe.get("httpGet", {}).get("path")
                if path is not None and path not in served:
                    problems.append(f"{name_of(workload)}: {kind} asks for {path}, which is not served")
            if container["name"] == "router":
                paths = {kind: probe.get("httpGet", {}).get("path") for kind, probe in found.items()}
                if paths != {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}:
                    problems.append(f"{name_of(workload)}: probes are {paths}")
    return problems


def settings(objects: list[Manifest], program: Program) -> list[str]:
    """The program reads every WARMFLEET_ variable, and the router accepts the values."""
    problems = []
    for workload in workloads(objects):
        for container in containers(workload):
            found = environment(objects, container)
            read = program.settings.get(container["name"], frozenset())
            ours = {name: value for name, value in found.items() if name.startswith("WARMFLEET_")}
            problems += [f"{name_of(workload)}: {name} is not a setting" for name in sorted(set(ours) - read)]
            if "WARMFLEET_REDIS_URL" in read and "WARMFLEET_REDIS_URL" not in ours:
                problems.append(f"{name_of(workload)}: no WARMFLEET_REDIS_URL")
            if container["name"] == "router" and not problems:
                try:
                    program.load_router(ours)
                except BadArgument as error:
                    problems.append(f"{name_of(workload)}: {error}")
    return problems


def references(objects: list[Manifest], _: Program) -> list[str]:
    """ConfigMaps, Secrets, the keys that pods ask of them, claims, ServiceAccounts, volumes and variables exist."""
    problems = []
    accounts = {item["metadata"]["name"] for item in of_kind(objects, "ServiceAccount")} | {"default"}
    for workload in workloads(objects):
        spec, where = pod(workload), name_of(workload)
        if spec.get("serviceAccountName", "default") not in accounts:
            problems.append(f"{where}: no ServiceAccount {spec['serviceAccountName']}")
        for kind, name, key in referenced(spec):
            data = data_of(objects, kind, name)
            if kind == "Secret" and data is None and name in BROUGHT:
                data = dict.fromkeys(BROUGHT[name], "")
            if data is None:
                problems.append(f"{where}: no {kind} {name}")
            elif key is not None and key not in data:
                problems.append(f"{where}: {kind} {name} has no key {key}")
        problems += [f"{where}: $({name}) is not set" for part in containers(workload) for name in undefined(part)]
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        mounts = [mount["name"] for container in containers(workload) for mount in container.get("volumeMounts", [])]
        problems += [f"{where}: no volume {mount}" for mount in mounts if mount not in volumes]
    return problems


def restricted(objects: list[Manifest], _: Program) -> list[str]:
    """The restricted pod security standard, plus a read-only root and no token of the Kubernetes API."""
    problems = []
    for workload in workloads(objects):
        spec, where = pod(workload), name_of(workload)
        problems += [f"{where}: {key}" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
        problems += [f"{where}: hostPath" for volume in spec.get("volumes", []) if "hostPath" in volume]
        if spec.get("automountServiceAccountToken") is not False:
            problems.append(f"{where}: mounts a service account token")
        if spec.get("enableServiceLinks") is not False:
            problems.append(f"{where}: service links add variables nobody asked for")
        for container in containers(workload):
            context = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
            problems += [f"{where}/{container['name']}: {what}" for what in unrestricted(context)]
    return problems


def resources(objects: list[Manifest], program: Program) -> list[str]:
    """CPU and memory are requested, memory is limited, CPU is not (that would delay the first token).

    A router requests the memory that it uses once its trie is full, for all of its models.
    """
    problems = []
    for workload in workloads(objects):
        for container in containers(workload):
            found = container.get("resources", {})
            where = f"{name_of(workload)}/{container['name']}"
            asked, limit = found.get("requests", {}), found.get("limits", {})
            problems += [f"{where}: no request for {what}" for what in ("cpu", "memory") if what not in asked]
            problems += [f"{where}: no memory limit"] * ("memory" not in limit) + [f"{where}: CPU limit"] * (
                "cpu" in limit
            )
            if container["name"] == "router" and "memory" in asked:
                loaded = program.load_router(environment(objects, container))
                wanted = loaded.trie_bytes + ROUTER_BYTES + (len(loaded.models) - 1) * MODEL_BYTES
                if (given := _bytes(asked["memory"])) < wanted:
                    problems.append(f"{where}: it asks for {given} bytes of memory, and comes to {wanted}")
    return problems


def _bytes(quantity: str) -> int:
    number = quantity.rstrip("KMGi")
    return int(number) * {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}[quantity.removeprefix(number)]


def rollout(objects: list[Manifest], program: Program) -> list[str]:
    """A rollout keeps the number of routers, and a router that ends has time to finish its streams."""
    problems = []
    for item in of_kind(objects, "Deployment"):
        where, spec = name_of(item), pod(item)
        container = spec["containers"][0]
        sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        needed: float = sleep + 60
        if container["name"] == "router":
            update = item["spec"].get("strategy", {}).get("rollingUpdate", {})
            if update.get("maxUnavailable") != 0 or not update.get("maxSurge"):
                problems.append(f"{where}: a rollout takes replicas away before their successors are ready")
            if replicas_of(objects, item) < 3:
                problems.append(f"{where}: fewer than three replicas")
            loaded = program.load_router(environment(objects, container))
            needed = sleep + loaded.drain_s + loaded.shutdown_grace_s
        if sleep < 5:
            problems.append(f"{where}: preStop sleeps {sleep} s: endpoints may still point here")
        if spec.get("terminationGracePeriodSeconds", 30) <= needed:
            problems.append(f"{where}: the grace period does not exceed preStop and drain, {needed} s")
    return problems


def network(objects: list[Manifest], _: Program) -> list[str]:
    """Everything is denied by default, and each connection of the read and write path is allowed at both ends."""
    policies = of_kind(objects, "NetworkPolicy")
    problems = []
    if not any(not item["spec"]["podSelector"] and not item["spec"].get("ingress") for item in policies):
        problems.append("NetworkPolicy: no default deny")
    for source, target, port in CONNECTIONS:
        for sender, receiver in product(of_role(objects, source), of_role(objects, target)):
            if port not in declared(receiver):
                continue
            for side, own, peer in (("egress", sender, receiver), ("ingress", receiver, sender)):
                if not is_open(policies, side, own, peer, port):
                    problems.append(
                        f"NetworkPolicy: {name_of(sender)} to {name_of(receiver)}: {side} of {role(own)} is closed"
                    )
    return problems


def names(objects: list[Manifest], _: Program) -> list[str]:
    """Pods that connect to others by name may ask the cluster's DNS, wherever a node answers it."""
    policies = of_kind(objects, "NetworkPolicy")
    return [
        f"{name_of(workload)}: no way to DNS at {server} by {protocol}"
        for workload in workloads(objects)
        if role(workload) != "redis" or 26379 in declared(workload)  # Redis without Sentinels asks nobody
        for server, protocol in product(DNS_SERVERS, ("UDP", "TCP"))
        if not resolves(policies, workload, server, protocol)
    ]


def _missing(where: str, wanted: list[Any], declared: set[Any]) -> list[str]:
    return [f"{where}: port {port} is not declared" for port in wanted if port not in declared]


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        schema, namespaces, selectors, budgets, ports, probes,
        settings, references, restricted, resources, rollout, network, names,
    )
}  # fmt: skip
