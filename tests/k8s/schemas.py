"""Strict schemas of every kind that the manifests use, each read once: Kubernetes' own, and those of CRDs by hand.

`kubernetes_validate.validate` reads 2 MB of definitions for every object. Here they are read once for all tests.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import jsonschema
from referencing import Registry, Resource

if TYPE_CHECKING:
    from tests.k8s.objects import Manifest

VERSION = "1.37"
_METADATA = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
_FOLDER = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{VERSION}.0-local-strict"


def _object(required: str, **properties: Any) -> dict[str, Any]:
    """An object with these properties and no others; ``required`` names some of them, separated by spaces."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(items: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1}


_TEXT = {"type": "string", "minLength": 1}
_WORDS = {"type": "object", "additionalProperties": {"type": "string"}}
_SECONDS = {"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"}
_SELECTOR = _object("matchLabels", matchLabels=_WORDS)
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_RULE = {
    **_object("expr", alert=_TEXT, record=_TEXT, expr=_TEXT, labels=_WORDS, annotations=_WORDS)
    | {"oneOf": [{"required": ["alert"]}, {"required": ["record"]}]},
}
_RULE["properties"] |= {"for": _SECONDS, "keep_firing_for": _SECONDS}
_ENDPOINT = _object(
    "port",
    port=_TEXT,
    path=_TEXT,
    interval=_SECONDS,
    scheme={"enum": ["http", "https"]},
    tlsConfig=_object("", insecureSkipVerify={"type": "boolean"}),
)
_TLS = _object("mode certificateRefs", mode={"enum": ["Terminate"]}, certificateRefs=_list(_object("name", name=_TEXT)))
_LISTENER = _object(
    "name port protocol tls", name=_TEXT, hostname=_TEXT, port=_PORT, protocol={"enum": ["HTTPS"]}, tls=_TLS
)
_PATH = _object("type value", type={"enum": ["PathPrefix", "Exact"]}, value=_TEXT)
#: A Service, which is told with its port, or an InferencePool.
_BACKEND = {
    "oneOf": [
        _object("name port", name=_TEXT, port=_PORT),
        _object(
            "group kind name",
            group={"const": "inference.networking.k8s.io"},
            kind={"const": "InferencePool"},
            name=_TEXT,
        ),
    ]
}
_ROUTE = _object(
    "backendRefs",
    matches=_list(_object("path", path=_PATH)),
    timeouts=_object("", request=_SECONDS, backendRequest=_SECONDS),
    backendRefs=_list(_BACKEND),
)

#: (apiVersion, kind) -> schema of `spec`, by the published definitions as far as the manifests use them. Every field
#: that stands in them does exist; fields that nothing here uses are left out, so a typing error is an unknown field.
CUSTOM: dict[tuple[str, str], dict[str, Any]] = {
    ("monitoring.coreos.com/v1", "PodMonitor"): _object(
        "selector podMetricsEndpoints", selector=_SELECTOR, podMetricsEndpoints=_list(_ENDPOINT)
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _object(
        "groups", groups=_list(_object("name rules", name=_TEXT, interval=_SECONDS, rules=_list(_RULE)))
    ),
    ("gateway.networking.k8s.io/v1", "Gateway"): _object(
        "gatewayClassName listeners", gatewayClassName=_TEXT, listeners=_list(_LISTENER)
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _object(
        "parentRefs rules",
        parentRefs=_list(_object("name", name=_TEXT, sectionName=_TEXT)),
        hostnames=_list(_TEXT),
        rules=_list(_ROUTE),
    ),
    # By version 1.6 of the Gateway API Inference Extension. Up to 1.4 the picker must be named, and its Service's port.
    ("inference.networking.k8s.io/v1", "InferencePool"): _object(
        "selector targetPorts endpointPickerRef",
        selector=_SELECTOR,
        targetPorts={**_list(_object("number", number=_PORT)), "maxItems": 8, "uniqueItems": True},
        endpointPickerRef=_object(
            "name port",
            group={"const": ""},
            kind={"const": "Service"},
            name=_TEXT,
            port=_object("number", number=_PORT),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
}


def problem_of(item: Manifest) -> str | None:
    """The first fault of an object, as ``where: what``, or None. An unknown kind is a fault, too."""
    group_version, kind = item["apiVersion"], item["kind"]
    try:
        validator = _validator(group_version, kind)
    except FileNotFoundError:
        return f"there is no kind {kind} in {group_version}"
    error = jsonschema.exceptions.best_match(validator.iter_errors(item))
    return None if error is None else f"{'.'.join(map(str, error.path))}: {error.message}"


@cache
def _definitions() -> Registry[Any]:
    return Resource.from_contents(_read("_definitions.json")) @ Registry()


@cache
def _validator(group_version: str, kind: str) -> jsonschema.Draft202012Validator:
    if spec := CUSTOM.get((group_version, kind)):
        metadata = {"$ref": "https://kubernetes.io/api/_definitions.json#/$defs/" + _METADATA}
        schema = _object("apiVersion kind metadata spec", apiVersion=_TEXT, kind=_TEXT, metadata=metadata, spec=spec)
        return jsonschema.Draft202012Validator(schema, registry=_definitions())
    # networking.k8s.io/v1 is "networking-v1" there, and apps/v1 "apps-v1"
    group, _, version = group_version.rpartition("/")
    name = "-".join([kind.lower(), *([group.partition(".")[0]] if group else []), version])
    contents = _read(f"{name}.json")
    registry = Resource.from_contents(contents) @ _definitions()
    return jsonschema.Draft202012Validator(contents, registry=registry)


def _read(name: str) -> Any:
    return json.loads((_FOLDER / name).read_text())
