"""Rules that are Warmfleet's own: what the parts of a fleet must agree on, and what no shipped manifest may hold.

They have the form of the checks in policies.py. ``CHECKS`` here holds the checks of both modules.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections import Counter
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from tests.k8s import policies
from tests.k8s.objects import (
    Manifest,
    containers,
    data_of,
    declared,
    environment,
    labels,
    matches,
    name_of,
    of_kind,
    of_role,
    pod,
    probes_of,
    role,
    workloads,
)
from tests.k8s.policies import BROUGHT, CLUSTER_SCOPED, ENGINES_TO_COME, GATEWAYS_TO_COME, Check, Program

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The namespace of the overlay with public passwords, and the password.
DEV, DEV_PASSWORD = "warmfleet-dev", "dev-only"
WORKLOADS = {"Deployment", "StatefulSet"}
#: No ClusterRole, RoleBinding and so on: nothing here asks the Kubernetes API.
BUILT_IN = CLUSTER_SCOPED | WORKLOADS | {
    *("ServiceAccount", "ConfigMap", "Secret", "Service", "PersistentVolumeClaim", "PodDisruptionBudget"),
    *("NetworkPolicy", "HorizontalPodAutoscaler", "Ingress"),
}  # fmt: skip
CUSTOM = {"PodMonitor", "PrometheusRule", "Gateway", "HTTPRoute", "InferencePool"}
_PASSWORD_IN_URL = re.compile(r"[a-z+]+://[^/\s:@]*:(?!\$\()[^/\s@]+@")
#: Role -> the name and the number of the port that has its metrics.
SCRAPED = {"router": ("admin", 9090), "worker": ("http", 8000)}
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{,61}[A-Za-z0-9])?")
#: WARMFLEET_TLS_KEY is the path of a file.
_SECRET_NAME = re.compile(r"(PASSWORD|TOKEN|(?<!_TLS)_KEY)$")


def kinds(objects: list[Manifest], _: Program) -> list[str]:
    """Only needed kinds: no rights in the Kubernetes API, and no CRD but those of the opt-in components."""
    return [f"{name_of(item)}: not allowed here" for item in objects if item["kind"] not in BUILT_IN | CUSTOM]


def models(objects: list[Manifest], _: Program) -> list[str]:
    """Each worker serves one of the routers' models, each of these has workers or engines elsewhere, and the users of
    Redis are made for the same models."""
    problems = []
    served = _models(objects, "router")
    here = {
        environment(objects, part).get("WARMFLEET_MODEL", "")
        for item in of_role(objects, "worker")
        for part in pod(item)["containers"]
    }
    elsewhere = any("WARMFLEET_STATIC_WORKERS" in str(pod(item)) for item in of_role(objects, "router"))
    problems += [f"ConfigMap/models: no engine serves {model}" for model in sorted(served - here) if not elsewhere]
    for workload in workloads(objects):
        for container in containers(workload):
            found = environment(objects, container)
            wanted = {found["WARMFLEET_MODEL"]} if "WARMFLEET_MODEL" in found else set()
            problems += [f"{name_of(workload)}: routers do not serve {model}" for model in sorted(wanted - served)]
            if container["name"] == "users" and _models(objects, "users") != served:
                problems.append(f"{name_of(workload)}: users are made for {sorted(_models(objects, 'users'))}")
    return problems


def redis(objects: list[Manifest], _: Program) -> list[str]:
    """Routers and workers speak to the Redis that is there: host, port, TLS, a user of its own, and its authority."""
    problems = []
    server = next((item for item in of_kind(objects, "StatefulSet") if item["metadata"]["name"] == "redis"), None)
    for workload in workloads(objects):
        for container in containers(workload):
            given = environment(objects, container)
            url, trusted = given.get("WARMFLEET_REDIS_URL"), given.get("WARMFLEET_REDIS_CA", "")
            if trusted and not _mounted(workload, container, trusted):
                problems.append(f"{name_of(workload)}: no file {trusted}")
            if url is None or (url == "" and server is None):  # in a Secret that the operator brings
                continue
            where = name_of(workload)
            if server is None:
                problems.append(f"{where}: WARMFLEET_REDIS_URL names a Redis that nobody starts")
                continue
            problems += [f"{where}: {problem}" for problem in _wrong_url(url, server)]
            parts = urlsplit(url)
            user = "router" if container["name"] in ("router", "pools") else "worker"
            if parts.username != user or parts.password != "$(REDIS_PASSWORD)":
                problems.append(f"{where}: it must speak to Redis as {user} with the password of its Secret")
            authority = dict(parse_qsl(parts.query)).get("ssl_ca_certs", "")
            if parts.scheme.startswith("rediss") and not _mounted(workload, container, authority):
                problems.append(f"{where}: no file {authority or 'of the authority of Redis'}")
    return problems


def secrets(objects: list[Manifest], _: Program) -> list[str]:
    """No password stands in a manifest. Only the overlay for trying things out, in its own namespace, has some."""
    problems = []
    for item in objects:
        text = str(item)
        trying = item["metadata"].get("namespace") == DEV
        if item["kind"] == "Secret" and not trying:
            problems.append(f"{name_of(item)}: a Secret with content")
        if DEV_PASSWORD in text and not (trying and item["kind"] == "Secret"):
            problems.append(f"{name_of(item)}: it has a password that everybody knows")
        if item["kind"] != "Secret" and _PASSWORD_IN_URL.search(text):
            problems.append(f"{name_of(item)}: a password in a URL")
    for workload in workloads(objects):
        for container in containers(workload):
            named = {entry["name"] for entry in container.get("env", []) if entry.get("value")}
            problems += [
                f"{name_of(workload)}: {name} has its value in the manifest"
                for name in sorted(named)
                if _SECRET_NAME.search(name)
            ]
    for item in of_kind(objects, "ConfigMap"):
        given = [name for name in item.get("data", {}) if _SECRET_NAME.search(name)]
        problems += [f"{name_of(item)}: {name} belongs into a Secret" for name in given]
    return problems


def images(objects: list[Manifest], _: Program) -> list[str]:
    """Each image names its registry and a version. A name without a registry could be anybody's."""
    problems = []
    for workload in workloads(objects):
        for container in containers(workload):
            image = container["image"]
            registry, slash, rest = image.partition("/")
            if not slash or ("." not in registry and registry != "localhost"):
                problems.append(f"{name_of(workload)}: {image} names no registry")
            tag = rest.rpartition(":")[2] if ":" in rest else ""
            if not tag or tag == "latest":
                problems.append(f"{name_of(workload)}: {image} names no version")
    return problems


def engines(objects: list[Manifest], _: Program) -> list[str]:
    """Engines exist, and routers may connect to those that are listed: else every request gets 503."""
    problems = []
    router = next(item for item in workloads(objects) if item["metadata"]["name"] == "router")
    listed = environment(objects, pod(router)["containers"][0]).get("WARMFLEET_STATIC_WORKERS", "")
    if not of_role(objects, "worker") and not listed:
        problems.append("Deployment/router: no engines, neither here nor elsewhere")
    for entry in listed.split(",") if listed else []:
        lines = [entry]
        if entry.startswith("file://"):
            text = _file(objects, router, entry.removeprefix("file://"))
            if text is None:
                problems.append(f"Deployment/router: no file {entry}")
            lines = [line for line in (text or "").splitlines() if line.strip() and not line.startswith("#")]
        problems += [f"Deployment/router: {line}: no way out to it" for line in lines if not _way_out(objects, line)]
    return problems


def scaling(objects: list[Manifest], program: Program) -> list[str]:
    """An autoscaler owns the number of its pods, knows what it counts, counts its own model, and leaves some room."""
    problems = []
    for item in of_kind(objects, "HorizontalPodAutoscaler"):
        where, spec = name_of(item), item["spec"]
        target = next((found for found in workloads(objects) if name_of(found) == _target(spec)), None)
        if target is None:
            problems.append(f"{where}: there is no {_target(spec)}")
            continue
        if "replicas" in target["spec"]:
            problems.append(f"{name_of(target)}: its replicas would be reset with each apply")
        if not spec["minReplicas"] < spec["maxReplicas"]:
            problems.append(f"{where}: no room between {spec['minReplicas']} and {spec['maxReplicas']}")
        down = spec.get("behavior", {}).get("scaleDown", {}).get("selectPolicy")
        if down != "Disabled" and any(metric["type"] == "External" for metric in spec["metrics"]):
            # A sum divided by a constant is no share of the present number: half of it may be far too few.
            problems.append(f"{where}: by an external sum it would remove pods that are busy")
        for metric in spec["metrics"]:
            if metric["type"] == "Resource":
                name = metric["resource"]["name"]
                if any(name not in part["resources"].get("requests", {}) for part in pod(target)["containers"]):
                    problems.append(f"{where}: a share of {name}, which is not requested")
                continue
            counted = metric[metric["type"].lower()]["metric"]
            if counted["name"] not in program.metrics:
                problems.append(f"{where}: no metric {counted['name']}")
            if metric["type"] == "External":
                problems += [f"{where}: {problem}" for problem in _wrong_model(objects, target, counted)]
    return problems + _scaled_twice(objects)


def edges(objects: list[Manifest], _: Program) -> list[str]:
    """Every way for clients ends at a port of a Service, has TLS, and takes its certificate from a known Secret."""
    problems: list[str] = []
    services = {item["metadata"]["name"]: item["spec"]["ports"] for item in of_kind(objects, "Service")}
    open_ports = {
        (name, key) for name, ports in services.items() for port in ports for key in (port["name"], port["port"])
    }
    for item in of_kind(objects, "Ingress"):
        problems += [f"{name_of(item)}: no TLS"] * (not item["spec"].get("tls"))
        certificates = [tls.get("secretName") for tls in item["spec"].get("tls", [])]
        problems += _no_certificate(name_of(item), certificates)
        covered = {host for tls in item["spec"].get("tls", []) for host in tls["hosts"]}
        for rule in item["spec"]["rules"]:
            problems += [f"{name_of(item)}: {rule['host']} is not covered by TLS"] * (rule["host"] not in covered)
            for path in rule["http"]["paths"]:
                service = path["backend"]["service"]
                if not {(service["name"], port) for port in service["port"].values()} <= open_ports:
                    problems.append(f"{name_of(item)}: no such port of Service {service['name']}")
    listeners = {
        (item["metadata"]["name"], listener["name"])
        for item in of_kind(objects, "Gateway")
        for listener in item["spec"]["listeners"]
    }
    for item in of_kind(objects, "Gateway"):
        given = [ref["name"] for listener in item["spec"]["listeners"] for ref in listener["tls"]["certificateRefs"]]
        problems += _no_certificate(name_of(item), given)
    for item in of_kind(objects, "HTTPRoute"):
        parents = {(ref["name"], ref["sectionName"]) for ref in item["spec"]["parentRefs"]}
        problems += [f"{name_of(item)}: no listener {parent}" for parent in sorted(parents - listeners)]
        backends = [ref for rule in item["spec"]["rules"] for ref in rule["backendRefs"]]
        ends = {(ref["name"], ref["port"]) for ref in backends if "port" in ref}
        problems += [f"{name_of(item)}: no Service with port {end}" for end in sorted(ends - open_ports)]
        known = {pool["metadata"]["name"] for pool in of_kind(objects, "InferencePool")}
        asked = {ref["name"] for ref in backends if ref.get("kind") == "InferencePool"}
        problems += [f"{name_of(item)}: no InferencePool {name}" for name in sorted(asked - known)]
    return problems


def tls(objects: list[Manifest], _: Program) -> list[str]:
    """Routers with a certificate get it by a Secret that the operator brings; probes, scrapes and edges speak TLS."""
    problems = []
    for workload in of_role(objects, "router"):
        container, where = pod(workload)["containers"][0], name_of(workload)
        given = environment(objects, container)
        if "WARMFLEET_TLS_CERT" not in given:
            continue
        for name, key in ("WARMFLEET_TLS_CERT", "tls.crt"), ("WARMFLEET_TLS_KEY", "tls.key"):
            problems += [f"{where}: {name} is in no Secret"] * (not _of_secret(workload, container, given[name], key))
        problems += [
            f"{where}: {kind} does not speak TLS"
            for kind, probe in probes_of(container)
            if probe["httpGet"].get("scheme") != "HTTPS"
        ]
        notes = workload["spec"]["template"]["metadata"].get("annotations", {})
        schemes = [notes.get("prometheus.io/scheme")] * ("prometheus.io/scrape" in notes)
        for item in of_kind(objects, "PodMonitor"):
            if matches(item["spec"]["selector"], labels(workload)):
                schemes += [end.get("scheme") for end in item["spec"]["podMetricsEndpoints"]]
        problems += [f"{where}: Prometheus does not speak TLS" for scheme in schemes if scheme != "https"]
        problems += [
            f"{name_of(item)}: routers speak TLS, and it does not"
            for item in (*of_kind(objects, "Ingress"), *of_kind(objects, "HTTPRoute"))
            if "InferencePool" not in str(item)
        ]
    return problems


def pickers(objects: list[Manifest], _: Program) -> list[str]:
    """A gateway's picker is the port of every router that is one, and its members are engines, at their port; policies
    let the gateway reach both."""
    problems = []
    policies_ = of_kind(objects, "NetworkPolicy")
    services = {item["metadata"]["name"]: item["spec"] for item in of_kind(objects, "Service")}
    for item in of_kind(objects, "InferencePool"):
        where, asked = name_of(item), item["spec"]["endpointPickerRef"]
        service, number = services.get(asked["name"], {"ports": [], "selector": {"": ""}}), asked["port"]["number"]
        port: Manifest = next((each for each in service["ports"] if each["port"] == number), {})
        routers = [each for each in workloads(objects) if matches(service["selector"], labels(each))]
        problems += [f"{where}: no Service {asked['name']} of routers with port {number}"] * (not port or not routers)
        for workload in routers if port else ():
            given = environment(objects, pod(workload)["containers"][0]).get("WARMFLEET_EPP_PORT")
            places = {each["containerPort"]: each["name"] for each in pod(workload)["containers"][0]["ports"]}
            if given != str(number) or places.get(number) != port["targetPort"]:
                # Behind a Service without an address, a gateway asks pods at the number of the Service's port.
                problems.append(f"{where}: {name_of(workload)} is no picker at {number}")
            problems += _closed_to_gateways(policies_, workload, port["targetPort"])
        members = [each for each in workloads(objects) if matches(item["spec"]["selector"], labels(each))]
        for workload in of_role(objects, "worker"):
            problems += [f"{where}: {name_of(workload)} is no member"] * (workload not in members)
            problems += _closed_to_gateways(policies_, workload, "http")
        targets = {each["number"] for each in item["spec"]["targetPorts"]}
        problems += [
            f"{where}: {name_of(each)} has no port of {targets}" for each in members if not _has(each, targets)
        ]
        if asked.get("failureMode") != "FailClose":
            problems.append(f"{where}: without a picker it would send requests anywhere")
    return problems


def _has(workload: Manifest, numbers: set[int]) -> bool:
    return numbers <= declared(workload)


def _closed_to_gateways(policies_: list[Manifest], workload: Manifest, port: str) -> list[str]:
    """The fault of policies that let pods of Gateway `router` not reach this port."""
    for item in policies_:
        if not matches(item["spec"]["podSelector"], labels(workload)):
            continue
        for rule in item["spec"].get("ingress", []):
            peers = [each["podSelector"] for each in rule.get("from", []) if "podSelector" in each]
            hit = any(matches(each, GATEWAYS_TO_COME) for each in peers)
            if hit and port in [each["port"] for each in rule["ports"]]:
                return []
    return [f"NetworkPolicy: {name_of(workload)} is closed to the gateway at {port}"]


def monitors(objects: list[Manifest], _: Program) -> list[str]:
    """Each router and each engine is scraped once, on the port with its metrics, and policies let Prometheus in."""
    problems = []
    found, policies_ = of_kind(objects, "PodMonitor"), of_kind(objects, "NetworkPolicy")
    for workload in workloads(objects):
        if role(workload) not in SCRAPED:
            continue
        mine = [item for item in found if matches(item["spec"]["selector"], labels(workload))]
        notes = workload["spec"]["template"]["metadata"].get("annotations", {})
        noted = notes.get("prometheus.io/scrape") == "true"
        if len(mine) + noted != 1:
            problems.append(f"{name_of(workload)}: it is scraped {len(mine) + noted} times")
        port, number = SCRAPED[role(workload)]
        asked = [(end["port"], end["path"]) for item in mine for end in item["spec"]["podMetricsEndpoints"]]
        asked += [(notes.get("prometheus.io/port"), notes.get("prometheus.io/path"))] * noted
        problems += [
            f"{name_of(workload)}: no metrics at {place}{path}"
            for place, path in asked
            if place not in (port, str(number)) or path != "/metrics" or port not in declared(workload)
        ]
        if not any(_lets_prometheus_in(item, workload, port) for item in policies_):
            problems.append(f"{name_of(workload)}: Prometheus is not let in")
    problems += [
        f"{name_of(item)}: it selects no pods"
        for item in found
        if not any(
            matches(item["spec"]["selector"], pod) for pod in (*map(labels, workloads(objects)), ENGINES_TO_COME)
        )
    ]
    return problems


def transfers(objects: list[Manifest], _: Program) -> list[str]:
    """Engines that hand blocks to one another reach each other, have ids of their own, and lose no request by it."""
    problems = []
    for workload in of_role(objects, "worker"):
        engine, where = pod(workload)["containers"][0], name_of(workload)
        options = [arg for arg in engine.get("args", []) if arg.startswith("--kv-transfer-config=")]
        if not options:
            continue
        told = json.loads(options[-1].partition("=")[2])
        problems += [f"{where}: {len(options)} times --kv-transfer-config"] * (len(options) != 1)
        problems += [f"{where}: engine_id outlives a restart"] * ("engine_id" in told)
        if told["kv_role"] != "kv_producer" and told.get("kv_load_failure_policy") != "recompute":
            problems.append(f"{where}: a lost transfer fails its request")
        given = {entry["name"]: entry for entry in engine["env"]}
        host = given.get("VLLM_NIXL_SIDE_CHANNEL_HOST", {}).get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        problems += [f"{where}: its side channel is not at its pod's address"] * (host != "status.podIP")
        port = int(given.get("VLLM_NIXL_SIDE_CHANNEL_PORT", {}).get("value", 5600))
        problems += [f"{where}: port {port} is not declared"] * (port not in declared(workload))
        if not any(_between_engines(policy, workload, port) for policy in of_kind(objects, "NetworkPolicy")):
            problems.append(f"{where}: no way to other engines")
    return problems


def _between_engines(policy: Manifest, workload: Manifest, port: int) -> bool:
    """Whether a policy lets such engines speak to one another at a port, and at others, which UCX chooses."""
    spec, own = policy["spec"], labels(workload)
    ways = [(spec.get("ingress", []), "from"), (spec.get("egress", []), "to")]
    return matches(spec["podSelector"], own) and all(
        any(
            any("podSelector" in peer and matches(peer["podSelector"], own) for peer in rule.get(direction, []))
            and any(
                entry["port"] <= port < entry.get("endPort", 0) for entry in rule["ports"] if entry["port"] != "http"
            )
            for rule in rules
        )
        for rules, direction in ways
    )


def _lets_prometheus_in(policy: Manifest, workload: Manifest, port: str) -> bool:
    return matches(policy["spec"]["podSelector"], labels(workload)) and any(
        "kubernetes.io/metadata.name': 'monitoring" in str(rule.get("from"))
        and f"'port': '{port}'" in str(rule["ports"])
        for rule in policy["spec"].get("ingress", [])
    )


def _wrong_model(objects: list[Manifest], target: Manifest, metric: Manifest) -> Iterator[str]:
    """The fault in the model whose queue an autoscaler counts. The adapter takes the model's label for a pattern."""
    label = metric.get("selector", {}).get("matchLabels", {}).get("model")
    if label is None:
        yield "it counts the requests of all models"
        return
    if not _LABEL_VALUE.fullmatch(label):
        yield f"{label} is no value of a label, so the metrics API refuses it"
        return
    counted = {model for model in _models(objects, "router") if re.fullmatch(label, model)}
    (own,) = (environment(objects, part).get("WARMFLEET_MODEL") for part in pod(target)["containers"])
    if counted != {own}:
        yield f"it counts the requests of {sorted(counted)}, and its engines serve {own}"


def _scaled_twice(objects: list[Manifest]) -> list[str]:
    targets = Counter(_target(item["spec"]) for item in of_kind(objects, "HorizontalPodAutoscaler"))
    return [f"{target}: it has {count} autoscalers" for target, count in targets.items() if count > 1]


def _models(objects: list[Manifest], name: str) -> set[str]:
    for workload in workloads(objects):
        for container in containers(workload):
            if container["name"] == name:
                return set(environment(objects, container).get("WARMFLEET_MODELS", "").split(","))
    return set()


def _wrong_url(url: str, server: Manifest) -> Iterator[str]:
    """The fault in a URL: it does not fit the server."""
    parts = urlsplit(url)
    container = next(part for part in pod(server)["containers"] if part["name"] == "redis")
    encrypted = "--tls-port" in container.get("args", [])
    if parts.scheme.startswith("rediss") != encrypted:
        yield f"{parts.scheme}, but Redis speaks {'TLS' if encrypted else 'no TLS'}"
    hosts = parts.netloc.rpartition("@")[2].split(",")
    if "+sentinel" in parts.scheme:
        every = {f"redis-{number}.redis:26379" for number in range(server["spec"]["replicas"])}
        if set(hosts) != every or 26379 not in declared(server):
            yield f"Sentinels are {sorted(every)}, not {hosts}"
    elif hosts != ["redis:6379"] or server["spec"]["replicas"] != 1:
        yield f"{hosts} is not the one Redis"


def _mounted(workload: Manifest, container: Manifest, path: str) -> bool:
    """Whether a Secret or ConfigMap is mounted such that the file exists."""
    volumes = {volume["name"]: volume for volume in pod(workload).get("volumes", [])}
    for mount in container.get("volumeMounts", []):
        name = path.removeprefix(mount["mountPath"] + "/")
        source = volumes[mount["name"]].get("secret", {})
        if name != path and name in {item["path"] for item in source.get("items", [])}:
            return True
    return False


def _of_secret(workload: Manifest, container: Manifest, path: str, key: str) -> bool:
    """Whether the file is this key of a Secret that an operator brings, mounted as a folder so that it is followed."""
    volumes = {volume["name"]: volume.get("secret", {}) for volume in pod(workload).get("volumes", [])}
    return any(
        path == f"{mount['mountPath']}/{key}"
        and "subPath" not in mount
        and key in BROUGHT.get(volumes[mount["name"]].get("secretName", ""), ())
        for mount in container.get("volumeMounts", [])
    )


def _file(objects: list[Manifest], workload: Manifest, path: str) -> str | None:
    """The content of a file that a ConfigMap puts into the first container."""
    volumes = {volume["name"]: volume for volume in pod(workload).get("volumes", [])}
    for mount in pod(workload)["containers"][0]["volumeMounts"]:
        name = path.removeprefix(mount["mountPath"] + "/")
        source = volumes[mount["name"]].get("configMap")
        if name != path and source:
            return (data_of(objects, "ConfigMap", source["name"]) or {}).get(name)
    return None


def _way_out(objects: list[Manifest], engine: str) -> bool:
    """Whether the routers' policy lets them connect to this engine. A name may be anywhere: its port counts."""
    parts = urlsplit(engine)
    try:
        address = ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        address = None
    policy = next(item for item in of_kind(objects, "NetworkPolicy") if item["metadata"]["name"] == "router")
    for rule in policy["spec"]["egress"]:
        networks = [peer["ipBlock"]["cidr"] for peer in rule.get("to", []) if "ipBlock" in peer]
        hit = address is None or any(address in ipaddress.ip_network(network) for network in networks)
        if networks and hit and any(port["port"] == parts.port for port in rule["ports"]):
            return True
    return False


def _target(spec: Manifest) -> str:
    return f"{spec['scaleTargetRef']['kind']}/{spec['scaleTargetRef']['name']}"


def _no_certificate(where: str, names: list[str]) -> list[str]:
    return [f"{where}: nobody brings Secret {name}" for name in names if "tls.crt" not in BROUGHT.get(name, ())]


CHECKS: dict[str, Check] = policies.CHECKS | {
    check.__name__: check
    for check in (kinds, models, redis, secrets, images, engines, scaling, edges, tls, pickers, monitors, transfers)
}
