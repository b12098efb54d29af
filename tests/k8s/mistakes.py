"""Mistakes made on purpose, each with the check that must find it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.k8s.objects import Manifest

Mutation = Callable[["dict[str, Manifest]"], object]


def pod(objects: dict[str, Manifest], name: str = "Deployment/router") -> Any:
    return objects[name]["spec"]["template"]["spec"]


def container(objects: dict[str, Manifest], name: str = "Deployment/router") -> Any:
    return pod(objects, name)["containers"][0]


def _context(objects: dict[str, Manifest], **values: Any) -> None:
    container(objects)["securityContext"].update(values)


def _variable(objects: dict[str, Manifest], name: str) -> Any:
    """A variable of the router's container."""
    (found,) = [entry for entry in container(objects)["env"] if entry["name"] == name]
    return found


def _data(objects: dict[str, Manifest], prefix: str) -> dict[str, str]:
    (found,) = [item for key, item in objects.items() if key.startswith(f"ConfigMap/{prefix}")]
    data: dict[str, str] = found["data"]
    return data


def _secret_key(objects: dict[str, Manifest], kind: str = "secretKeyRef", name: str = "absent") -> None:
    reference = {"name": "X", "valueFrom": {kind: {"name": name, "key": "absent"}}}
    container(objects)["env"] = [reference]


def _spec(objects: dict[str, Manifest], name: str) -> Any:
    return objects[name]["spec"]


def _url(objects: dict[str, Manifest], value: str) -> None:
    _variable(objects, "WARMFLEET_REDIS_URL").update(value=value)


def _path(objects: dict[str, Manifest]) -> Any:
    return _spec(objects, "Ingress/router")["rules"][0]["http"]["paths"][0]


def _route(objects: dict[str, Manifest]) -> Any:
    return _spec(objects, "HTTPRoute/router")["rules"][0]


def _metric(objects: dict[str, Manifest]) -> Any:
    return _spec(objects, "HorizontalPodAutoscaler/worker-chat")["metrics"][0]["external"]["metric"]


def _note(objects: dict[str, Manifest], name: str) -> None:
    _spec(objects, "Deployment/router")["template"]["metadata"].update(annotations={name: "true"})


def _decode_variable(objects: dict[str, Manifest], name: str) -> Any:
    return next(entry for entry in container(objects, "Deployment/worker-chat")["env"] if entry["name"] == name)


def _transfer(objects: dict[str, Manifest], **values: Any) -> None:
    """Change the KV connector of the decode engines."""
    engine = container(objects, "Deployment/worker-chat")
    told = json.loads(engine["args"].pop().partition("=")[2])
    engine["args"].append(f"--kv-transfer-config={json.dumps(told | values)}")


def _unlabelled(objects: dict[str, Manifest], *kinds: str) -> None:
    """Selectors of these kinds, and the labels of pods, name no model: as in a second copy of the same manifests."""
    for name, item in objects.items():
        if name.partition("/")[0] not in kinds:
            continue
        places = [item["spec"].get("selector", {}).get("matchLabels", {})]
        if item["kind"] == "Deployment":
            template = item["spec"]["template"]
            places += [template["metadata"]["labels"]]
            places += [
                constraint["labelSelector"]["matchLabels"]
                for constraint in template["spec"]["topologySpreadConstraints"]
            ]
        for place in places:
            place.pop("app.kubernetes.io/instance", None)


def _count(objects: dict[str, Manifest], **labels: str) -> None:
    """The model whose queue the autoscaler of `chat` counts."""
    _metric(objects)["selector"].update(matchLabels=labels)


def _dns(objects: dict[str, Manifest], **rule: Any) -> None:
    """Change the rule of the policy for DNS."""
    _spec(objects, "NetworkPolicy/dns")["egress"][0].update(rule)


def _secret(objects: dict[str, Manifest], text: str) -> None:
    objects["Secret/s"] = {"kind": "Secret", "metadata": {"name": "s", "namespace": "warmfleet"}, "data": {"a": text}}


#: a mistake in the overlay `prod` -> (the check that must find it, a part of its words, how to make the mistake)
MISTAKES: dict[str, tuple[str, str, Mutation]] = {
    "unknown field": ("schema", "replica", lambda o: _spec(o, "Deployment/router").update(replica=3)),
    "wrong type": ("schema", "type", lambda o: _spec(o, "Deployment/worker-chat").update(replicas="two")),
    "unknown field deep in a pod": ("schema", "httpget", lambda o: container(o)["livenessProbe"].update(httpget={})),
    "missing required field": ("schema", "required", lambda o: _spec(o, "Service/router")["ports"][0].pop("port")),
    "namespace not restricted": (
        "namespaces", "not restricted", lambda o: o["Namespace/warmfleet"]["metadata"].pop("labels"),
    ),
    "other namespace": ("namespaces", "default", lambda o: o["Service/redis"]["metadata"].update(namespace="default")),
    "workload selector": (
        "selectors", "its own pods",
        lambda o: _spec(o, "Deployment/router")["template"]["metadata"].update(labels={"app": "router"}),
    ),
    "service selector": (
        "selectors", "Service/router", lambda o: _spec(o, "Service/router").update(selector={"app": "router"}),
    ),
    "policy selector": (
        "selectors", "NetworkPolicy/redis",
        lambda o: _spec(o, "NetworkPolicy/redis").update(podSelector={"matchLabels": {"app": "redis"}}),
    ),
    "spread selector": (
        "selectors", "spread",
        lambda o: pod(o)["topologySpreadConstraints"][1].update(labelSelector={"matchLabels": {"app": "x"}}),
    ),
    "service name": ("selectors", "no Service", lambda o: _spec(o, "StatefulSet/redis").update(serviceName="cache")),
    "budget selector": (
        "budgets", "0 workloads",
        lambda o: _spec(o, "PodDisruptionBudget/router").update(selector={"matchLabels": {"app": "router"}}),
    ),
    "budget lets nobody go": (
        "budgets", "maxUnavailable 0", lambda o: _spec(o, "PodDisruptionBudget/router").update(maxUnavailable=0),
    ),
    "no budget": ("budgets", "without a budget", lambda o: o.pop("PodDisruptionBudget/router")),
    "service port name": (
        "ports", "web", lambda o: _spec(o, "Service/router")["ports"][0].update(targetPort="web"),
    ),
    "probe port name": ("ports", "web", lambda o: container(o)["readinessProbe"]["httpGet"].update(port="web")),
    "policy port name": (
        "ports", "web", lambda o: _spec(o, "NetworkPolicy/router")["ingress"][0]["ports"][0].update(port="web"),
    ),
    "probe path": ("probes", "/healthz", lambda o: container(o)["livenessProbe"]["httpGet"].update(path="/healthz")),
    "engine probe path": (
        "probes", "/readyz",
        lambda o: container(o, "Deployment/worker-chat")["readinessProbe"]["httpGet"].update(path="/readyz"),
    ),
    "liveness asks what readiness asks": (
        "probes", "/readyz", lambda o: container(o)["livenessProbe"]["httpGet"].update(path="/readyz"),
    ),
    "no startup probe": ("probes", "startupProbe", lambda o: container(o, "StatefulSet/redis").pop("startupProbe")),
    "unknown setting": (
        "settings", "WARMFLEET_POLICI is not", lambda o: _data(o, "router-settings").update(WARMFLEET_POLICI="cost"),
    ),
    "unknown setting of a worker": (
        "settings", "WARMFLEET_MODELS is not", lambda o: _data(o, "worker-settings").update(WARMFLEET_MODELS="m"),
    ),
    "setting out of range": (
        "settings", "WARMFLEET_POLICY", lambda o: _data(o, "router-settings").update(WARMFLEET_POLICY="best"),
    ),
    "no Redis": ("settings", "no WARMFLEET_REDIS_URL", lambda o: container(o).pop("env")),
    "missing secret": ("references", "no Secret absent", _secret_key),
    "missing key of a Secret that the operator brings": (
        "references", "redis-passwords has no key redis",
        lambda o: _variable(o, "REDIS_PASSWORD")["valueFrom"]["secretKeyRef"].update(key="redis"),
    ),
    "a variable that is set later": (
        "references", "$(REDIS_PASSWORD) is not set",
        lambda o: container(o)["env"].reverse(),
    ),
    "missing key": (
        "references", "no key absent",
        lambda o: _secret_key(o, "configMapKeyRef", container(o)["envFrom"][0]["configMapRef"]["name"]),
    ),
    "missing settings": (
        "references", "no ConfigMap x", lambda o: container(o)["envFrom"][0].update(configMapRef={"name": "x"}),
    ),
    "missing key of a volume": (
        "references", "no key redis.conf",
        lambda o: _data(o, "redis-config").update(valkey=_data(o, "redis-config").pop("redis.conf")),
    ),
    "missing volume": ("references", "no volume tmp", lambda o: pod(o).pop("volumes")),
    "missing claim": (
        "references", "no PersistentVolumeClaim models",
        lambda o: pod(o)["volumes"].append({"name": "m", "persistentVolumeClaim": {"claimName": "models"}}),
    ),
    "missing account": ("references", "no ServiceAccount", lambda o: o.pop("ServiceAccount/router")),
    "privileged": ("restricted", "privileged", lambda o: _context(o, privileged=True)),
    "root user": ("restricted", "runAsUser is 0", lambda o: _context(o, runAsUser=0)),
    "may be root": ("restricted", "runAsNonRoot", lambda o: pod(o)["securityContext"].update(runAsNonRoot=False)),
    "privilege escalation": ("restricted", "allowPrivilege", lambda o: _context(o, allowPrivilegeEscalation=True)),
    "writable root": ("restricted", "readOnlyRoot", lambda o: _context(o, readOnlyRootFilesystem=False)),
    "capability": (
        "restricted", "NET_ADMIN", lambda o: _context(o, capabilities={"drop": ["ALL"], "add": ["NET_ADMIN"]}),
    ),
    "capabilities kept": ("restricted", "capabilities", lambda o: container(o)["securityContext"].pop("capabilities")),
    "no seccomp": ("restricted", "seccompProfile", lambda o: pod(o)["securityContext"].pop("seccompProfile")),
    "host network": ("restricted", "hostNetwork", lambda o: pod(o).update(hostNetwork=True)),
    "host path": (
        "restricted", "hostPath", lambda o: pod(o)["volumes"].append({"name": "h", "hostPath": {"path": "/"}}),
    ),
    "token": ("restricted", "token", lambda o: pod(o).update(automountServiceAccountToken=True)),
    "service links": ("restricted", "service links", lambda o: pod(o).pop("enableServiceLinks")),
    "no request": ("resources", "no request for cpu", lambda o: container(o)["resources"]["requests"].pop("cpu")),
    "no memory limit": ("resources", "memory limit", lambda o: container(o)["resources"].pop("limits")),
    "no room for the trie": (
        "resources", "comes to", lambda o: _data(o, "router-settings").update(WARMFLEET_TRIE_BYTES="1000000000"),
    ),
    "cpu limit": ("resources", "CPU limit", lambda o: container(o)["resources"]["limits"].update(cpu="1")),
    "too few replicas": (
        "rollout", "three",
        lambda o: _spec(o, "HorizontalPodAutoscaler/router").update(minReplicas=2),
    ),
    "rollout below strength": (
        "rollout", "before their successors", lambda o: _spec(o, "Deployment/router").pop("strategy"),
    ),
    "no preStop": ("rollout", "preStop sleeps 0", lambda o: container(o).pop("lifecycle")),
    "grace too short": ("rollout", "grace period", lambda o: pod(o).update(terminationGracePeriodSeconds=30)),
    "drain longer than grace": (
        "rollout", "grace period", lambda o: _data(o, "router-settings").update(WARMFLEET_SHUTDOWN_GRACE_S="600"),
    ),
    "no default deny": ("network", "default deny", lambda o: o.pop("NetworkPolicy/default-deny")),
    "router cannot reach Redis": (
        "network", "egress of router", lambda o: _spec(o, "NetworkPolicy/router")["egress"].pop(),
    ),
    "Redis refuses workers": (
        "network", "ingress of redis", lambda o: _spec(o, "NetworkPolicy/redis")["ingress"][0]["from"].pop(),
    ),
    "rights in the Kubernetes API": (
        "kinds", "Role/router: not allowed", lambda o: o.update(role={"kind": "Role", "metadata": {"name": "router"}}),
    ),
    "another model at the workers": (
        "models", "routers do not serve other", lambda o: _data(o, "worker-settings").update(WARMFLEET_MODEL="other"),
    ),
    "another model at the routers": (
        "models", "routers do not serve Qwen", lambda o: _data(o, "models").update(WARMFLEET_MODELS="other"),
    ),
    "users of Redis for another model": (
        "models", "users are made for ['other']",
        lambda o: _spec(o, "StatefulSet/redis")["template"]["spec"]["initContainers"][0].update(
            env=[{"name": "WARMFLEET_MODELS", "value": "other"}]
        ),
    ),
    "TLS to a Redis without": (
        "redis", "rediss, but Redis speaks no TLS",
        lambda o: _url(o, "rediss://router:$(REDIS_PASSWORD)@redis:6379/0"),
    ),
    "another port of Redis": (
        "redis", "is not the one Redis",
        lambda o: _url(o, "redis://router:$(REDIS_PASSWORD)@redis:6380/0"),
    ),
    "Sentinels that are not there": (
        "redis", "Sentinels are",
        lambda o: _url(o, "redis+sentinel://router:$(REDIS_PASSWORD)@redis:26379/w"),
    ),
    "another user of Redis": (
        "redis", "as router", lambda o: _url(o, "redis://redis:6379/0"),
    ),
    "two Redis for a URL of one": (
        "redis", "not the one Redis",
        lambda o: _spec(o, "StatefulSet/redis").update(replicas=2),
    ),
    "no Redis at all": ("redis", "that nobody starts", lambda o: o.pop("StatefulSet/redis")),
    "a Secret with content": (
        "secrets", "a Secret with content",
        lambda o: _secret(o, "eA=="),
    ),
    "the password for trying things out": (
        "secrets", "that everybody knows",
        lambda o: _secret(o, "dev-only"),
    ),
    "a password in a URL": (
        "secrets", "a password in a URL",
        lambda o: _url(o, "redis://router:hunter2@redis:6379/0"),
    ),
    "a password in a variable": (
        "secrets", "REDIS_PASSWORD has its value", lambda o: _variable(o, "REDIS_PASSWORD").update(value="hunter2"),
    ),
    "a key in the settings": (
        "secrets", "belongs into a Secret", lambda o: _data(o, "router-settings").update(WARMFLEET_ADMIN_KEY="hunter2"),
    ),
    "an image that could be anybody's": (
        "images", "names no registry", lambda o: container(o).update(image="warmfleet-router:0.1.0"),
    ),
    "an image without a version": (
        "images", "names no version",
        lambda o: container(o).update(image="registry.example.com/warmfleet-router:latest"),
    ),
    "no engines": ("engines", "no engines", lambda o: o.pop("Deployment/worker-chat")),
    "no way out to a listed engine": (
        "engines", "http://10.9.9.9:8000: no way out",
        lambda o: container(o)["env"].append({"name": "WARMFLEET_STATIC_WORKERS", "value": "http://10.9.9.9:8000"}),
    ),
    "replicas beside an autoscaler": (
        "scaling", "reset with each apply", lambda o: _spec(o, "Deployment/router").update(replicas=3),
    ),
    "an autoscaler of nothing": (
        "scaling", "there is no Deployment/x",
        lambda o: _spec(o, "HorizontalPodAutoscaler/router")["scaleTargetRef"].update(name="x"),
    ),
    "an autoscaler without room": (
        "scaling", "no room", lambda o: _spec(o, "HorizontalPodAutoscaler/router").update(maxReplicas=3),
    ),
    "an autoscaler by a share of nothing": (
        "scaling", "which is not requested", lambda o: container(o)["resources"]["requests"].pop("cpu"),
    ),
    "an autoscaler by a metric that nobody has": (
        "scaling", "no metric warmfleet_queue_length",
        lambda o: _spec(o, "HorizontalPodAutoscaler/router")["metrics"].append(
            {"type": "Pods", "pods": {"metric": {"name": "warmfleet_queue_length"}}}
        ),
    ),
    "nobody scrapes the routers": (
        "monitors", "scraped 0 times",
        lambda o: _spec(o, "Deployment/router")["template"]["metadata"].pop("annotations"),
    ),
    "Prometheus is not let in": (
        "monitors", "not let in", lambda o: _spec(o, "NetworkPolicy/router")["ingress"].pop(),
    ),
}  # fmt: skip

POOL = "InferencePool/engines"
KUBE_DNS = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}}}
NODE_LOCAL = {"ipBlock": {"cidr": "169.254.20.10/32"}}

#: Mistakes in other combinations -> (the combination, the check, a part of its words, the mistake).
MISTAKES_OF_OTHERS: dict[str, tuple[str, str, str, Mutation]] = {
    "no TLS to a Redis with it": (
        "tls", "redis", "redis, but Redis speaks TLS",
        lambda o: _url(o, "redis://router:$(REDIS_PASSWORD)@redis:6379/0"),
    ),
    "no authority": ("tls", "redis", "no file /run/redis-ca/ca.crt", lambda o: container(o)["volumeMounts"].clear()),
    "transfers that fail requests": (
        "prefill-decode", "transfers", "a lost transfer fails its request",
        lambda o: _transfer(o, kv_load_failure_policy="fail"),
    ),
    "an engine's id that stays": (
        "prefill-decode", "transfers", "engine_id outlives a restart", lambda o: _transfer(o, engine_id="decode-1"),
    ),
    "a side channel that others cannot reach": (
        "prefill-decode", "transfers", "not at its pod's address",
        lambda o: _decode_variable(o, "VLLM_NIXL_SIDE_CHANNEL_HOST").pop("valueFrom"),
    ),
    "no way between engines": (
        "prefill-decode", "transfers", "no way to other engines",
        lambda o: o.pop("NetworkPolicy/worker-transfers-chat"),
    ),
    "no TLS for clients": ("tls", "edges", "no TLS", lambda o: _spec(o, "Ingress/router").pop("tls")),
    "a host without TLS": (
        "tls", "edges", "b.example.com is not covered",
        lambda o: _spec(o, "Ingress/router")["rules"][0].update(host="b.example.com"),
    ),
    "a certificate that nobody brings": (
        "tls", "edges", "nobody brings Secret x", lambda o: _spec(o, "Ingress/router")["tls"][0].update(secretName="x"),
    ),
    "a port that the Service lacks": (
        "tls", "edges", "no such port",
        lambda o: _path(o)["backend"]["service"].update(port={"number": 8080}),
    ),
    "a metric of a replica that nobody has": (
        "tls", "scaling", "no metric warmfleet_waiting",
        lambda o: _metric(o).update(name="warmfleet_waiting"),
    ),
    "an autoscaler that removes busy engines": (
        "tls", "scaling", "remove pods that are busy",
        lambda o: _spec(o, "HorizontalPodAutoscaler/worker-chat")["behavior"]["scaleDown"].update(selectPolicy="Min"),
    ),
    "an autoscaler that removes busy engines by default": (
        "tls", "scaling", "remove pods that are busy",
        lambda o: _spec(o, "HorizontalPodAutoscaler/worker-chat")["behavior"].pop("scaleDown"),
    ),
    "scraped twice": (
        "tls", "monitors", "scraped 2 times",
        lambda o: _note(o, "prometheus.io/scrape"),
    ),
    "a monitor of the clients' port": (
        "tls", "monitors", "no metrics at http/metrics",
        lambda o: _spec(o, "PodMonitor/router")["podMetricsEndpoints"][0].update(port="http"),
    ),
    "a monitor of no pods": (
        "tls", "monitors", "selects no pods",
        lambda o: _spec(o, "PodMonitor/router")["selector"].update(matchLabels={"app": "x"}),
    ),
    "an unknown field of a CRD": (
        "tls", "schema", "podMetricEndpoints", lambda o: _spec(o, "PodMonitor/router").update(podMetricEndpoints=[]),
    ),
    "a wrong type in a CRD": (
        "sentinel", "schema", "'443' is not of type",
        lambda o: _spec(o, "Gateway/router")["listeners"][0].update(port="443"),
    ),
    "pools are entered into no Redis": (
        "tls", "settings", "no WARMFLEET_REDIS_URL", lambda o: pod(o)["initContainers"][0].update(env=[]),
    ),
    "a route to a port that the Service lacks": (
        "sentinel", "edges", "no Service with port",
        lambda o: _spec(o, "HTTPRoute/router")["rules"][0]["backendRefs"][0].update(port=8080),
    ),
    "a route of another gateway": (
        "sentinel", "edges", "no listener",
        lambda o: _spec(o, "HTTPRoute/router")["parentRefs"][0].update(sectionName="http"),
    ),
    "a certificate of the gateway that nobody brings": (
        "sentinel", "edges", "nobody brings Secret x",
        lambda o: _spec(o, "Gateway/router")["listeners"][0]["tls"]["certificateRefs"][0].update(name="x"),
    ),
    "a pool without its group": (
        "picker", "schema", "is not valid under any", lambda o: _route(o)["backendRefs"][0].pop("group"),
    ),
    "a picker without a port": (
        "picker", "schema", "'port' is a required", lambda o: _spec(o, POOL)["endpointPickerRef"].pop("port"),
    ),
    "an unknown field of a pool": (
        "picker", "schema", "targetPortNumber", lambda o: _spec(o, POOL).update(targetPortNumber=8000),
    ),
    "a pool of no pods": (
        "picker", "selectors", "InferencePool/engines: selects no pods",
        lambda o: _spec(o, POOL).update(selector={"matchLabels": {"app": "x"}}),
    ),
    "a route to a pool that is not there": (
        "picker", "edges", "no InferencePool x", lambda o: _route(o)["backendRefs"][0].update(name="x"),
    ),
    "a route past the picker": (
        "picker", "tls", "routers speak TLS",
        lambda o: _route(o).update(backendRefs=[{"name": "router", "port": 80}]),
    ),
    "a certificate of routers that nobody brings": (
        "picker", "tls", "WARMFLEET_TLS_KEY is in no Secret",
        lambda o: [volume["secret"].update(secretName="x") for volume in pod(o)["volumes"] if "secret" in volume],
    ),
    "a certificate that is never followed": (
        "picker", "tls", "WARMFLEET_TLS_CERT is in no Secret",
        lambda o: [mount.update(subPath="tls.crt") for mount in container(o)["volumeMounts"]],
    ),
    "a probe without TLS": (
        "picker", "tls", "readinessProbe does not speak TLS",
        lambda o: container(o)["readinessProbe"]["httpGet"].pop("scheme"),
    ),
    "a monitor without TLS": (
        "picker", "tls", "Prometheus does not speak TLS",
        lambda o: _spec(o, "PodMonitor/router")["podMetricsEndpoints"][0].pop("scheme"),
    ),
    "a picker that is no Service's": (
        "picker", "pickers", "no Service router of routers with port 9002",
        lambda o: _spec(o, POOL)["endpointPickerRef"].update(name="router"),
    ),
    "a picker at another port": (
        "picker", "pickers", "Deployment/router is no picker at 9002",
        lambda o: _variable(o, "WARMFLEET_EPP_PORT").update(value="9001"),
    ),
    "a Service of pickers that leads to another port": (
        "picker", "pickers", "Deployment/router is no picker at 9002",
        lambda o: _spec(o, "Service/picker")["ports"][0].update(targetPort="http"),
    ),
    "a pool of one model": (
        "picker", "pickers", "Deployment/worker-code is no member",
        lambda o: _spec(o, POOL)["selector"]["matchLabels"].update({"app.kubernetes.io/instance": "chat"}),
    ),
    "a pool at a port that engines lack": (
        "picker", "pickers", "Deployment/worker-chat has no port",
        lambda o: _spec(o, POOL).update(targetPorts=[{"number": 8080}]),
    ),
    "a gateway that goes on without its picker": (
        "picker", "pickers", "send requests anywhere",
        lambda o: _spec(o, POOL)["endpointPickerRef"].update(failureMode="FailOpen"),
    ),
    "pickers that are closed to the gateway": (
        "picker", "pickers", "Deployment/router is closed to the gateway", lambda o: o.pop("NetworkPolicy/picker"),
    ),
    "engines that are closed to the gateway": (
        "picker", "pickers", "Deployment/worker-code is closed to the gateway",
        lambda o: o.pop("NetworkPolicy/engines-of-gateway"),
    ),
    "fewer Sentinels than the URL": (
        "sentinel", "redis", "Sentinels are", lambda o: _spec(o, "StatefulSet/redis").update(replicas=5),
    ),
    "Sentinels that do not reach each other": (
        "sentinel", "network", "egress of redis is closed", lambda o: _spec(o, "NetworkPolicy/redis")["egress"].clear(),
    ),
    "no egress to engines elsewhere": (
        "sentinel", "engines", "http://10.20.0.11:8000: no way out",
        lambda o: _spec(o, "NetworkPolicy/router").update(
            egress=[rule for rule in _spec(o, "NetworkPolicy/router")["egress"] if "ipBlock" not in str(rule)]
        ),
    ),
    "the list of engines is not mounted": (
        "elsewhere", "engines", "no file file:///run/engines/engines.txt",
        lambda o: _data(o, "engines").update(other=_data(o, "engines").pop("engines.txt")),
    ),
    "no Secret for Redis elsewhere": (
        "external", "references", "redis-urls has no key url",
        lambda o: _variable(o, "WARMFLEET_REDIS_URL")["valueFrom"]["secretKeyRef"].update(key="url"),
    ),
    "no authority of Redis elsewhere": (
        "external", "redis", "no file /run/redis-ca/ca.crt", lambda o: container(o)["volumeMounts"].clear(),
    ),
    "two models select each other's pods": (
        "two-models", "selectors", "Deployment/worker-chat: selects the pods of Deployment/worker-code",
        lambda o: _unlabelled(o, "Deployment"),
    ),
    "a model whose selector matches all models": (
        "two-models", "selectors", "Deployment/worker-chat: selects the pods of Deployment/worker-code",
        lambda o: _spec(o, "Deployment/worker-chat")["selector"]["matchLabels"].pop("app.kubernetes.io/instance"),
    ),
    "a spread that counts all models": (
        "two-models", "selectors", "Deployment/worker-chat: spread counts other pods",
        lambda o: pod(o, "Deployment/worker-chat")["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"].pop(
            "app.kubernetes.io/instance"
        ),
    ),
    "a Service that leads to all models": (
        "two-models", "selectors", "Service/redis: it leads to ['Deployment/worker-chat', 'Deployment/worker-code']",
        lambda o: _spec(o, "Service/redis").update(selector={"app.kubernetes.io/name": "worker"}),
    ),
    "two budgets for one pod": (
        "two-models", "budgets", "Deployment/worker-chat: its pods are under 2 budgets",
        lambda o: _unlabelled(o, "Deployment", "PodDisruptionBudget"),
    ),
    "a budget that covers all models": (
        "two-models", "budgets", "Deployment/worker-code: its pods are under 2 budgets",
        lambda o: _spec(o, "PodDisruptionBudget/worker-chat")["selector"]["matchLabels"].pop(
            "app.kubernetes.io/instance"
        ),
    ),
    "a model without a budget": (
        "two-models", "budgets", "Deployment/worker-code: several replicas without a budget",
        lambda o: o.pop("PodDisruptionBudget/worker-code"),
    ),
    "the sum over all models": (
        "two-models", "scaling", "it counts the requests of all models", lambda o: _metric(o).pop("selector"),
    ),
    "the queue of another model": (
        "two-models", "scaling", "requests of ['Qwen/Qwen2.5-Coder-32B-Instruct'], and its engines serve Qwen/Qwen3-8B",
        lambda o: _count(o, model="Qwen.Qwen2.5-Coder-32B-Instruct"),
    ),
    "the queue of no model": (
        "two-models", "scaling", "it counts the requests of []", lambda o: _count(o, model="not-set"),
    ),
    "a name that no label can have": (
        "two-models", "scaling", "Qwen/Qwen3-8B is no value of a label", lambda o: _count(o, model="Qwen/Qwen3-8B"),
    ),
    "two autoscalers of one model": (
        "two-models", "scaling", "Deployment/worker-code: it has 2 autoscalers",
        lambda o: _spec(o, "HorizontalPodAutoscaler/worker-chat")["scaleTargetRef"].update(name="worker-code"),
    ),
    "routers without room for a second model": (
        "two-models", "resources", "comes to",
        lambda o: container(o)["resources"]["requests"].update(memory="1Gi"),
    ),
    "a model without engines": (
        "two-models", "models", "no engine serves Qwen/Qwen2.5-Coder",
        lambda o: o.pop("Deployment/worker-code"),
    ),
    "two models with one's settings": (
        "two-models", "models", "no engine serves Qwen/Qwen2.5-Coder",
        lambda o: container(o, "Deployment/worker-code").update(
            envFrom=container(o, "Deployment/worker-chat")["envFrom"]
        ),
    ),
    "a pull secret that nobody brings": (
        "two-models", "references", "StatefulSet/redis: no Secret x",
        lambda o: pod(o, "StatefulSet/redis").update(imagePullSecrets=[{"name": "x"}]),
    ),
    "the engines of one model are closed to routers": (
        "two-models", "network", "Deployment/router to Deployment/worker-code: ingress of worker is closed",
        lambda o: _spec(o, "NetworkPolicy/worker")["podSelector"]["matchLabels"].update(
            {"app.kubernetes.io/instance": "chat"}
        ),
    ),
    "nobody scrapes the engines of one model": (
        "two-models", "monitors", "Deployment/worker-code: it is scraped 0 times",
        lambda o: _spec(o, "Deployment/worker-code")["template"]["metadata"].pop("annotations"),
    ),
    "the engines are scraped at a port that they lack": (
        "two-models", "monitors", "Deployment/worker-code: no metrics at 9090/metrics",
        lambda o: _spec(o, "Deployment/worker-code")["template"]["metadata"]["annotations"].update(
            {"prometheus.io/port": "9090"}
        ),
    ),
    "Prometheus is not let in to engines": (
        "two-models", "monitors", "Deployment/worker-code: Prometheus is not let in",
        lambda o: _spec(o, "NetworkPolicy/worker")["ingress"][0]["from"].pop(),
    ),
    "engines are scraped twice": (
        "external", "monitors", "Deployment/worker-code: it is scraped 2 times",
        lambda o: o.update({"PodMonitor/other": o["PodMonitor/worker"]}),
    ),
    "DNS by the pods of the cluster's DNS only": (
        "two-models", "names", "Deployment/router: no way to DNS at 169.254.20.10 by UDP",
        lambda o: _dns(o, to=[KUBE_DNS]),
    ),
    "DNS not at the address of its Service": (
        "two-models", "names", "Deployment/worker-code: no way to DNS at 10.96.0.10 by UDP",
        lambda o: _dns(o, to=[KUBE_DNS, NODE_LOCAL]),
    ),
    "DNS by the node only": (
        "two-models", "names", "no way to DNS at {'k8s-app': 'kube-dns'} by UDP", lambda o: _dns(o, to=[NODE_LOCAL]),
    ),
    "DNS without TCP": (
        "two-models", "names", "no way to DNS at 169.254.20.10 by TCP",
        lambda o: _dns(o, ports=[{"port": 53, "protocol": "UDP"}]),
    ),
    "DNS for routers only": (
        "two-models", "names", "Deployment/worker-chat: no way to DNS",
        lambda o: _spec(o, "NetworkPolicy/dns")["podSelector"]["matchExpressions"][0].update(values=["router"]),
    ),
    "Sentinels that know no names": (
        "sentinel", "names", "StatefulSet/redis: no way to DNS",
        lambda o: _spec(o, "NetworkPolicy/redis")["egress"].pop(),
    ),
    "the overlay for trying things out in production's namespace": (
        "root", "secrets", "a Secret with content",
        lambda o: [item["metadata"].update(namespace="warmfleet") for item in o.values()],
    ),
}  # fmt: skip
