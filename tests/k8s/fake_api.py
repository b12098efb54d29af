"""A small Kubernetes API server for `kubectl apply`: discovery, CRUD and strict schemas, in memory.

The server runs nothing, and finds the faults that a real server finds before any controller runs: unknown fields and
wrong types (422, naming the field), objects in a namespace that does not exist (404), changed immutable fields (422).
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import parse_qs, urlsplit

import yaml
from tests.k8s.schemas import CUSTOM, VERSION, problem_of

if TYPE_CHECKING:
    from tests.k8s.objects import Manifest

VERBS = ["create", "delete", "get", "list", "patch", "update"]


class Kind(NamedTuple):
    group_version: str
    plural: str
    kind: str
    short: str
    namespaced: bool = True


KINDS = (
    Kind("v1", "namespaces", "Namespace", "ns", namespaced=False),
    Kind("v1", "serviceaccounts", "ServiceAccount", "sa"),
    Kind("v1", "configmaps", "ConfigMap", "cm"),
    Kind("v1", "secrets", "Secret", ""),
    Kind("v1", "services", "Service", "svc"),
    Kind("v1", "persistentvolumeclaims", "PersistentVolumeClaim", "pvc"),
    Kind("apps/v1", "deployments", "Deployment", "deploy"),
    Kind("apps/v1", "statefulsets", "StatefulSet", "sts"),
    Kind("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget", "pdb"),
    Kind("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy", "netpol"),
    Kind("networking.k8s.io/v1", "ingresses", "Ingress", "ing"),
    Kind("autoscaling/v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler", "hpa"),
)
#: Kinds that a cluster has only if its operator installed them.
CUSTOM_KINDS = tuple(Kind(group, f"{kind.lower()}s", kind, "") for group, kind in CUSTOM)


#: Kind -> the fields of its spec that may not change, of those that our manifests have. A StatefulSet has more.
#: A Service without `clusterIP` gets an address, which may not become "None" later, nor the other way round.
IMMUTABLE = {
    "Deployment": ("selector",),
    "StatefulSet": ("selector", "podManagementPolicy", "serviceName"),
    "Service": ("clusterIP",),
}


class Refused(Exception):  # noqa: N818  # an answer, not a fault of the server
    """An answer that is not 2xx, as a Kubernetes Status object."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.body: Manifest = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {}}
        self.body |= {"code": code, "reason": reason, "message": message}


class Target(NamedTuple):
    """The object or collection that a URL names; ``name`` is empty for a collection."""

    kind: Kind
    namespace: str
    name: str


@dataclass
class Store:
    """The objects, and every write that was accepted as (verb, kind, name)."""

    kinds: tuple[Kind, ...] = KINDS
    objects: dict[Target, Manifest] = field(default_factory=dict)
    writes: list[tuple[str, str, str]] = field(default_factory=list)
    version: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, target: Target) -> Manifest:
        if target not in self.objects:
            raise Refused(404, "NotFound", f'{target.kind.plural} "{target.name}" not found')
        return self.objects[target]

    def items(self, target: Target, labels: dict[str, str]) -> list[Manifest]:
        return [
            found
            for key, found in self.objects.items()
            if key[0] == target.kind
            and target.namespace in ("", key[1])
            and labels.items() <= found["metadata"].get("labels", {}).items()
        ]

    def put(self, verb: str, target: Target, body: Manifest) -> Manifest:
        """Validate and keep ``body``. Raises Refused: 422 names the field, 409 and 404 are as in Kubernetes."""
        exists = target in self.objects
        if exists and body == self.objects[target]:
            return body  # like a real server: a write that changes nothing does not count
        if verb == "create" and exists:
            raise Refused(409, "AlreadyExists", f'{target.kind.plural} "{target.name}" already exists')
        home = Target(KINDS[0], "", target.namespace)
        if target.kind.namespaced and home not in self.objects:
            raise Refused(404, "NotFound", f'namespaces "{target.namespace}" not found')
        if problem := problem_of(body):
            raise Refused(422, "Invalid", f"{target.kind.kind} {target.name}: {problem}")
        for name in IMMUTABLE.get(target.kind.kind, ()) if exists else ():
            if self.objects[target]["spec"].get(name) != body["spec"].get(name):
                raise Refused(422, "Invalid", f"{target.kind.kind} {target.name}: spec.{name}: field is immutable")
        self.version += 1
        body["metadata"] |= {
            "resourceVersion": str(self.version),
            "uid": body["metadata"].get("uid", f"uid-{self.version}"),
        }
        self.objects[target] = body
        self.writes.append((verb, target.kind.kind, target.name))
        return body

    def delete(self, target: Target) -> Manifest:
        found = self.get(target)
        del self.objects[target]
        self.writes.append(("delete", target.kind.kind, target.name))
        return found


class FakeApi:
    """``with FakeApi() as api:`` serves on ``api.url`` (loopback, a free port) until the block ends.

    custom: whether the cluster has the CRDs of Prometheus' operator, the Gateway API and its Inference Extension.
    """

    def __init__(self, *, custom: bool = False) -> None:
        self.store = Store(KINDS + CUSTOM_KINDS if custom else KINDS)
        handler = type("Handler", (_Handler,), {"store": self.store})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = (
        True  # header and body are two writes: with Nagle's algorithm each answer would take 40 ms
    )
    store: Store
    raw: bytes

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def do_PUT(self) -> None:
        self._answer(lambda: self.store.put("update", self._target(), self._body()))

    def do_PATCH(self) -> None:
        self._answer(self._patch)

    def do_DELETE(self) -> None:
        self._answer(lambda: self.store.delete(self._target()))

    def _get(self) -> Manifest:
        path = urlsplit(self.path).path.strip("/")
        found = discovery(path, self.store.kinds)
        if found is not None:
            return found
        target = self._target()
        if target.name:
            return self.store.get(target)
        kind = target.kind
        asked = parse_qs(urlsplit(self.path).query).get("labelSelector", [""])[0]
        items = self.store.items(target, dict(part.split("=") for part in asked.split(",") if part))
        return {"kind": f"{kind.kind}List", "apiVersion": kind.group_version, "metadata": {}, "items": items}

    def _post(self) -> Manifest:
        body, target = self._body(), self._target()
        return self.store.put("create", target._replace(name=body["metadata"]["name"]), body)

    def _patch(self) -> Manifest:
        target = self._target()
        return self.store.put("patch", target, strategic_merge(self.store.get(target), self._body()))

    def _body(self) -> Manifest:
        return dict(yaml.safe_load(self.raw))  # kubectl sends JSON or YAML, and JSON is YAML

    def _target(self) -> Target:
        parts = urlsplit(self.path).path.strip("/").split("/")
        group_version, rest = ("v1", parts[2:]) if parts[0] == "api" else ("/".join(parts[1:3]), parts[3:])
        namespace = rest[1] if len(rest) > 2 and rest[0] == "namespaces" else ""
        plural, *name = rest[2:] if namespace else rest or [""]
        for kind in self.store.kinds:
            if (kind.group_version, kind.plural) == (group_version, plural):
                return Target(kind, namespace, name[0] if name else "")
        raise Refused(404, "NotFound", f"no resource at {self.path}")

    def _answer(self, respond: Any) -> None:
        created = self.command == "POST"
        # Read the body in any case: unread bytes would be taken for the next request on this connection.
        self.raw = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            with self.store.lock:
                code, body = 201 if created else 200, respond()
        except Refused as refused:
            code, body = refused.code, refused.body
        raw = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
        """Log nothing: the answer says what failed."""


def discovery(path: str, kinds: tuple[Kind, ...]) -> Manifest | None:
    """The discovery documents that kubectl reads before its first request; None for any other path."""
    groups = sorted({kind.group_version for kind in kinds} - {"v1"})
    if path == "version":
        return {"major": "1", "minor": VERSION.split(".")[1], "gitVersion": f"v{VERSION}.0"}
    if path == "api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "apis":
        versions = [{"groupVersion": group, "version": group.split("/")[1]} for group in groups]
        found = [{"name": v["groupVersion"].split("/")[0], "versions": [v], "preferredVersion": v} for v in versions]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": found}
    group_version = path.removeprefix("apis/").removeprefix("api/")
    if group_version not in {"v1", *groups}:
        return None
    resources = [
        {"name": kind.plural, "singularName": kind.kind.lower(), "namespaced": kind.namespaced, "kind": kind.kind}
        | {"verbs": VERBS, "shortNames": [kind.short] if kind.short else []}
        for kind in kinds
        if kind.group_version == group_version
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": resources}


#: By which field Kubernetes merges the objects of a list; any other list is replaced.
MERGE_KEYS = {"topologySpreadConstraints": "topologyKey", "volumeMounts": "mountPath", "ports": "containerPort"}


def strategic_merge(current: Any, patch: Any, field_name: str = "") -> Any:
    """Apply kubectl's strategic merge patch, as far as the lists of our kinds need it."""
    if isinstance(patch, dict):
        merged = dict(current) if isinstance(current, dict) else {}
        for key, value in patch.items():
            if key.startswith("$"):  # $setElementOrder, $retainKeys: hints that these kinds do not need
                continue
            merged[key] = strategic_merge(merged.get(key), value, key)
            if value is None:
                del merged[key]
        return merged
    by = MERGE_KEYS.get(field_name, "name")
    if isinstance(patch, list) and isinstance(current, list) and all(isinstance(i, dict) and by in i for i in patch):
        found = {item[by]: item for item in current}
        for item in patch:
            found[item[by]] = strategic_merge(found.get(item[by]), item)
            if item.get("$patch") == "delete":
                del found[item[by]]
        return list(found.values())
    return patch
